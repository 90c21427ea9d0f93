"""One process at a time in a run's folder.

Two processes would overwrite each other's figures and checkpoints. The operating system releases
the lock when its process ends, however it ends, so a killed run can be resumed at once; forked
workers do not hold it. Where the system has no such locks (Windows), all processes are let in.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envfleet.errors import CheckpointError

__all__ = ["LOCK_FILE", "locked"]

LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it does not exist.

    Raises:
        CheckpointError: Another process holds it, or the folder cannot be written to.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("ab")
    except OSError as exc:
        raise CheckpointError(
            str(folder), f"cannot be written to: {exc.strerror}; choose another folder"
        ) from exc
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(
                    str(folder),
                    "is in use by another process; wait until it ends, or stop it",
                ) from exc
        try:
            yield
        finally:
            if [one.name for one in folder.iterdir()] == [LOCK_FILE]:
                (folder / LOCK_FILE).unlink()  # no run was begun
