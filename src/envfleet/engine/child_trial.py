"""Trying something in a copy of this process that ends then: nothing here is touched by it.

The copy has no connections and no other threads. What it finds out it says in bytes.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

LIMIT_S = 5.0
"""Longest that a trial may take."""

Say = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Heard:
    """What a child said, and whether it came to an end within the limit."""

    said: bytes
    has_ended: bool


def in_child(work: Callable[[Say], None]) -> Heard | None:
    """Do `work` in a child of this process; None if there cannot be one."""
    read_end, write_end = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other threads: the child needs none of them
            child = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        return None
    if child == 0:
        _work(work, write_end)
    os.close(write_end)
    try:
        return _heard(read_end)
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _heard(read_end: int) -> Heard:
    """Read until the other end is closed, or the limit is over."""
    said, end_s = b"", time.monotonic() + LIMIT_S
    waiting = select.poll()
    waiting.register(read_end, select.POLLIN)
    while True:
        left_s = max(0.0, end_s - time.monotonic())
        if not waiting.poll(left_s * 1000):
            return Heard(said, has_ended=False)
        part = os.read(read_end, 4096)
        if not part:
            return Heard(said, has_ended=True)
        said += part


def _work(work: Callable[[Say], None], write_end: int) -> NoReturn:
    """In the child."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2 * int(LIMIT_S))  # if its parent has ended meanwhile
        faulthandler.disable()
        os.closerange(3, write_end)
        os.closerange(write_end + 1, os.sysconf("SC_OPEN_MAX"))
        work(lambda said: os.write(write_end, said))
    finally:
        os._exit(0)
