"""Copies of a worker that an environment makes by `os.fork` and that come back from it.

A child that an environment forks is its own affair, as long as it ends by itself. One that returns
from the environment's method would be a second writer of the same rows, and would answer for the
worker. So a copy of a worker has rows of its own, which no other process sees, and ends where it
would answer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import NoReturn

import numpy as np

_MAP_FIXED = 0x10
"""On Linux; the module mmap does not have it."""
_COPY_EXIT = 118


class CopyGuard:
    """Knows whether this process is a copy of the worker, and keeps copies off its rows."""

    def __init__(self, first: int, fd: int) -> None:
        """`first` is the worker's first slot; `fd` is the shared block, and must stay open."""
        self._first, self._fd = first, fd
        self._maps: list[tuple[int, int, int]] = []
        self._mmap = ctypes.CDLL(None, use_errno=True).mmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.is_copy = False
        os.register_at_fork(after_in_child=self._note_copy)

    def keep_off(self, part: mmap.mmap, offset: int) -> None:
        """Copies made from now on do not write into this part, which starts at `offset`."""
        address = np.frombuffer(part, np.uint8).ctypes.data
        self._maps.append((address, len(part), offset))

    def end_if_copy(self) -> None:
        """Called before the worker answers."""
        if self.is_copy:
            self._end()

    def _note_copy(self) -> None:
        self.is_copy = True
        if sys.platform != "linux":
            return
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        for address, length, offset in self._maps:
            if self._mmap(address, length, protection, flags, self._fd, offset) != address:
                os._exit(_COPY_EXIT)

    def _end(self) -> NoReturn:
        text = (
            f"envfleet: an environment of the worker that hosts slot {self._first} called os.fork "
            "and came back in both processes. The copy has been ended. Let the child end by "
            "os._exit.\n"
        )
        os.write(2, text.encode())
        os._exit(_COPY_EXIT)
