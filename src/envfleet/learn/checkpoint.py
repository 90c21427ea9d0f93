"""Checkpoints: whole or not there, the newest whole one that fits is found.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from envfleet.errors import CheckpointError, ConfigError, EnvfleetError

FORMAT = "envfleet checkpoint 2"
LATEST, BEST = "latest.pt", "best.pt"
PROBE_BYTES = 1 << 16
"""An empty file can be made on a full disk."""
REASON_CHARACTERS = 200
"""How much of somebody else's error is told."""


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
    except OSError as exc:
        raise CheckpointError(str(path), f"cannot be read: {exc.strerror}") from exc
    except (ImportError, AttributeError) as exc:  # an environment's class, or somebody else's file
        problem = f"needs what cannot be imported here ({exc}); was it moved or renamed since?"
        raise CheckpointError(str(path), problem) from exc
    except (zipfile.BadZipFile, EOFError, pickle.UnpicklingError, RuntimeError) as exc:
        raise CheckpointError(str(path), f"is damaged or no checkpoint ({exc})") from exc
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(str(path), "was not written by this version of envfleet")
    return state


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Say of a state that cannot be taken up that it belongs elsewhere."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as exc:
        if isinstance(exc, EnvfleetError) and not isinstance(exc, ConfigError):
            raise
        # PyTorch names every parameter that does not fit, a line each
        reason = " ".join(str(exc).split())[:REASON_CHARACTERS]
        raise CheckpointError(
            str(path),
            "does not fit its run.json or its environment, as a checkpoint of another run would "
            f"not ({type(exc).__name__}: {reason})",
        ) from exc


class CheckpointFolder:
    """The checkpoints of one run: the last few, the newest as latest.pt, the best as best.pt."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        self.folder, self._keep = folder, keep

    def prepare(self) -> None:
        """Make the folder, and find out now whether it can be written to."""
        probe = self.folder / f".probe.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".*.pt.*"):  # by a run that was killed while it saved
                left.unlink(missing_ok=True)
            with probe.open("wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())  # some file systems find out no earlier that they are full
            self._check_places()
        except OSError as exc:
            raise CheckpointError(
                str(self.folder), f"cannot be written to: {exc.strerror}; choose another folder"
            ) from exc
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def rehearse(self, state: dict[str, Any]) -> None:
        """Write a first checkpoint and throw it away: find out now whether all of them will fit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        trial = self.folder / f".trial.{os.getpid()}.pt"
        try:
            save(trial, state)
            size = trial.stat().st_size
        except CheckpointError as exc:
            raise CheckpointError(
                str(self.folder),
                f"cannot hold a checkpoint ({exc.__cause__}); choose another folder",
            ) from exc
        finally:
            trial.unlink(missing_ok=True)
        needed = self._still_needed(size)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                str(self.folder),
                f"has {_size(free)} of free space, and the checkpoints of this run (about "
                f"{_size(size)} each, {self._keep} kept) need {_size(needed)}; free "
                "some, keep fewer (keep_checkpoints) or choose another folder",
            )

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

    def newest(
        self, device: str = "cpu", *, take: Callable[[dict[str, Any]], None] = lambda state: None
    ) -> dict[str, Any]:
        """The newest checkpoint that is whole and fits; a warning names a newer one that is not.

        Args:
            device: Where its tensors are to be.
            take: Takes it up, or fails because it does not fit; then it is given the one before.
        """
        tried = [self.folder / LATEST, *reversed(self._numbered())]
        problem: CheckpointError | None = None
        for path in tried:
            try:
                state = load(path, device)
                with fitting(path):
                    take(state)
            except CheckpointError as exc:
                problem = problem or exc
                continue
            if problem is not None:
                warnings.warn(f"{problem}; going on from {path.name}", RuntimeWarning, stacklevel=2)
            return state
        if self.is_empty or problem is None:
            raise CheckpointError(
                str(self.folder), f"holds no checkpoint: {LATEST} does not exist, nor any other"
            )
        raise problem

    def _check_places(self) -> None:
        """Find out now whether something lies where checkpoints will go."""
        for name in (LATEST, BEST):
            if (self.folder / name).is_dir():
                raise CheckpointError(
                    str(self.folder / name), "is a directory, and a checkpoint belongs there"
                )

    def _still_needed(self, size: int) -> int:
        """Bytes for those that are kept, the best one and the one being written, less what is."""
        there = {path.stat().st_ino: path.stat().st_size for path in self.folder.glob("*.pt")}
        return max((self._keep + 2) * size - sum(there.values()), size)

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


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
