"""One process at a time in a run's folder.

Two that train in one folder would take back each other's figures and checkpoints. The lock is the
operating system's and goes with its process however that ends, so a killed run can be resumed at
once; workers that were forked do not hold it. Where there are no such locks nobody is kept out.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envfleet.errors import CheckpointError

__all__ = ["LOCK_FILE", "alone_in"]

LOCK_FILE = ".lock"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if it is not there.

    Raises:
        CheckpointError: Another one is in it, or it cannot be written to.
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
                    "is being trained in by another process; wait for its end or stop it first",
                ) from exc
        try:
            yield
        finally:
            if [one.name for one in folder.iterdir()] == [LOCK_FILE]:
                (folder / LOCK_FILE).unlink()  # nothing came of it
