"""Makes batches of the rows of slots, of the replies of their workers, and of incidents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from envfleet.engine.batch import NOTHING_PACKED, Batch, Finals, any_set
from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.incident import Incident
from envfleet.engine.infos import NO_INFO, Info, PackedInfos, Schema
from envfleet.engine.memory import Control, Data
from envfleet.engine.messages import Reply
from envfleet.engine.options import Autoreset
from envfleet.engine.rows import common_number, copy_rows, take_ended
from envfleet.engine.slots import Slots, WorkerPart
from envfleet.errors import LayoutMismatch
from envfleet.layout import Columns

PlainInfos = list[tuple[int, Info]]


class BatchReader:
    """Makes batches of rows, of what workers have replied, and of incidents."""

    def __init__(
        self, control: Control, data: Data, worker_of: Slots, autoreset: Autoreset, *, copy: bool
    ) -> None:
        self._control, self._data, self._worker_of = control, data, worker_of
        self._autoreset, self._copy = autoreset, copy
        self.is_mixed = len(data.space_groups) > 1
        self._plain_obs = data.obs[0].sole_array if copy and not self.is_mixed else None
        self._plain_finals = None if self.is_mixed else data.final_obs[0].sole_array
        self.spills: dict[int, dict[int, Any]] = {}
        """Parts of each slot's last observation that its row could not hold."""
        self._has_cells = any(
            field.kind in ("text", "ragged")
            for kind in data.space_groups
            for field in kind.observation.fields
        )
        self._last: dict[int, tuple[Any, int]] = {}
        """Where texts and sequences may spill: the batch each slot was last in, and its row."""
        self._kept_obs: dict[int, Any] | npt.NDArray[Any] | None = None
        """What slots observed before they were sent last, where `keep_obs` was asked to."""
        self._before_poison: dict[int, Any] = {}
        """Observations of slots in flight whose rows have been filled with junk."""
        self._final_spills: dict[int, dict[int, Any]] = {}
        self._infos: dict[int, Info] = {}
        self._final_infos: dict[int, Info] = {}
        self._incidents: dict[int, Incident] = {}
        self._later: dict[int, Incident] = {}
        """Incidents of slots whose row from before the failure has not been handed out yet."""
        self._schemas: list[list[Schema]] = [[] for _ in range(int(worker_of[-1]) + 1)]
        self._has_schemas = False
        self._uniform: dict[int, Schema | None] = {}
        self._positions = np.arange(len(worker_of))
        self._positions.flags.writeable = False

    # ---- replies and incidents ------------------------------------------------------------------

    def absorb(self, part: WorkerPart, reply: Reply | None) -> None:
        """A command for these slots was answered: keep what is new, forget what it replaces."""
        if self.spills:
            # a slot that failed has no new observation
            failed = {failure.slot for failure in reply.failures} if reply is not None else ()
            for slot in part.slots.tolist():
                if slot not in failed:
                    self.spills.pop(slot, None)
        if reply is None:
            return
        self._infos.update(reply.infos)
        self._final_infos.update(reply.final_infos)
        self._final_spills.update(reply.final_spills)
        self.spills.update(reply.spills)
        if reply.schemas:
            self._schemas[part.worker] += reply.schemas
            self._has_schemas = True
            self._uniform.clear()
        if reply.failures and self._autoreset == "same_step" and self._has_schemas:
            # An episode ended and the reset after it failed: its last info is handed out with the
            # row of the restart, which writes another into the cell.
            slots = np.array([failure.slot for failure in reply.failures])
            ended = self._control.terminated[slots] | self._control.truncated[slots]
            self._keep_packed(slots[ended], final=True)

    def attach(self, incident: Incident, slots: Sequence[int], unreceived: set[int]) -> None:
        """The next rows of these slots carry the incident; those that wait already are older."""
        for slot in slots:
            (self._later if slot in unreceived else self._incidents)[slot] = incident

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the infos and incidents of these slots."""
        self.forget_infos(slots)
        for kept in (self._incidents, self._later):
            for slot in slots:
                kept.pop(slot, None)

    def forget_infos(self, slots: Sequence[int]) -> None:
        """Drop the infos of these slots."""
        said = (self._infos, self._final_infos, self._final_spills, self._before_poison)
        for kept in said:
            for slot in slots:
                kept.pop(slot, None)

    def forget_worker(self, worker: int, unreceived: set[int]) -> None:
        """A worker was replaced: the new one numbers its schemas from 1 again.

        Infos of rows that have not been handed out are read now, and kept as dicts.
        """
        slots = np.flatnonzero(self._worker_of == worker)
        waiting = slots[[slot in unreceived for slot in slots.tolist()]]
        self._keep_packed(waiting, final=False)
        # a cell holds the last info of an earlier episode until the next one ends
        ends = self._control.terminated[waiting] | self._control.truncated[waiting]
        self._keep_packed(waiting[ends], final=True)
        self._control.schemas[slots] = self._control.final_schemas[slots] = NO_INFO
        self._schemas[worker] = []
        self._uniform.clear()

    def _keep_packed(self, slots: Slots, *, final: bool) -> None:
        """Read the infos, or last infos, in the cells of these slots, and keep them as dicts."""
        kept = self._final_infos if final else self._infos
        for position, info in self._packed(slots, slots, final=final).each():
            kept.setdefault(int(slots[position]), info)

    def mend_rows(self, slots: Sequence[int]) -> None:
        """Write a value into rows that have none, or only a part because their worker died."""
        for slot in slots:
            kind, row = int(self._data.group_of[slot]), int(self._data.row_of[slot])
            try:
                if slot not in self._before_poison:
                    self.observation(slot)
                    continue
                value = self._before_poison.pop(slot)
            except LayoutMismatch:
                value = self._last_handed_out(slot, kind)
            spill = self._data.obs[kind].writer(row)(value)
            if spill is not None:
                self.spills[slot] = spill

    def answered(self, slots: Sequence[int]) -> None:
        """The workers have written the rows of these slots: there is no junk in them."""
        for slot in slots:
            self._before_poison.pop(slot, None)

    def poison(self, slots: Slots, rows: slice | Slots) -> None:
        """Fill the rows of slots that are sent with junk, unless the fleet is mixed."""
        if not self.is_mixed:
            for slot in slots.tolist():
                self._before_poison[slot] = self.observation(slot)
            self._data.obs[0].poison(rows)

    def keep_obs(self, slots: Slots, rows: slice | Slots) -> None:
        """Keep what these slots observe: their rows are going to be written."""
        sole = None if self.is_mixed else self._data.obs[0].sole_array
        if self._kept_obs is None:
            self._kept_obs = {} if sole is None else sole.copy()
        if isinstance(self._kept_obs, dict):
            for slot in slots.tolist():
                self._kept_obs[slot] = self.observation(slot)
        elif sole is not None:
            self._kept_obs[rows] = sole[rows]

    def kept_obs(self, slot: int) -> Any:
        """What this slot observed before it was sent."""
        assert self._kept_obs is not None
        return detached_copy(self._kept_obs[slot])

    def take_back_resets(self, slots: Sequence[int]) -> None:
        """same_step: put back the last observations of episodes whose end was not handed out."""
        control = self._control
        for slot in slots:
            if control.terminated[slot] or control.truncated[slot]:
                kind, row = int(self._data.group_of[slot]), int(self._data.row_of[slot])
                try:
                    final = self._read(self._data.final_obs, slot, self._final_spills)
                except LayoutMismatch:
                    continue  # what did not fit into the row is lost with its worker
                self._data.obs[kind].writer(row)(final)

    def _last_handed_out(self, slot: int, kind: int) -> Any:
        """The observation the caller last had of a slot, or some value if it had none."""
        space = self._data.space_groups[kind].observation.space
        if slot not in self._last:
            batch, position = create_empty_array(space, n=1), 0
            if batch is None:  # of a space that is not Gymnasium's own
                return None
        else:
            batch, position = self._last[slot]
            if self.is_mixed:
                return batch[position]
        rows = iterate(batch_space(space, position + 1), batch)
        return next(islice(iter(rows), position, None))

    # ---- rows -----------------------------------------------------------------------------------

    def batch(self, slots: Slots, rows: slice | Slots, page: int = 0) -> Batch:
        """The rows of these slots; `rows` are the same, as a slice where they are neighbours."""
        control = self._control
        if self._before_poison:
            self.answered(slots.tolist())
        pages = self._data.pages if page else None
        if isinstance(rows, slice):
            plain_obs = self._plain_obs if pages is None else None
            obs, rewards, terminated, truncated, valid, has_events = copy_rows(
                plain_obs, control.rewards, control.flags, rows.start, rows.stop
            )
        else:
            obs = None
            terminated, truncated, invalid = flags = control.flags[:, rows].copy()
            rewards, valid, has_events = control.rewards[rows], ~invalid, any_set(flags)
        if pages is not None:
            obs = pages[page - 1, rows]
        elif obs is None:
            obs = self.observations(slots, rows)
        plain: PlainInfos = []
        finals = None
        if has_events and self._autoreset == "same_step":
            finals = self._take_finals(slots, rows, terminated, truncated)
        incidents: tuple[Incident, ...] = ()
        if self._infos or self._incidents or self._later:
            incidents = self._take_news(slots, plain)
        return Batch(
            slots=slots,
            obs=obs,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            has_events=has_events,
            incidents=incidents,
            page=page,
            packed=self._packed(slots, rows) if self._has_schemas else NOTHING_PACKED,
            plain=plain,
            finals=finals,
        )

    def observations(self, slots: Slots, rows: slice | Slots) -> Any:
        """The last observations of these slots."""
        obs = self._observations(slots, rows)
        if self._has_cells:
            for position, slot in enumerate(slots.tolist()):
                self._last[slot] = (obs, position)
        return obs

    def _observations(self, slots: Slots, rows: slice | Slots) -> Any:
        if self.is_mixed:
            return tuple(self.observation(slot) for slot in slots.tolist())
        spills = None
        if self.spills:
            spills = {
                position: self.spills[slot]
                for position, slot in enumerate(slots.tolist())
                if slot in self.spills
            }
        return self._data.obs[0].read_batch(rows, spills, copy=self._copy)

    def observation(self, slot: int) -> Any:
        """The last observation of one slot, unbatched."""
        return self._read(self._data.obs, slot, self.spills)

    def _read(self, columns: Sequence[Columns], slot: int, spills: dict[int, Any]) -> Any:
        kind, row = int(self._data.group_of[slot]), int(self._data.row_of[slot])
        return columns[kind].read(row, spills.get(slot))

    def _take_finals(
        self,
        slots: Slots,
        rows: slice | Slots,
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
    ) -> Finals | None:
        """same_step: what the episodes that ended in these rows ended with."""
        plain_finals, groups = self._plain_finals, self._data.space_groups
        space = None if self.is_mixed else groups[0].observation.space
        obs: list[Any] | None = None
        if plain_finals is not None and isinstance(rows, slice):
            ended, positions, obs = take_ended(plain_finals, terminated, truncated, rows.start)
        else:
            ended = terminated | truncated
            positions = ended.nonzero()[0].tolist()
        if not positions:
            return None
        if obs is not None and not self._has_schemas and not self._final_infos:
            return Finals(ended, positions, space, obs)
        slots = slots[positions]
        packed, plain = NOTHING_PACKED, []
        if self._has_schemas:
            packed = self._packed(slots, slots, final=True).moved_to(np.array(positions))
        spills = self._final_spills
        if obs is None:
            obs = [self._read(self._data.final_obs, slot, spills) for slot in slots.tolist()]
        for position, slot in zip(positions, slots.tolist(), strict=True):
            spills.pop(slot, None)
            if slot in self._final_infos:
                plain.append((position, self._final_infos.pop(slot)))
        return Finals(ended, positions, space, obs, packed, plain)

    def _take_news(self, slots: Slots, plain: PlainInfos) -> tuple[Incident, ...]:
        incidents: dict[int, Incident] = {}
        for position, slot in enumerate(slots.tolist()):
            info = self._infos.pop(slot, None)
            if info is not None:
                plain.append((position, info))
            incident = self._incidents.pop(slot, None)
            if incident is not None:
                plain.append((position, {"incident": incident}))
                incidents[id(incident)] = incident
            if slot in self._later:
                self._incidents[slot] = self._later.pop(slot)
        return tuple(incidents.values())

    def _packed(self, slots: Slots, rows: slice | Slots, *, final: bool = False) -> PackedInfos:
        """The infos, or last infos, in the cells of these slots."""
        if not len(slots):
            return NOTHING_PACKED
        control = self._control
        all_cells = control.final_infos if final else control.infos
        all_numbers = control.final_schemas if final else control.schemas
        if isinstance(rows, slice):
            common = common_number(all_numbers, rows.start, rows.stop)
            if common == NO_INFO:
                return NOTHING_PACKED
            schema = None if common is None else self._schema_of_all(common)
            if schema is not None:
                cells = all_cells[rows].copy()
                return PackedInfos(((schema, self._positions[: len(slots)], cells),))
        numbers, cells = all_numbers[rows], all_cells[rows].copy()
        groups: dict[Schema, list[int]] = {}
        workers = self._worker_of[slots].tolist()
        for position, number in enumerate(numbers.tolist()):
            schemas = self._schemas[workers[position]]
            # a larger number: the worker died before it could send that schema
            if number != NO_INFO and number <= len(schemas):
                groups.setdefault(schemas[number - 1], []).append(position)
        return PackedInfos(
            tuple((schema, np.array(where), cells[where]) for schema, where in groups.items())
        )

    def _schema_of_all(self, number: int) -> Schema | None:
        """The schema that every worker knows by this number, if they agree."""
        if number not in self._uniform:
            known = {
                schemas[number - 1] if 0 < number <= len(schemas) else None
                for schemas in self._schemas
            }
            self._uniform[number] = known.pop() if len(known) == 1 else None
        return self._uniform[number]
