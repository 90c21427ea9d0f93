"""How a worker is woken and how it says that it is done: a bell, which counts how often it rang.

The parent waits for many workers at once, so their bells for "done" are counters in the kernel
with a descriptor that can be polled (`Bell`). A worker waits for nothing but commands, so its bell
is a word in shared memory on which the kernel lets it sleep (`WordBell`): it needs no descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from envfleet.engine.rows import wait_for_count as compiled_wait_for_count

HAS_EVENTFD = hasattr(os, "eventfd")
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_CALL = _FUTEX_CALLS.get(platform.machine()) if sys.platform == "linux" else None
HAS_FUTEX = _FUTEX_CALL is not None and sys.maxsize > 2**32
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class Bell:
    """`ring` adds one, `take` returns how many and sets it to zero; `fd` can be polled."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.fd, self.write_fd = read_fd, write_fd
        self._is_eventfd = read_fd == write_fd
        self.ring: Callable[[], object] = (
            partial(os.eventfd_write, write_fd, 1)
            if self._is_eventfd
            else partial(os.write, write_fd, b"\0")
        )
        """Add one."""

    @classmethod
    def create(cls, *, take_waits: bool) -> Bell:
        """An eventfd where there is one, else a pipe; `take_waits` for a ring, or returns 0."""
        read_fd, write_fd = [os.eventfd(0)] * 2 if HAS_EVENTFD else os.pipe()
        os.set_blocking(read_fd, take_waits)
        return cls(read_fd, write_fd)

    def take(self) -> int:
        """Return the count and set it to zero; if it is zero, wait for a ring or return that."""
        try:
            return os.eventfd_read(self.fd) if self._is_eventfd else len(os.read(self.fd, 4096))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Give up the descriptors of this side."""
        for fd in {self.fd, self.write_fd}:
            if fd >= 0:
                os.close(fd)
        self.fd = self.write_fd = -1
        self.ring = _is_closed  # the other would write to the next file of that number


def _is_closed() -> None:
    raise OSError(errno.EBADF, "this bell is closed")


class WordBell:
    """A bell whose count is the first of some words in shared memory, from 0 on.

    The ringing side writes the new count into the word before it calls `ring`. The kernel compares
    the word with what the waiting side has taken before it lets that sleep, so no ring is missed.
    """

    fd = write_fd = -1

    def __init__(self, words: memoryview) -> None:
        self._words, self._taken = np.frombuffer(words, np.uint64), 0

    def ring(self) -> None:
        """Wake the side that waits, if it sleeps."""
        _syscall(_FUTEX_CALL, _address(self._words), _FUTEX_WAKE, 1, None, None, 0)

    def take(self) -> int:
        """Wait until the word has been counted up; returns by how much."""
        now = wait_for_count(self._words, self._taken)
        count, self._taken = now - self._taken, now
        return count

    def close(self) -> None:
        """Let go of the memory."""
        self.__dict__.pop("_words", None)


def _address(words: npt.NDArray[np.uint64]) -> int:
    """The kernel compares 32 bits: the lower half of the word."""
    return int(words.ctypes.data) + 4 * (sys.byteorder == "big")


def _wait_for_count(words: npt.NDArray[np.uint64], before: int) -> int:
    """Sleep until the first of these words is not what it was; what it is then."""
    while (now := int(words[0])) == before:
        # it returns at once if the word has changed, and early if a signal comes
        _syscall(
            _FUTEX_CALL, _address(words), _FUTEX_WAIT, before & 0xFFFFFFFF, None, None, 0
        )
    return now


wait_for_count: Callable[[npt.NDArray[np.uint64], int], int] = (
    compiled_wait_for_count or _wait_for_count
)
_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)
