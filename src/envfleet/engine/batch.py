"""What a caller gets: the rows of some slots, copied out of shared memory, in Gymnasium's shapes.

A `Batch` computes infos and final observations when it is asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.incident import Incident
from envfleet.engine.infos import NO_INFO, Info, PackedInfos, Schema, collate
from envfleet.engine.memory import Control, Data
from envfleet.engine.messages import Reply
from envfleet.engine.options import Autoreset
from envfleet.engine.rows import common_number, copy_rows
from envfleet.engine.slots import Slots, WorkerPart
from envfleet.errors import LayoutMismatch
from envfleet.layout import Columns


def any_set(flags: npt.NDArray[np.bool_]) -> bool:
    """Whether a flag is set; on few flags a fraction of the time of numpy's own."""
    return 1 in flags.tobytes()


_NOTHING_PACKED = PackedInfos()


@dataclass(eq=False)
class Batch:
    """Results of some slots; row i of every field belongs to `slots[i]`."""

    slots: npt.NDArray[np.intp]
    obs: Any
    """What to act on next: batched as Gymnasium does; in a mixed fleet a tuple, one per slot."""
    rewards: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    valid: npt.NDArray[np.bool_]
    """False where the row is not a transition: next_step's reset row, or a restarted slot."""
    has_events: bool
    """Whether some row is an end or not a transition."""
    incidents: tuple[Incident, ...] = ()
    page: int = 0
    """The page that `obs` is a view of, if the workers wrote it there."""
    packed: PackedInfos = field(default=PackedInfos(), repr=False)
    plain: Sequence[tuple[int, Info]] = field(default=(), repr=False)
    finals: Finals | None = field(default=None, repr=False)
    """same_step: what the ended episodes ended with."""

    def __len__(self) -> int:
        """How many slots."""
        return len(self.slots)

    @cached_property
    def final_obs(self) -> Any:
        """The true successor: the last observation where an episode ended, else `obs`."""
        return self.obs if self.finals is None else self.finals.put_into(self.obs)

    @cached_property
    def infos(self) -> dict[str, Any]:
        """Gymnasium's vector form: `key` -> values, `_key` -> which rows have it."""
        num, finals = len(self), self.finals
        has_any = self.packed.groups or self.plain
        infos = _collated(num, self.packed, self.plain) if has_any else {}
        if finals is None:
            return infos
        if infos.keys() & _FINAL_KEYS:  # an environment uses these names for infos of its own
            return _collated(num, self.packed, [*finals.each_info(), *self.plain])
        return infos | finals.infos(num)

    def infos_among(self, num_slots: int) -> dict[str, Any]:
        """The same for all slots of a fleet; only those of this batch have infos."""
        packed = self.packed.moved_to(self.slots)
        plain = [(int(self.slots[position]), info) for position, info in self.plain]
        return _collated(num_slots, packed, plain)

    @cached_property
    def each_info(self) -> list[Info]:
        """One dict per row, as its environment gave it."""
        each: list[Info] = [{} for _ in self.slots]
        finals = () if self.finals is None else self.finals.each_info()
        for position, info in (*self.packed.each(), *finals, *self.plain):
            each[position].update(info)
        return each


_FINAL_KEYS = {"final_obs", "final_info", "_final_obs", "_final_info"}


