"""Checkpoints: complete or absent, and the newest usable one is found.

A checkpoint is one file:

    format                      one line of text that says what the file is
    two lengths                 of header and pickles, 8 bytes each
    header                      JSON: plain data, and where arrays and objects belong in it
    pickles                     states of environments, which only a pickle can hold; may be empty
    arrays                      weights and other numbers
    signature                   of all bytes above, by the user's key; zeros if there is none
    checksum                    SHA-256 of all bytes above, so that one flipped bit is found

It is written under another name and then renamed, so a kill at any moment leaves the previous one.
Only the pickles could run code when they are opened; they are opened if this user signed them or
if the caller trusts the file (see `Trust`). Everything else is data.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from envfleet.errors import CheckpointError
from envfleet.runs.plain_data import decode, encode
from envfleet.runs.signing import SIGNATURE_BYTES, NoKey, is_signed, sign, user_key

__all__ = ["BEST", "LATEST", "NOT_OPENED", "CheckpointFolder", "Trust", "fitting", "load", "save"]

FORMAT = b"envfleet checkpoint 3\n"
LATEST, BEST = "latest.pt", "best.pt"
PROBE_BYTES = 1 << 16
"""An empty file can be made on a full disk."""
REASON_CHARACTERS = 200
"""How much of another library's error is shown."""

_LENGTH_BYTES, _CHECKSUM_BYTES = 8, 32
_UNSIGNED = bytes(SIGNATURE_BYTES)

Trust = Literal["none", "own", "all"]
"""Which pickles are opened: none, those that this user signed on this machine, or all."""


class _NotOpened:
    """Stands for what lies in pickles that were not opened."""

    def __repr__(self) -> str:
        return "NOT_OPENED"


NOT_OPENED = _NotOpened()


def save(path: Path, state: dict[str, Any]) -> bool:
    """Write a checkpoint; when this returns it is on the disk, even if the machine stops.

    Dicts, lists, numbers, strings, arrays and tensors become plain data; other objects are pickled.
    False says that there are pickles, and no key to sign them with.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        content, has_signature = _written(state)
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, pickle.PicklingError) as exc:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise CheckpointError(str(path), f"cannot be written: {exc}") from exc
    return has_signature


def _written(state: dict[str, Any]) -> tuple[bytes, bool]:
    header, arrays, objects = encode(state)
    pickles = pickle.dumps(objects) if objects else b""
    lengths = [len(part).to_bytes(_LENGTH_BYTES, "little") for part in (header, pickles)]
    content = b"".join((FORMAT, *lengths, header, pickles, *arrays))
    signature = _UNSIGNED
    if pickles:
        with suppress(NoKey):
            signature = sign(user_key(), content)
    content += signature
    has_signature = not pickles or signature != _UNSIGNED
    return content + hashlib.sha256(content).digest(), has_signature


def load(path: Path, device: str = "cpu", *, trust: Trust = "own") -> dict[str, Any]:
    """Read a checkpoint, or say what is wrong with it.

    Args:
        path: The file.
        device: Where PyTorch tensors go.
        trust: Whose pickles are opened. With "none" `NOT_OPENED` stands for what they hold.

    Raises:
        CheckpointError: It is damaged, cannot be read, or holds pickles that may not be opened.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as exc:
        raise CheckpointError(str(path), "does not exist") from exc
    except OSError as exc:
        raise CheckpointError(str(path), f"cannot be read: {exc.strerror}") from exc
    if content.startswith((b"PK\x03\x04", b"envfleet checkpoint ")) and content[:22] != FORMAT:
        raise CheckpointError(str(path), "was not written by this version of envfleet")
    body = memoryview(content)[:-_CHECKSUM_BYTES]
    checksum = content[len(body) :]
    if not content.startswith(FORMAT) or hashlib.sha256(body).digest() != checksum:
        raise _damaged(path, "its checksum is wrong")
    # a checksum finds accidents, not forgers: from here on the bytes may be anything
    signed, signature = body[:-SIGNATURE_BYTES], body[-SIGNATURE_BYTES:]
    header, pickles, arrays = _parts(signed)

    @functools.cache
    def objects() -> Any:
        if trust == "own":
            _check_signature(path, bytes(signed), bytes(signature))
        return _unpickled(path, pickles)

    def take(number: int) -> Any:
        return NOT_OPENED if trust == "none" else objects()[number]

    try:
        state = decode(header, arrays, objects=take, device=device)
    except CheckpointError:
        raise
    except Exception as exc:
        raise _damaged(path, short_reason(exc)) from exc
    if not isinstance(state, dict):
        raise _damaged(path, f"it holds a {type(state).__name__}")
    return state


