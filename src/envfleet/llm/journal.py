"""The journal of a rollout: every finished turn on disk, as soon as it is over.

    begin ─► turn ─► turn ─► ... ─► end          one line each, with a checksum

The file only grows, by whole lines, one for each event of a trajectory. Law: what a write has
returned for survives the end of this process, and a second later the end of the machine. A line
that is torn or damaged is left out, with the later turns of its trajectory, and nothing else is.
A torn last line was never finished; any other damage is told by the number of the line, until the
rollout has gone on from there: then the header stands once more below it, and what was lost is
played again. Nothing is left out for its size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, overload

from envfleet.errors import JournalError
from envfleet.llm.checked_lines import as_line, data_of
from envfleet.llm.export import as_json
from envfleet.llm.inference.types import Generation, GenerationTimes, Message
from envfleet.llm.trajectories import Trajectory, TrajectoryFailure, TrajectoryTurn, TurnTimes

__all__ = ["JOURNAL_FILE", "Journal", "RunJournal", "StoredTrajectories", "read_journal"]

JOURNAL_FILE = "journal.jsonl"
FORMAT = 1
SYNC_EVERY_S = 1.0
"""A sync takes milliseconds, a write a tenth of one."""


@dataclass(slots=True)
class RunJournal:
    """What a journal holds."""

    header: dict[str, Any] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    """The last attempt of each environment, in their order."""
    earlier: list[Trajectory] = field(default_factory=list)
    """Attempts that were followed by another one."""
    damaged: list[int] = field(default_factory=list)
    """Lines that could not be read, from 1, below which the rollout has not gone on yet."""


def read_journal(folder: Path) -> RunJournal:
    """Read the journal of a run, which may still be growing.

    Raises:
        JournalError: There is none, or it cannot be read.
    """
    path, found, attempts = _journal_of(folder), RunJournal(), _Attempts()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                entry = _entry_of(line)
                if entry is None:
                    found.damaged += [number] if line.endswith(b"\n") else []
                elif entry["kind"] == "header":
                    found.header = {key: entry[key] for key in entry if key != "kind"}
                    found.damaged.clear()
                else:
                    attempts.take(entry)
    except OSError as exc:
        raise JournalError(str(path), f"cannot be read: {exc.strerror}") from exc
    found.trajectories, found.earlier = attempts.last(), attempts.earlier()
    return found


def read_header(folder: Path) -> dict[str, Any]:
    """What a rollout depends on, from its journal.

    Raises:
        JournalError: There is no journal, or it has no beginning.
    """
    path = _journal_of(folder)
    with path.open("rb") as file:
        entry = _entry_of(file.readline())
    if entry is None or entry["kind"] != "header":
        raise JournalError(
            str(path),
            "is damaged: it has no header, which is line 1; restore the file from a copy, or play "
            "the rollout again in another folder",
        )
    return {key: entry[key] for key in entry if key != "kind"}


def damage_told(damaged: Sequence[int]) -> str:
    """Which lines are damaged."""
    shown = ", ".join(map(str, damaged[:5])) + (" and others" if len(damaged) > 5 else "")
    return f"line{'' if len(damaged) == 1 else 's'} {shown}"


class Journal:
    """Writes the journal of a run; one process at a time (`envfleet.runs.lock`)."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        """Begin a journal, or go on with the one that is there.

        Args:
            folder: Of the run; it is made if need be.
            header: What the rollout depends on; written if the journal is new.
        """
        self.path = folder / JOURNAL_FILE
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Where the lines of each environment's attempt begin, and how long they are."""
        self.num_turns = 0
        self.damaged: list[int] = []
        """Lines of the file, from 1, that could not be read."""
        self.played_s = 0.0
        """When the last turn was over, in seconds from the start of the rollout."""
        self.write_s = 0.0
        """Time spent in writing."""
        self._synced_s = time.monotonic()
        self._is_synced = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._end = self._scan() if self.path.exists() else 0
            self._file = self.path.open("ab", buffering=0)
        except OSError as exc:
            raise JournalError(str(self.path), f"cannot be written: {exc.strerror}") from exc
        if not self._end:
            self._add({"kind": "header", "format": FORMAT, **as_json(header)})

    def _scan(self) -> int:
        """Note where entries are; cut off a torn last line, and return where the file ends."""
        end = 0
        with self.path.open("r+b") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    break
                entry = _entry_of(line)
                if entry is None:
                    self.damaged.append(number)
                elif entry["kind"] == "header":
                    self.damaged.clear()
                elif (
                    entry["kind"] == "begin" or (entry["env_id"], entry["attempt"]) in self._places
                ):
                    self._note(entry, end, len(line))
                end += len(line)
        return end

    def go_on(self, header: Mapping[str, Any]) -> None:
        """Go on below damaged lines; what was lost with them is played again."""
        self._add({"kind": "header", "format": FORMAT, **as_json(header)})

    def begin(self, trajectory: Trajectory) -> None:
        """A trajectory begins."""
        self.add(begin_entry(trajectory))

    def turn(self, trajectory: Trajectory, turn: TrajectoryTurn) -> None:
        """A turn of it is over."""
        self.add(turn_entry(trajectory, turn))

    def end(self, trajectory: Trajectory) -> None:
        """A trajectory is over, or what is kept of its end has changed."""
        self.add(end_entry(trajectory))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry that one of the functions below has made, here or in a worker."""
        place = self._add(entry)
        self._note(entry, *place)

    def _note(self, entry: Mapping[str, Any], place: int, size: int) -> None:
        key = entry["env_id"], entry["attempt"]
        self._places.setdefault(key, []).append((place, size))
        if entry["kind"] == "turn":
            self.num_turns += 1
            taken = {**entry["turn"]["times"], **entry["turn"]["generation"]["times"]}
            self.played_s = max(self.played_s, sum(taken.values()))

    def _add(self, entry: Mapping[str, Any]) -> tuple[int, int]:
        begun_s = time.perf_counter()
        line, place = as_line(entry), self._end
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
            self._end += len(line)
            self._is_synced = False
            if time.monotonic() - self._synced_s >= SYNC_EVERY_S:
                self.sync()
        except OSError as exc:
            with suppress(OSError):  # half a line would spoil the one that follows it
                self._file.truncate(place)
            raise JournalError(
                str(self.path),
                f"cannot be written: {exc.strerror}; the {self.num_turns} turns in it are safe. "
                f"Make room, and go on with: envfleet rollout --resume {self.path.parent}",
            ) from exc
        finally:
            self.write_s += time.perf_counter() - begun_s
        return place, len(line)

    def sync(self) -> None:
        """Have the disk keep what has been written."""
        if not self._is_synced:
            os.fdatasync(self._file.fileno())
            self._is_synced, self._synced_s = True, time.monotonic()

    @property
    def last_attempts(self) -> dict[int, int]:
        """The last attempt of each environment that has one, in the order of environments."""
        return dict(sorted(self._places))

    def read(self, env_id: int, attempt: int) -> Trajectory | None:
        """An attempt of an environment as it is now; None if nothing of it can be read."""
        return _read_journal(self.path, self._places[env_id, attempt])

    def trajectories(self) -> StoredTrajectories:
        """The last attempt of each environment, read when it is asked for."""
        places = [tuple(self._places[one]) for one in self.last_attempts.items()]
        return StoredTrajectories(self.path, places)

    def close(self) -> None:
        """Sync and close the file; closing twice changes nothing."""
        if not self._file.closed:
            try:
                self.sync()
            except OSError as exc:
                raise JournalError(str(self.path), f"cannot be kept: {exc.strerror}") from exc
            finally:
                self._file.close()

    def __enter__(self) -> Self:
        """Use it in a `with` statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class StoredTrajectories(Sequence[Trajectory]):
    """Trajectories of a journal, each read from disk when it is asked for and not kept."""

    def __init__(self, path: Path, places: Sequence[tuple[tuple[int, int], ...]]) -> None:
        self._path, self._places = path, list(places)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> StoredTrajectories: ...

    def __getitem__(self, index: int | slice) -> Trajectory | StoredTrajectories:
        """Read one, or choose some without reading them."""
        if isinstance(index, slice):
            return StoredTrajectories(self._path, self._places[index])
        found = _read_journal(self._path, self._places[index])
        if found is None:
            raise JournalError(str(self._path), "has changed since it was written")
        return found