@dataclass(frozen=True, slots=True)
class Finals:
    """The last observations and infos of the episodes that ended in a batch."""

    positions: npt.NDArray[np.intp]
    """The rows of the batch that are ends."""
    space: Any
    """The space of the observations; None in a mixed fleet."""
    obs: Sequence[Any]
    """The last observations, one for each end."""
    packed: PackedInfos = _NOTHING_PACKED
    """The last infos that came as fields, by their position in the whole batch."""
    plain: Sequence[tuple[int, Info]] = ()
    """The other last infos."""

    def put_into(self, obs: Any) -> Any:
        """A copy of the batch's observations, with the last ones where episodes ended."""
        finals = dict(zip(self.positions.tolist(), self.obs, strict=True))
        if self.space is None:
            return tuple(finals.get(position, value) for position, value in enumerate(obs))
        return _with_rows(self.space, obs, finals)

    def infos(self, num: int) -> dict[str, Any]:
        """What `infos` of a batch of `num` rows says about them."""
        mask = np.zeros(num, np.bool_)
        mask[self.positions] = True
        final_obs = np.full(num, None, object)
        for position, obs in zip(self.positions.tolist(), self.obs, strict=True):
            final_obs[position] = obs
        final_info = {}
        if self.packed.groups or self.plain:
            final_info = _collated(num, self.packed, self.plain)
        return {
            "final_obs": final_obs,
            "final_info": final_info,
            "_final_obs": mask,
            "_final_info": mask.copy(),
        }

    def each_info(self) -> list[tuple[int, Info]]:
        """The same as one dict for each end."""
        infos: dict[int, Info] = dict([*self.packed.each(), *self.plain])
        return [
            (position, {"final_obs": obs, "final_info": infos.get(position, {})})
            for position, obs in zip(self.positions.tolist(), self.obs, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Held:
    """A dict that is not to be collated."""

    value: Info


def _collated(num: int, packed: PackedInfos, plain: Sequence[tuple[int, Info]]) -> dict[str, Any]:
    """Collate infos; dicts that nest too deep for that, or contain themselves, stay as they are."""
    try:
        return collate(num, packed, plain)
    except RecursionError:
        held = [(position, _held(info)) for position, info in plain]
    return _let_go(collate(num, packed, held))


def _held(info: Info) -> Info:
    held = dict(info)
    for key, value in info.items():
        if isinstance(value, dict) and _nests_too_deep(value):
            held[key] = _held(value) if key == "final_info" else _Held(value)
    return held


def _nests_too_deep(info: Info) -> bool:
    try:
        # with room for a few more levels
        collate(1, PackedInfos(), [(0, {"": {"": {"": info}}})])
    except RecursionError:
        return True
    return False


def _let_go(vector: dict[str, Any]) -> dict[str, Any]:
    for values in vector.values():
        if isinstance(values, dict):
            _let_go(values)
        elif isinstance(values, np.ndarray) and values.dtype == object:
            for position, value in enumerate(values):
                if isinstance(value, _Held):
                    values[position] = value.value
    return vector


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
        control = self._control
        for cells, numbers, kept in (
            (control.infos, control.schemas, self._infos),
            (control.final_infos, control.final_schemas, self._final_infos),
        ):
            for position, info in self._packed(slots, slots, cells, numbers).each():
                if int(slots[position]) in unreceived:
                    kept.setdefault(int(slots[position]), info)
            numbers[slots] = NO_INFO
        self._schemas[worker] = []
        self._uniform.clear()

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
            finals = self._take_finals(slots, terminated | truncated)
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
            packed=self._packed(slots, rows, control.infos, control.schemas)
            if self._has_schemas
            else _NOTHING_PACKED,
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

    def _take_finals(self, slots: Slots, ended: npt.NDArray[np.bool_]) -> Finals | None:
        """same_step: what the episodes that ended in these rows ended with."""
        positions = ended.nonzero()[0]
        if not len(positions):
            return None
        slots = slots[positions]
        packed, plain = _NOTHING_PACKED, []
        if self._has_schemas:
            control = self._control
            packed = self._packed(slots, slots, control.final_infos, control.final_schemas)
            packed = packed.moved_to(positions)
        spills = None
        if self._final_infos or self._final_spills:
            spills = {}
            for index, slot in enumerate(slots.tolist()):
                if slot in self._final_infos:
                    plain.append((int(positions[index]), self._final_infos.pop(slot)))
                if slot in self._final_spills:
                    spills[index] = self._final_spills.pop(slot)
        columns = self._data.final_obs
        if self.is_mixed:
            group_of, row_of = self._data.group_of, self._data.row_of
            obs = [
                columns[int(group_of[slot])].read(int(row_of[slot]), (spills or {}).get(index))
                for index, slot in enumerate(slots.tolist())
            ]
            return Finals(positions, None, obs, packed, plain)
        if self._plain_finals is None:
            obs = columns[0].read_each(slots, spills)
        else:
            obs = list(self._plain_finals.take(slots, axis=0))
        return Finals(positions, self._data.space_groups[0].observation.space, obs, packed, plain)

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

    def _packed(
        self,
        slots: Slots,
        rows: slice | Slots,
        all_cells: npt.NDArray[np.uint8],
        all_numbers: npt.NDArray[np.uint16],
    ) -> PackedInfos:
        if not len(slots):
            return _NOTHING_PACKED
        if isinstance(rows, slice):
            common = common_number(all_numbers, rows.start, rows.stop)
            if common == NO_INFO:
                return _NOTHING_PACKED
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


def _with_rows(space: Any, batch: Any, rows: dict[int, Any]) -> Any:
    """A copy of a batched observation of `space` with some rows replaced."""
    if isinstance(batch, np.ndarray):
        changed = batch.copy()
        for position, value in rows.items():
            changed[position] = value
        return changed
    if isinstance(space, spaces.Dict):
        return {
            key: _with_rows(part, batch[key], {i: value[key] for i, value in rows.items()})
            for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(
            _with_rows(part, batch[index], {i: value[index] for i, value in rows.items()})
            for index, part in enumerate(space.spaces)
        )
    return tuple(rows.get(position, value) for position, value in enumerate(batch))
