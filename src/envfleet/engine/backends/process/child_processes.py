"""Processes that a worker's environments have started, to be ended with a worker that is killed.

An environment ends its own in `close`, which is not called in a worker that is killed. They are
found through the kernel's lists of children while the worker lives, because a dead one has no
children. A process group for each worker would name them longer, but would also take them, and the
worker, out of the group that a terminal or `timeout` ends as a whole. Where there are no such lists
none are found.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal

_KEEPS_ACCOUNT = b"resource_tracker"
"""multiprocessing's and loky's: it gives back what its users leave, then ends by itself."""


def hold_offspring(pid: int) -> list[int]:
    """Descriptors of all that this process has started, and they in turn, to be given to `end`."""
    if not hasattr(os, "pidfd_open"):
        return []
    held: list[int] = []
    for child in _children(pid):
        position = len(held)
        with contextlib.suppress(OSError):  # it has ended, or there are too many
            held.append(os.pidfd_open(child))
            is_it = _parent(child) == pid  # else another has that number by now
            if is_it:
                held += hold_offspring(child)
            if not is_it or _KEEPS_ACCOUNT in _read_child_file(f"/proc/{child}/cmdline"):
                os.close(held.pop(position))
    return held


def end(held: list[int]) -> None:
    """End those that are held."""
    for fd in held:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def _children(pid: int) -> list[int]:
    lists = [_read_child_file(path) for path in glob.glob(f"/proc/{pid}/task/*/children")]
    return [int(child) for words in lists for child in words.split()]


def _parent(pid: int) -> int:
    words = _read_child_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(words[1]) if words else 0


def _read_child_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
