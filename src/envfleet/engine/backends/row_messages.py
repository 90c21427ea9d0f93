"""The rows of one worker as bytes, for backends whose workers do not see the fleet's memory.

Both sides keep memory of the same plan: the parent the fleet's own, a worker its private copy, of
which it uses its own rows only. A command carries what the worker is going to read, and its reply
carries what the worker has written. Both sides run on machines of one kind: bytes are sent as they
lie in memory.

    parent                                     worker
      command, RowMessages.asked(command)  ──►   heed(command, bytes), Worker.handle(command)
      absorb(command, bytes)               ◄──   reply, RowMessages.answered(command)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine.memory import Control, Data
from envfleet.engine.messages import Command, Op
from envfleet.layout import Columns

_GOES_ON = (Op.RESUME, Op.REBUILD)
"""A new environment takes over a slot, whose row is what is left of the old one."""
_WRITES = (Op.STEP, Op.RESET, Op.RESTORE, Op.REBUILD, Op.RESUME)
"""What changes rows."""
_Part = tuple[npt.NDArray[Any], npt.NDArray[np.intp]]
"""An array with an item for each of some slots, and these slots."""


class RowMessages:
    """What commands and replies of one worker carry of its rows."""

    def __init__(self, control: Control, data: Data, worker: int, first: int, count: int) -> None:
        slots = slice(first, first + count)
        numbers = np.arange(first, first + count)
        self._times = np.frombuffer(control.status[worker], np.uint64)[2:4]
        self._actions = _parts(data, data.actions, slots)
        self._rows: list[_Part] = [(array[slots], numbers) for array in control.rows]
        self._rows += _parts(data, data.obs, slots) + _parts(data, data.final_obs, slots)
        self._data, self._slots = data, slots

    @property
    def nbytes(self) -> int:
        """The most that one message carries."""
        sizes = (sum(array.nbytes for array, _ in parts) for parts in (self._actions, self._rows))
        return max(sizes)

    def asked(self, command: Command) -> bytes:
        """What the worker needs to carry out `command`; for the parent."""
        if command.op is Op.STEP:
            return _taken(self._actions, command.slots)
        return _taken(self._rows, command.slots) if command.op in _GOES_ON else b""

    def heed(self, command: Command, carried: bytes) -> None:
        """Put what came with `command` in its place; for the worker."""
        if carried:
            _put(self._actions if command.op is Op.STEP else self._rows, command.slots, carried)

    def answered(self, command: Command) -> bytes:
        """What the worker wrote for `command`; for the worker."""
        rows = _taken(self._rows, command.slots) if command.op in _WRITES else b""
        return self._times.tobytes() + rows

    def absorb(self, command: Command, carried: bytes) -> None:
        """Put what came with the reply in its place; for the parent."""
        self._times[:] = np.frombuffer(carried, np.uint64, 2)
        if command.op in _WRITES:
            _put(self._rows, command.slots, carried[self._times.nbytes :])
        if command.page:
            self._data.keep(command.page, self._slots)


def _parts(data: Data, columns: Sequence[Columns], slots: slice) -> list[_Part]:
    """The rows of these slots, which are neighbours in each group of equal spaces."""
    parts: list[_Part] = []
    groups, rows = data.group_of[slots], data.row_of[slots]
    for group in np.unique(groups).tolist():
        where = np.flatnonzero(groups == group)
        mine = slice(int(rows[where[0]]), int(rows[where[-1]]) + 1)
        parts += [(array[mine], where + slots.start) for array in columns[group].arrays]
    return parts


def _chosen(part: _Part, slots: Sequence[int] | None) -> slice | npt.NDArray[np.bool_]:
    return slice(None) if slots is None else np.isin(part[1], list(slots))


def _taken(parts: Sequence[_Part], slots: Sequence[int] | None) -> bytes:
    return b"".join([part[0][_chosen(part, slots)].tobytes() for part in parts])


def _put(parts: Sequence[_Part], slots: Sequence[int] | None, carried: bytes) -> None:
    start = 0
    for part in parts:
        array, where = part[0], _chosen(part, slots)
        place = array[where]
        if place.size:
            values = np.frombuffer(carried, array.dtype, place.size, start)
            array[where] = values.reshape(place.shape)
            start += place.nbytes
