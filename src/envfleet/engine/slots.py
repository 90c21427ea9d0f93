"""Sets of slots as callers name them, worked out once: who hosts them, are they a slice.

A slice of neighbouring slots is copied in one go; that is why it is worth knowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.errors import ConfigError

Slots = npt.NDArray[np.intp]
_MAX_SETS = 256


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The share of one worker in a set of slots."""

    worker: int
    slots: Slots
    rows: slice | Slots
    """The same slots, as a slice where they are neighbours."""
    is_whole: bool
    """These are all slots of the worker."""
    positions: list[int]
    """Where these slots stand in the set."""


@dataclass(frozen=True, slots=True)
class SlotSet:
    """A set of slots and the workers that share it."""

    slots: Slots
    rows: slice | Slots
    is_all: bool
    parts: tuple[WorkerPart, ...]
    workers: tuple[int, ...] | None = None
    """Those that share it, if it has all their slots."""


class SlotSets:
    """Finds sets of slots; those that were named before are remembered."""

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self._bounds = tuple(bounds)
        self.num_slots = bounds[-1][1]
        self._known: dict[tuple[str, bytes], SlotSet] = {}
        self._own: dict[int, SlotSet] = {}
        """Sets by the identity of their arrays, which batches hand out and callers send back."""
        self.everything = self.make(np.arange(self.num_slots))
        self._known_by_identity(self.everything)
        self._of_workers = {slot_set.workers: slot_set for slot_set in self._own.values()}
        """Sets of single workers and of all."""
        self.worker_of = np.repeat(np.arange(len(bounds)), [hi - lo for lo, hi in bounds])

    def find(self, slots: Sequence[int] | Slots | None) -> SlotSet:
        """The set of these slots (None: all), or an error that says what is wrong with them."""
        if slots is None:
            return self.everything
        own = self._own.get(id(slots))
        if own is not None:
            return own
        named = np.asarray(slots)
        key = (named.dtype.char, named.tobytes())
        slot_set = self._known.get(key)
        if slot_set is None or slot_set.slots.shape != named.shape:
            slot_set = self.make(self._checked(named))
            if len(self._known) >= _MAX_SETS:
                self._known.clear()
                self._own.clear()
                self._known_by_identity(self.everything)
            self._known[key] = slot_set
            self._known_by_identity(slot_set)
        return slot_set

    def _known_by_identity(self, slot_set: SlotSet) -> None:
        """Recognise the arrays of this set and of its parts; they live as long as the entry."""
        for part in slot_set.parts:
            alone = replace(part, positions=list(range(len(part.slots))))
            is_all = part.is_whole and len(self._bounds) == 1
            workers = (part.worker,) if part.is_whole else None
            self._own[id(part.slots)] = SlotSet(part.slots, part.rows, is_all, (alone,), workers)
        self._own[id(slot_set.slots)] = slot_set

    def make(self, slots: Slots) -> SlotSet:
        """Work out the set of valid slots."""
        slots = np.array(slots, np.intp)
        slots.flags.writeable = False  # batches hand it out
        parts = []
        for worker, (lo, hi) in enumerate(self._bounds):
            where = np.flatnonzero((slots >= lo) & (slots < hi))
            if where.size:
                mine = slots[where]
                mine.flags.writeable = False
                rows = _as_rows(mine)
                is_whole = isinstance(rows, slice) and len(mine) == hi - lo
                parts.append(WorkerPart(worker, mine, rows, is_whole, where.tolist()))
        rows = _as_rows(slots)
        is_all = isinstance(rows, slice) and len(slots) == self.num_slots
        is_of_workers = all(part.is_whole for part in parts)
        workers = tuple(part.worker for part in parts) if is_of_workers else None
        return SlotSet(slots, rows, is_all, tuple(parts), workers)

    def of_workers(self, workers: tuple[int, ...]) -> SlotSet:
        """All slots of these workers."""
        slot_set = self._of_workers.get(workers)
        if slot_set is None:
            parts = self.everything.parts
            slot_set = self.find(np.concatenate([parts[worker].slots for worker in workers]))
        return slot_set

    def merge(self, parts: Sequence[WorkerPart]) -> tuple[Slots, slice | Slots]:
        """The slots of several parts together, in order, as a slice if they are neighbours."""
        if len(parts) == 1:
            return parts[0].slots, parts[0].rows
        everything = self.everything
        if len(parts) == len(everything.parts) and all(part.is_whole for part in parts):
            return everything.slots, everything.rows
        if not parts:
            return np.zeros(0, np.intp), slice(0, 0)
        slots = np.concatenate([part.slots for part in parts])
        slots.sort()
        return slots, _as_rows(slots)

    def part_of(self, slots: Sequence[int]) -> WorkerPart:
        """The part of slots that one worker hosts."""
        return self.make(np.array(slots)).parts[0]

    def _checked(self, slots: npt.NDArray[Any]) -> Slots:
        if slots.ndim != 1 or not slots.size or slots.dtype.kind not in "iu":
            raise ConfigError(f"slots must be a non-empty list of slot numbers, got {slots!r}")
        if slots.min() < 0 or slots.max() >= self.num_slots:
            raise ConfigError(
                f"slots must lie between 0 and {self.num_slots - 1}, got {slots.tolist()}"
            )
        if len(np.unique(slots)) != len(slots):
            raise ConfigError(f"a slot may be named only once, got {slots.tolist()}")
        return slots.astype(np.intp)


def _as_rows(slots: Slots) -> slice | Slots:
    first, last = int(slots[0]), int(slots[-1])
    is_run = last - first + 1 == len(slots) and bool((np.diff(slots) == 1).all())
    return slice(first, last + 1) if is_run else slots


def deal(num_slots: int, num_workers: int, num_last: int | None = None) -> list[tuple[int, int]]:
    """Neighbouring slots for each worker; the first get one more where it is uneven.

    With `num_last` the last worker gets so many, and the others share the rest.
    """
    if num_last is not None:
        start = num_slots - num_last
        return [*deal(start, num_workers - 1), (start, num_slots)]
    size, rest = divmod(num_slots, num_workers)
    bounds, start = [], 0
    for worker in range(num_workers):
        end = start + size + (worker < rest)
        bounds.append((start, end))
        start = end
    return bounds


def is_enough(num_ready: int, num_in_flight: int, min_slots: int | None) -> bool:
    """Whether a batch can be given: all that was sent, or `min_slots` of it."""
    coming = num_ready + num_in_flight
    return num_ready >= (coming if min_slots is None else min(min_slots, coming))
