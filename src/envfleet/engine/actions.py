"""Writes a caller's actions into the rows of their slots, and keeps them in the action log."""

from __future__ import annotations

from typing import Any

from envfleet.engine.episodes import ActionLog
from envfleet.engine.rows import put_rows
from envfleet.engine.slots import SlotSet
from envfleet.engine.workers import Workers
from envfleet.errors import ActionError, LayoutMismatch

Spills = dict[int, Any]
"""Position in the set of slots -> the part of its action that did not fit into its row."""


class ActionWriter:
    """Writes batches of actions."""

    def __init__(self, workers: Workers, action_log: ActionLog | None) -> None:
        """Without a log nothing is kept of what was sent."""
        self._workers, self._action_log, self._data = workers, action_log, workers.data
        self._is_mixed = len(workers.data.space_groups) > 1
        self._plain = None if self._is_mixed else workers.data.actions[0].sole_array

    def put(self, slot_set: SlotSet, actions: Any) -> list[Any] | None:
        """Write actions, one per slot of the set; returns what did not fit, by slot, if any."""
        kept: Any
        rows, spills = slot_set.rows, None
        if (
            self._plain is not None
            and isinstance(rows, slice)
            and put_rows(self._plain, rows.start, rows.stop, actions)
        ):
            kept = None if self._action_log is None else actions.copy()
        else:
            put = self._put_mixed if self._is_mixed else self._put_batch
            kept, spills = put(slot_set, actions)
        if spills:
            self._workers.check_payload(spills, "an action")
        if self._action_log is not None:
            self._action_log.sent(None if slot_set.is_all else slot_set.slots, kept)
        if not spills:
            return None
        return [spills.get(index) for index in range(len(slot_set.slots))]

    def _put_batch(self, slot_set: SlotSet, actions: Any) -> tuple[Any, Spills | None]:
        columns = self._data.actions[0]
        try:
            spills = columns.write_batch(slot_set.rows, actions)
        except LayoutMismatch as exc:
            raise ActionError(
                f"the actions for {len(slot_set.slots)} slots do not fit the action space "
                f"{self._workers.facts[0].action_space}: {exc}"
            ) from exc
        if self._action_log is None:
            return None, spills
        # read back from the rows: environments are given what those hold, of the type of the space
        if columns.sole_array is not None:
            return columns.read_batch(slot_set.rows), None
        return columns.read_each(slot_set.rows, spills), spills

    def _put_mixed(self, slot_set: SlotSet, actions: Any) -> tuple[list[Any], Spills]:
        slots = slot_set.slots.tolist()
        if len(actions) != len(slots):
            raise ActionError(f"{len(slots)} slots need {len(slots)} actions, got {len(actions)}")
        spills: Spills = {}
        kept = []
        for index, (slot, action) in enumerate(zip(slots, actions, strict=True)):
            kind, row = int(self._data.group_of[slot]), int(self._data.row_of[slot])
            try:
                spill = self._data.actions[kind].writer(row)(action)
            except LayoutMismatch as exc:
                space = self._workers.facts[slot].action_space
                raise ActionError(f"the action of slot {slot} does not fit {space}: {exc}") from exc
            if spill is not None:
                spills[index] = spill
            kept.append(self._data.actions[kind].read(row, spill))
        return kept, spills
