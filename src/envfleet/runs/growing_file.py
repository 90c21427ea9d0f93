"""Data that is only appended to, and that a checkpoint names by its length.

A replay buffer may have gigabytes, most of which every checkpoint would write again. In a growing
file each byte is written once: a checkpoint keeps the file's name, its length and a checksum (its
*mark*), and a run that goes on from there drops what was appended later.

    data = GrowingFile(folder / "replay.bin")
    data.append(rows.tobytes())
    checkpoints.write(steps, {"replay": data.mark(), ...})
    ...
    data = GrowingFile(folder / "replay.bin")
    data.go_on(state["replay"])   # as long as it was then
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envfleet.errors import CheckpointError
from envfleet.observe.append import append

__all__ = ["GrowingFile"]

_READ_BYTES = 1 << 22


class GrowingFile:
    """A file of a run's folder that only grows."""

    def __init__(self, path: Path) -> None:
        """Begin an empty file; what an earlier run left there goes with the first `append`."""
        self.path, self.length, self._checksum = path, 0, 0

    def append(self, record: bytes) -> None:
        """Add these bytes at the end: all of them, or none and an error."""
        if not self.length:
            self.path.write_bytes(b"")
        append(self.path, record)
        self.length += len(record)
        self._checksum = zlib.crc32(record, self._checksum)

    def mark(self) -> dict[str, Any]:
        """What a checkpoint keeps; all that was appended is on the disk when this returns."""
        if self.length:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return {"name": self.path.name, "length": self.length, "checksum": self._checksum}

    def go_on(self, mark: Mapping[str, Any]) -> None:
        """Continue from a mark: what was appended after it is dropped.

        Raises:
            CheckpointError: The file is not the one that was marked, or has lost some of it.
        """
        if mark["name"] != self.path.name:
            problem = f"is not the marked file, which is {mark['name']!r}"
            raise CheckpointError(str(self.path), problem)
        self.length = self._checksum = 0
        if not mark["length"]:
            return
        try:
            self._check(mark["length"], mark["checksum"])
            os.truncate(self.path, mark["length"])
        except OSError as exc:
            raise CheckpointError(str(self.path), f"cannot be used: {exc.strerror}") from exc

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes from `start` to `stop`, or to the end."""
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read((self.length if stop is None else stop) - start)

    def _check(self, length: int, checksum: int) -> None:
        with self.path.open("rb") as file:
            while self.length < length:
                some = file.read(min(_READ_BYTES, length - self.length))
                if not some:
                    raise CheckpointError(
                        str(self.path),
                        f"has {self.length:,} bytes, the checkpoint needs {length:,}",
                    )
                self.length += len(some)
                self._checksum = zlib.crc32(some, self._checksum)
        if self.length != length or self._checksum != checksum:
            raise CheckpointError(str(self.path), "is damaged: its bytes are not those marked")
