"""Checkpoints: whole or not there, the newest whole one is found.

A checkpoint is written beside its place and moved there at once, so a kill at any moment leaves the
previous one. What is read back is checked byte by byte against the sums in the file; it holds
pickles, so load only what you trust.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from envfleet.errors import CheckpointError

FORMAT = "envfleet checkpoint 1"
LATEST, BEST = "latest.pt", "best.pt"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; afterwards it is there as a whole, even if the machine stops."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as exc:  # torch says by the latter that the disk is full
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(str(path), f"cannot be written: {exc}") from exc


def load(path: Path, device: str = "cpu") -> dict[str, Any]:
    """Read a checkpoint, or say what is wrong with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise CheckpointError(str(path), f"is damaged (in {broken})")
        state = torch.load(path, map_location=device, weights_only=False)
    except FileNotFoundError as exc:
        raise CheckpointError(str(path), "does not exist") from exc
    except (zipfile.BadZipFile, EOFError, pickle.UnpicklingError, RuntimeError) as exc:
        raise CheckpointError(str(path), f"is damaged or no checkpoint ({exc})") from exc
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(str(path), "was not written by this version of envfleet")
    return state


class CheckpointFolder:
    """The checkpoints of one run: the last few, the newest as latest.pt, the best as best.pt."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        self.folder, self._keep = folder, keep

    def prepare(self) -> None:
        """Make the folder, and find out now whether it can be written to."""
        probe = self.folder / f".probe.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as exc:
            where = str(self.folder)
            raise CheckpointError(where, f"cannot be written to: {exc.strerror}") from exc

    def write(self, env_steps: int, state: dict[str, Any], *, is_best: bool = False) -> Path:
        """Keep a checkpoint, and forget those that are older than the last few."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{env_steps:012d}.pt"
        save(path, state)
        self._point(LATEST, path)
        if is_best:
            self._point(BEST, path)
        for old in self._numbered()[: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been kept yet."""
        return not (self.folder / LATEST).exists() and not self._numbered()

    def newest(self, device: str = "cpu") -> dict[str, Any]:
        """The newest checkpoint that is whole; a warning names those that are not."""
        tried = [self.folder / LATEST, *reversed(self._numbered())]
        problem: CheckpointError | None = None
        for path in tried:
            try:
                state = load(path, device)
            except CheckpointError as exc:
                problem = problem or exc
                continue
            if problem is not None:
                warnings.warn(f"{problem}; going on from {path.name}", RuntimeWarning, stacklevel=2)
            return state
        raise problem or CheckpointError(str(self.folder), "holds no checkpoint")

    def _numbered(self) -> list[Path]:
        return sorted(self.folder.glob("step_*.pt"))

    def _point(self, name: str, path: Path) -> None:
        """Let another name mean the same bytes."""
        unfinished = self.folder / f".{name}.{os.getpid()}"
        unfinished.unlink(missing_ok=True)
        try:
            os.link(path, unfinished)
        except OSError:  # some file systems have no second names
            shutil.copyfile(path, unfinished)
        unfinished.replace(self.folder / name)