def _parts(signed: memoryview) -> tuple[bytes, memoryview, memoryview]:
    """Header, pickles and arrays; empty or too short ones if the lengths are wrong."""
    first = len(FORMAT)
    begin = first + 2 * _LENGTH_BYTES
    end = begin + int.from_bytes(signed[first : first + _LENGTH_BYTES], "little")
    last = end + int.from_bytes(signed[first + _LENGTH_BYTES : begin], "little")
    return bytes(signed[begin:end]), signed[end:last], signed[last:]


def _check_signature(path: Path, content: bytes, signature: bytes) -> None:
    """Refuse to open pickles that this user did not write here."""
    try:
        if is_signed(user_key(), content, signature):
            return
        why = "that were not written by this user on this machine"
    except NoKey as exc:
        why = f"whose writer cannot be told, because the user's key is missing ({exc})"
    raise CheckpointError(
        str(path),
        f"holds pickled states of environments {why}, and opening pickles can run any code; if "
        "you trust where the file comes from, resume with --trust (is_trusted=True)",
    )


def _unpickled(path: Path, pickles: memoryview) -> Any:
    try:
        return pickle.loads(pickles)
    except (ImportError, AttributeError) as exc:  # an environment's class, most likely
        problem = f"needs what cannot be imported here ({exc}); was it moved or renamed since?"
        raise CheckpointError(str(path), problem) from exc
    except Exception as exc:
        problem = f"holds pickles that cannot be opened ({short_reason(exc)})"
        raise CheckpointError(str(path), problem) from exc


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(str(path), f"is damaged or no checkpoint ({why})")


def short_reason(exc: BaseException) -> str:
    """What was raised, on one line and not too long."""
    return f"{type(exc).__name__}: {' '.join(str(exc).split())[:REASON_CHARACTERS]}"


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Say of a state that cannot be used that it belongs to another run or environment."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as exc:
        raise CheckpointError(
            str(path),
            "does not fit its run.json or its environment, as a checkpoint of another run would "
            f"not ({short_reason(exc)})",
        ) from exc


class CheckpointFolder:
    """The checkpoints of one run: the last few, the newest as latest.pt, the best as best.pt."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        self.folder, self._keep = folder, keep
        self._has_warned = False

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
        """Write a first checkpoint and delete it: find out now whether all of them will fit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        trial = self.folder / f".trial.{os.getpid()}.pt"
        try:
            self._save(trial, state)
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
                "some, choose another folder or, with envfleet train, keep fewer "
                "(keep_checkpoints)",
            )

    def write(self, env_steps: int, state: dict[str, Any], *, is_best: bool = False) -> Path:
        """Write a checkpoint, and delete those that are older than the last few."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{env_steps:012d}.pt"
        self._save(path, state)
        self._point(LATEST, path)
        if is_best:
            self._point(BEST, path)
        for old in self._numbered()[: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint yet."""
        return not (self.folder / LATEST).exists() and not self._numbered()

    def newest(
        self,
        device: str = "cpu",
        *,
        take: Callable[[dict[str, Any]], None] = lambda state: None,
        trust: Trust = "own",
    ) -> dict[str, Any]:
        """The newest checkpoint that can be used; a warning names a newer one that cannot.

        Args:
            device: Where its tensors go.
            take: Uses a state, or raises because it does not fit; then it gets the one before.
            trust: Whose pickles are opened.

        Raises:
            CheckpointError: None can be used; the newest one's problem is told.
        """
        tried = [self.folder / LATEST, *reversed(self._numbered())]
        problem: CheckpointError | None = None
        for path in tried:
            try:
                state = load(path, device, trust=trust)
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

    def _save(self, path: Path, state: dict[str, Any]) -> None:
        if save(path, state) or self._has_warned:
            return
        self._has_warned = True
        try:
            user_key()
        except NoKey as exc:
            warnings.warn(
                f"checkpoints cannot be signed, because the user's key cannot be used ({exc}): "
                "resuming this run will need --trust",
                RuntimeWarning,
                stacklevel=3,
            )

    def _check_places(self) -> None:
        """Find out now whether something lies where checkpoints will go."""
        for name in (LATEST, BEST):
            if (self.folder / name).is_dir():
                raise CheckpointError(
                    str(self.folder / name), "is a directory, and a checkpoint belongs there"
                )

    def _still_needed(self, size: int) -> int:
        """Bytes for the last few, the best and the one being written, less what is there."""
        there = {path.stat().st_ino: path.stat().st_size for path in self.folder.glob("*.pt")}
        return max((self._keep + 2) * size - sum(there.values()), size)

    def _numbered(self) -> list[Path]:
        return sorted(self.folder.glob("step_*.pt"))

    def _point(self, name: str, path: Path) -> None:
        """Give the same bytes a second name."""
        unfinished = self.folder / f".{name}.{os.getpid()}"
        unfinished.unlink(missing_ok=True)
        try:
            os.link(path, unfinished)
        except OSError:  # some file systems have no second names
            shutil.copyfile(path, unfinished)
        unfinished.replace(self.folder / name)


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
