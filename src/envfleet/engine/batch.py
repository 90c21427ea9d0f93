"""What a caller gets: the rows of some slots, taken out of shared memory, in Gymnasium's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine.incident import Incident
from envfleet.engine.infos import Info, PackedInfos, collate


def any_set(flags: npt.NDArray[np.bool_]) -> bool:
    """Whether a flag is set; on few flags a fraction of the time of numpy's own."""
    return 1 in flags.tobytes()


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
    """False where the row is no transition: next_step's reset row, or a restarted slot."""
    has_events: bool
    """Some row is an end or no transition."""
    final_obs: Any
    """The true successor: the last observation where an episode ended, else `obs`."""
    incidents: tuple[Incident, ...] = ()
    page: int = 0
    """The page that `obs` is a view of, if it was put there by its workers."""
    packed: PackedInfos = field(default=PackedInfos(), repr=False)
    plain: Sequence[tuple[int, Info]] = field(default=(), repr=False)
    _infos: dict[str, Any] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        """How many slots."""
        return len(self.slots)

    @property
    def infos(self) -> dict[str, Any]:
        """Gymnasium's vector form: `key` -> values, `_key` -> which rows have it."""
        if self._infos is None:
            has_any = self.packed.groups or self.plain
            self._infos = _collated(len(self), self.packed, self.plain) if has_any else {}
        return self._infos

    def infos_among(self, num_slots: int) -> dict[str, Any]:
        """The same for all slots of a fleet, where only this batch's have any."""
        packed = PackedInfos(
            tuple((schema, self.slots[where], cells) for schema, where, cells in self.packed.groups)
        )
        plain = [(int(self.slots[position]), info) for position, info in self.plain]
        return _collated(num_slots, packed, plain)

    @cached_property
    def each_info(self) -> list[Info]:
        """One dict per row, as its environment gave it."""
        each: list[Info] = [{} for _ in self.slots]
        for position, info in (*self.packed.each(), *self.plain):
            each[position].update(info)
        return each


@dataclass(frozen=True, slots=True)
class _Held:
    """Keeps a dict from being taken apart."""

    value: Info


def _collated(num: int, packed: PackedInfos, plain: Sequence[tuple[int, Info]]) -> dict[str, Any]:
    """Collate infos; what nests too deep for that, or in itself, is left as it is."""
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
        # it shall fit a few levels further down as well
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