def _read_journal(path: Path, places: Sequence[tuple[int, int]]) -> Trajectory | None:
    attempts = _Attempts()
    with path.open("rb") as file:
        for place, size in places:
            file.seek(place)
            entry = _entry_of(file.read(size))
            if entry is not None:
                attempts.take(entry)
    return next(iter(attempts.last()), None)


def _entry_of(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None if the line is torn or damaged."""
    try:
        entry: dict[str, Any] = data_of(line)
    except ValueError:
        return None
    return entry


def _journal_of(folder: Path) -> Path:
    path = Path(folder) / JOURNAL_FILE
    if not path.is_file():
        raise JournalError(str(path), "is not there; name the folder of a rollout with a model")
    return path


class _Attempts:
    """Puts entries together to trajectories."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Trajectory] = {}

    def take(self, entry: Mapping[str, Any]) -> None:
        apply_entry(self._found, entry)

    def _sorted(self) -> Iterator[tuple[bool, Trajectory]]:
        ordered = sorted(self._found)
        for place, (env_id, attempt) in enumerate(ordered):
            is_last = place + 1 == len(ordered) or ordered[place + 1][0] != env_id
            yield is_last, self._found[env_id, attempt]

    def last(self) -> list[Trajectory]:
        return [one for is_last, one in self._sorted() if is_last]

    def earlier(self) -> list[Trajectory]:
        return [one for is_last, one in self._sorted() if not is_last]


# ---- entries ------------------------------------------------------------------------------------

_ABOUT = ("env_id", "group_id", "tag", "seed", "attempt")
_END = ("final_state", "is_success", "is_masked", "metrics", "extra_rewards")


def begin_entry(trajectory: Trajectory) -> dict[str, Any]:
    """The entry of a trajectory that begins."""
    return {"kind": "begin", **{name: getattr(trajectory, name) for name in _ABOUT}}


def turn_entry(trajectory: Trajectory, turn: TrajectoryTurn) -> dict[str, Any]:
    """The entry of a turn."""
    about = {"env_id": trajectory.env_id, "attempt": trajectory.attempt}
    return {"kind": "turn", **about, "turn": _as_dict(turn)}


def end_entry(trajectory: Trajectory) -> dict[str, Any]:
    """The entry of a trajectory that is over."""
    about = {"env_id": trajectory.env_id, "attempt": trajectory.attempt}
    end = {name: getattr(trajectory, name) for name in _END}
    failure = None if trajectory.failure is None else _as_dict(trajectory.failure)
    return {
        "kind": "end",
        **about,
        **end,
        "failure": failure,
        "num_turns": len(trajectory.turns),
    }


def apply_entry(
    trajectories: dict[tuple[int, int], Trajectory], entry: Mapping[str, Any]
) -> Trajectory | None:
    """Add what an entry says to these trajectories, by environment and attempt.

    Returns:
        The trajectory; None if the entry does not follow from those before it.
    """
    key = entry["env_id"], entry["attempt"]
    if entry["kind"] == "begin" and key not in trajectories:
        trajectories[key] = Trajectory(**{name: entry[name] for name in _ABOUT})
    trajectory = trajectories.get(key)
    if trajectory is None:
        return None
    if entry["kind"] == "turn":
        if entry["turn"]["number"] != len(trajectory.turns):
            return None  # one before it is damaged, or this one was written before
        trajectory.turns.append(turn_of(entry["turn"]))
        trajectory.is_done, trajectory.failure = False, None  # taken up again after its end
    elif entry["kind"] == "end":
        if entry["num_turns"] != len(trajectory.turns):
            return None
        for name in _END:
            setattr(trajectory, name, entry[name])
        failure = entry["failure"]
        trajectory.failure = None if failure is None else TrajectoryFailure(**failure)
        trajectory.is_done = True
    return trajectory


def turn_of(data: Mapping[str, Any]) -> TrajectoryTurn:
    """The turn that an entry holds."""
    generation = dict(data["generation"])
    for name in ("prompt_ids", "token_ids", "log_probs"):
        if generation[name] is not None:
            generation[name] = tuple(generation[name])
    generation["times"] = GenerationTimes(**generation["times"])
    changed = {
        "images": tuple(data["images"]),
        "new_messages": tuple(Message(**one) for one in data["new_messages"]),
        "generation": Generation(**generation),
        "actions": tuple(data["actions"]),
        "times": TurnTimes(**data["times"]),
    }
    return TrajectoryTurn(**{**data, **changed})


def _as_dict(value: Any) -> dict[str, Any]:
    """A dataclass as JSON, without the copies that `dataclasses.asdict` makes."""
    return {one.name: _as_data(getattr(value, one.name)) for one in fields(value)}


def _as_data(value: Any) -> Any:
    if isinstance(value, str | int | float | dict) or value is None:
        return value
    if isinstance(value, tuple):
        if value and isinstance(value[0], Message):
            return [_as_dict(one) for one in value]
        return list(value)
    return _as_dict(value)
