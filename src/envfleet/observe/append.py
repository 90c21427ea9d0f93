"""Files that only grow, by whole records: a write that fails leaves the file as it was."""

from __future__ import annotations

from pathlib import Path

__all__ = ["append"]


def append(path: Path, record: bytes) -> None:
    """Add a record at the end of a file: all of it, or nothing and an error."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        left = memoryview(record)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            # half a record would spoil those that follow once there is room again
            file.truncate(end)
            raise
