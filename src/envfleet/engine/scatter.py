"""A caller's actions into the rows of their slots, and into the journal: `gather`'s counterpart."""

from __future__ import annotations

from typing import Any

import numpy as np

from envfleet.engine.crew import Crew
from envfleet.engine.journal import Journal
from envfleet.engine.routes import Route
from envfleet.engine.rows import put_rows
from envfleet.errors import ActionError, LayoutMismatch

Spills = dict[int, Any]
"""Position in the route -> what of its action did not fit into its row."""


class Scatterer:
    """Takes batches of actions apart."""

    def __init__(self, crew: Crew, journal: Journal | None) -> None:
        """Without a journal nothing is kept of what was sent."""
        self._crew, self._journal, self._data = crew, journal, crew.data
        self._is_mixed = len(crew.data.kinds) > 1
        self._plain = None if self._is_mixed else crew.data.actions[0].sole_array

    def put(self, route: Route, actions: Any) -> list[Any] | None:
        """Write actions, one per slot of the route; returns what did not fit, by slot, if any."""
        kept: Any
        rows, spills = route.rows, None
        if (
            self._plain is not None
            and isinstance(rows, slice)
            and put_rows(self._plain, rows.start, rows.stop, actions)
        ):
            kept = None if self._journal is None else actions.copy()
        else:
            put = self._put_mixed if self._is_mixed else self._put_batch
            kept, spills = put(route, actions)
        if spills:
            self._crew.check_payload(spills, "an action")
        if self._journal is not None:
            self._journal.sent(None if route.is_all else route.slots, kept)
        if not spills:
            return None
        return [spills.get(index) for index in range(len(route.slots))]

    def _put_batch(self, route: Route, actions: Any) -> tuple[Any, Spills | None]:
        columns = self._data.actions[0]
        try:
            spills = columns.write_batch(route.rows, actions)
        except LayoutMismatch as exc:
            raise ActionError(
                f"the actions for {len(route.slots)} slots do not fit the action space "
                f"{self._crew.facts[0].action_space}: {exc}"
            ) from exc
        if self._journal is None:
            return None, spills
        if isinstance(actions, np.ndarray) and spills is None:
            return actions.copy(), None
        return columns.read_each(route.rows, spills), spills

    def _put_mixed(self, route: Route, actions: Any) -> tuple[list[Any], Spills]:
        slots = route.slots.tolist()
        if len(actions) != len(slots):
            raise ActionError(f"{len(slots)} slots need {len(slots)} actions, got {len(actions)}")
        spills: Spills = {}
        for index, (slot, action) in enumerate(zip(slots, actions, strict=True)):
            kind, row = int(self._data.kind_of[slot]), int(self._data.row_of[slot])
            try:
                spill = self._data.actions[kind].writer(row)(action)
            except LayoutMismatch as exc:
                space = self._crew.facts[slot].action_space
                raise ActionError(f"the action of slot {slot} does not fit {space}: {exc}") from exc
            if spill is not None:
                spills[index] = spill
        return list(actions), spills
