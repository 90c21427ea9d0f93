"""What a caller gets: the rows of some slots, copied out of shared memory, in Gymnasium's shapes.

A `Batch` computes infos and final observations when it is asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.engine.incident import Incident
from envfleet.engine.infos import Info, PackedInfos, collate


def any_set(flags: npt.NDArray[np.bool_]) -> bool:
    """Whether a flag is set; on few flags a fraction of the time of numpy's own."""
    return 1 in flags.tobytes()


NOTHING_PACKED = PackedInfos()


@dataclass(eq=False, slots=True, weakref_slot=True)
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
    _final_obs: Any = field(default=None, init=False, repr=False)
    _infos: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _each_info: list[Info] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        """How many slots."""
        return len(self.slots)

    @property
    def final_obs(self) -> Any:
        """The true successor: the last observation where an episode ended, else `obs`."""
        if self.finals is None:
            return self.obs
        if self._final_obs is None:
            self._final_obs = self.finals.put_into(self.obs)
        return self._final_obs

    @property
    def infos(self) -> dict[str, Any]:
        """Gymnasium's vector form: `key` -> values, `_key` -> which rows have it."""
        if self._infos is None:
            self._infos = self._all_infos()
        return self._infos

    def _all_infos(self) -> dict[str, Any]:
        packed, plain, finals = self.packed, self.plain, self.finals
        infos = _collated(len(self), packed, plain) if packed.groups or plain else {}
        if finals is None:
            return infos
        if infos and infos.keys() & _FINAL_KEYS:  # an environment's own infos have these names
            return _collated(len(self), packed, [*finals.each_info(), *plain])
        infos.update(finals.infos())
        return infos

    def infos_among(self, num_slots: int) -> dict[str, Any]:
        """The same for all slots of a fleet; only those of this batch have infos."""
        packed = self.packed.moved_to(self.slots)
        plain = [(int(self.slots[position]), info) for position, info in self.plain]
        return _collated(num_slots, packed, plain)

    @property
    def each_info(self) -> list[Info]:
        """One dict per row, as its environment gave it."""
        if self._each_info is not None:
            return self._each_info
        each: list[Info] = [{} for _ in self.slots]
        finals = () if self.finals is None else self.finals.each_info()
        for position, info in (*self.packed.each(), *finals, *self.plain):
            each[position].update(info)
        self._each_info = each
        return each


_FINAL_KEYS = {"final_obs", "final_info", "_final_obs", "_final_info"}


@dataclass(slots=True)
class Finals:
    """The last observations and infos of the episodes that ended in a batch."""

    ended: npt.NDArray[np.bool_]
    """Which rows of the batch are ends, and"""
    positions: list[int]
    """their numbers."""
    lasts: npt.NDArray[Any]
    """By row of the batch, the last observation where it is an end; else None."""
    space: Any
    """The space of the observations; None in a mixed fleet."""
    packed: PackedInfos = NOTHING_PACKED
    """The last infos that came as fields, by their position in the whole batch."""
    plain: Sequence[tuple[int, Info]] = ()
    """The other last infos."""

    @property
    def obs(self) -> list[Any]:
        """The last observations, one for each end."""
        return [self.lasts[position] for position in self.positions]

    def put_into(self, obs: Any) -> Any:
        """A copy of the batch's observations, with the last ones where episodes ended."""
        finals = {position: self.lasts[position] for position in self.positions}
        if self.space is None:
            return tuple(finals.get(position, value) for position, value in enumerate(obs))
        return _with_rows(self.space, obs, finals)

    def infos(self) -> dict[str, Any]:
        """What `infos` of the batch says about them."""
        final_info = {}
        if self.packed.groups or self.plain:
            final_info = _collated(len(self.ended), self.packed, self.plain)
        return {
            "final_obs": self.lasts.copy(),
            "final_info": final_info,
            "_final_obs": self.ended.copy(),
            "_final_info": self.ended.copy(),
        }

    def each_info(self) -> list[tuple[int, Info]]:
        """The same as one dict for each end."""
        infos: dict[int, Info] = dict([*self.packed.each(), *self.plain])
        return [
            (position, {"final_obs": self.lasts[position], "final_info": infos.get(position, {})})
            for position in self.positions
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
