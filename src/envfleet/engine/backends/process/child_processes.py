"""Processes that a worker's environments have started, to be ended with a worker that is killed.

An environment ends its own in `close`, which is not called in a worker that is killed. While the
worker lives they are found through the kernel's lists of children. Those of one that was killed
from outside have no parent any more, so what a worker starts carries its mark: programs have it in
their environment variables, and copies of the worker as an open file of that name. A process group
for each worker would find them too, but would also take them, and the worker, out of the group that
a terminal or `timeout` ends as a whole. Where there are no such lists none are found.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import signal
from collections.abc import Callable
from functools import partial

_KEEPS_ACCOUNT = b"resource_tracker"
"""multiprocessing's and loky's: it gives back what its users leave, then ends by itself."""
_MARK = "ENVFLEET_WORKER"


def mark_offspring(mark: str) -> None:
    """Called in a worker: all that it starts from now on carries this mark."""
    os.environ[_MARK] = mark
    if hasattr(os, "memfd_create"):
        os.memfd_create(f"{_MARK}={mark}")  # open as long as the worker lives


def hold_marked(mark: str) -> list[int]:
    """Descriptors of all that carry this mark, and of what they have started, for `end`."""
    held: list[int] = []
    if hasattr(os, "pidfd_open"):
        words = f"{_MARK}={mark}".encode()
        for path in glob.glob("/proc/[0-9]*"):
            pid = int(path.rpartition("/")[2])
            if _carries(pid, words):
                held += _hold(pid, partial(_carries, pid, words))
    return held


def hold_offspring(pid: int) -> list[int]:
    """Descriptors of all that this process has started, and they in turn, for `end`."""
    held: list[int] = []
    if hasattr(os, "pidfd_open"):
        for child in _children(pid):
            held += _hold(child, partial(_is_child, child, pid))
    return held


def _hold(pid: int, is_it: Callable[[], bool]) -> list[int]:
    """One process and what it has started, unless another has its number by now."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # it has ended, or there are too many
        return []
    held = [fd]
    if is_it():
        held += hold_offspring(pid)
        if _KEEPS_ACCOUNT not in _read_child_file(f"/proc/{pid}/cmdline"):
            return held
    os.close(fd)
    return held[1:]


def await_end(pid: int, limit_s: float) -> bool:
    """Wait until a process that was killed has ended; False if that cannot be told."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # too many open files
        return False
    try:
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        return bool(waiting.poll(limit_s * 1000))
    finally:
        os.close(fd)


def state_of(pid: int | None) -> str:
    """The kernel's letter for what a process is doing; empty where it does not tell."""
    words = _read_child_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return words[0].decode() if words else ""


def end(held: list[int]) -> None:
    """End those that are held."""
    for fd in held:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def _children(pid: int) -> list[int]:
    lists = [_read_child_file(path) for path in glob.glob(f"/proc/{pid}/task/*/children")]
    return [int(child) for words in lists for child in words.split()]


def _carries(pid: int, words: bytes) -> bool:
    if words in _read_child_file(f"/proc/{pid}/environ").split(b"\0"):
        return True
    with contextlib.suppress(OSError):  # it is another user's, or has ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if words in os.fsencode(os.readlink(f"/proc/{pid}/fd/{fd}")):
                    return True
    return False


def _is_child(pid: int, of_pid: int) -> bool:
    words = _read_child_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return bool(words) and int(words[1]) == of_pid


def _read_child_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
