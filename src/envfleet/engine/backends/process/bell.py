"""How a worker is woken and how it says that it is done: a bell, which is a counter in the kernel.

The counter is the truth, and ringing and taking it order memory between the two sides. A word in
shared memory may hint that a bell is about to ring, never replace it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial

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
        self.ring = _is_closed  # the other would write to whoever has that descriptor next


def _is_closed() -> None:
    raise OSError(errno.EBADF, "this bell is closed")
