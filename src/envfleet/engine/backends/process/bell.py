"""How a worker is woken and how it says that it is done: a bell, which counts how often it rang.

The parent waits for many workers at once, so their bells for "done" are counters in the kernel
with a descriptor that can be polled (`Bell`). A worker waits for nothing but commands, so its bell
is a word in shared memory on which the kernel lets it sleep (`WordBell`): it needs no descriptor.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial

import numpy as np

from envfleet.engine.rows import wait_for_count
from envfleet.engine.rows_python import wake

HAS_EVENTFD = hasattr(os, "eventfd")


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

    The ringing side writes the new count into the word before it calls `ring`.
    """

    fd = write_fd = -1

    def __init__(self, words: memoryview) -> None:
        self._words, self._taken = np.frombuffer(words, np.uint64), 0

    def ring(self) -> None:
        """Wake the side that waits, if it sleeps."""
        wake(self._words)

    def take(self) -> int:
        """Wait until the word has been counted up; returns by how much."""
        now = wait_for_count(self._words, self._taken)
        count, self._taken = now - self._taken, now
        return count

    def close(self) -> None:
        """Let go of the memory."""
        self.__dict__.pop("_words", None)
