"""A journal that may still be growing, as a list that can be searched.

Law: what is kept in memory is a line of figures per trajectory and where its entries stand in the
file; conversations are read when they are looked at. Only whole lines are taken in, so a line that
is being written is seen when it is complete.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from envfleet.errors import ConfigError, JournalError
from envfleet.llm.checked_lines import data_of
from envfleet.llm.journal import JOURNAL_FILE, apply_entry
from envfleet.llm.trajectories import Trajectory

Key = tuple[int, int]
"""Environment and attempt."""
State = Literal["going on", "success", "no success", "failed"]
ORDERS = ("env_id", "score", "num_turns", "seconds", "changed")
"""What a list can be sorted by; with a minus before it, the largest come first."""
MOST_ROWS = 200
"""Of one answer."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """One trajectory in figures."""

    env_id: int
    attempt: int
    group_id: int
    tag: str
    seed: int
    num_turns: int = 0
    num_tokens: int = 0
    reward: float = 0.0
    penalty: float = 0.0
    extra: float = 0.0
    """What the user's own reward functions gave."""
    seconds: float = 0.0
    """When its last turn was over, from the start of the rollout."""
    state: State = "going on"
    failure: str | None = None
    is_masked: bool = False
    changed: int = 0
    """The feed's version when it last changed."""

    @property
    def score(self) -> float:
        """The total reward."""
        return self.reward + self.penalty + self.extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which trajectories are wanted, and in which order."""

    tag: str | None = None
    group_id: int | None = None
    state: str | None = None
    """One of a summary's, or a reason for failure, or "masked"."""
    least: float | None = None
    """Of the score."""
    most: float | None = None
    order: str = "env_id"

    def takes(self, one: Summary) -> bool:
        """Whether this one is wanted."""
        return (
            (self.tag is None or one.tag == self.tag)
            and (self.group_id is None or one.group_id == self.group_id)
            and (self.least is None or one.score >= self.least)
            and (self.most is None or one.score <= self.most)
            and (
                self.state is None
                or self.state in (one.state, one.failure)
                or (self.state == "masked" and one.is_masked)
            )
        )

    def sort(self, found: Iterable[Summary]) -> list[Summary]:
        """In the order asked for; those that are alike by environment and attempt."""
        name = self.order.removeprefix("-")
        sign = -1 if self.order.startswith("-") else 1
        if name not in ORDERS:
            raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r:.40}")
        return sorted(found, key=lambda one: (sign * getattr(one, name), one.env_id, one.attempt))


class JournalFeed:
    """The trajectories of a journal, as far as it has been written."""

    def __init__(self, folder: Path) -> None:
        """Read what is there.

        Raises:
            JournalError: There is no journal.
        """
        self.folder = folder
        self._path = folder / JOURNAL_FILE
        self._lock = threading.Lock()
        self._forget()
        self.update()

    def _forget(self) -> None:
        self.version = 0
        self.header: dict[str, Any] = {}
        self._end = 0
        self._file_id: int | None = None
        self._summaries: dict[Key, Summary] = {}
        self._places: dict[Key, list[tuple[int, int]]] = {}

    def update(self) -> None:
        """Take in what was written since."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    self._read(file)
            except OSError as exc:
                raise JournalError(
                    str(self._path), f"cannot be read: {exc.strerror}; name the folder of a rollout"
                ) from exc

    def _read(self, file: IO[bytes]) -> None:
        about = os.fstat(file.fileno())
        if self._file_id not in (None, about.st_ino) or about.st_size < self._end:
            self._forget()  # another journal took its place
        self._file_id = about.st_ino
        file.seek(self._end)
        for line in file:
            if not line.endswith(b"\n"):
                break
            with suppress(ValueError):  # damaged; what follows from it is left out as well
                entry = data_of(line)
                self.version += 1
                self._take(entry, self._end, len(line))
            self._end += len(line)

    def _take(self, entry: dict[str, Any], place: int, size: int) -> None:
        if entry["kind"] == "header":
            self.header = {name: entry[name] for name in entry if name != "kind"}
            return
        key = entry["env_id"], entry["attempt"]
        if entry["kind"] == "begin" and key not in self._summaries:
            about = {name: entry[name] for name in ("group_id", "tag", "seed")}
            self._summaries[key] = Summary(env_id=key[0], attempt=key[1], **about)
        one = self._summaries.get(key)
        if one is None:
            return
        self._places.setdefault(key, []).append((place, size))
        one.changed = self.version
        if entry["kind"] == "turn":
            _count_turn(one, entry["turn"])
        elif entry["kind"] == "end":
            failure = entry["failure"]
            one.failure = None if failure is None else failure["reason"]
            one.is_masked = entry["is_masked"]
            one.extra = sum(entry["extra_rewards"].values())
            ended: State = "success" if entry["is_success"] else "no success"
            one.state = ended if failure is None else "failed"

    # ---- answers -------------------------------------------------------------------------------

    def page(self, query: Query, offset: int = 0, limit: int = 50) -> dict[str, Any]:
        """Some of the trajectories that a query takes, and figures of all of them."""
        with self._lock:
            everything = list(self._summaries.values())
            found = query.sort(one for one in everything if query.takes(one))
            offset, limit = max(0, offset), max(1, min(limit, MOST_ROWS))
            return {
                "version": self.version,
                "num_found": len(found),
                "offset": offset,
                "rows": [asdict(one) | {"score": one.score} for one in found[offset:][:limit]],
                **_figures(everything),
            }

    def trajectory(self, env_id: int, attempt: int) -> Trajectory | None:
        """One trajectory with all its turns; None if there is no such one."""
        with self._lock:
            places = list(self._places.get((env_id, attempt), ()))
        found: dict[Key, Trajectory] = {}
        try:
            with self._path.open("rb") as file:
                for place, size in places:
                    file.seek(place)
                    apply_entry(found, data_of(file.read(size)))
        except (OSError, ValueError) as exc:
            raise JournalError(str(self._path), f"has changed since it was read: {exc}") from exc
        return found.get((env_id, attempt))

    def all_keys(self) -> list[Key]:
        """Environment and attempt of every trajectory."""
        with self._lock:
            return sorted(self._summaries)


def _count_turn(one: Summary, turn: dict[str, Any]) -> None:
    if turn["number"] != one.num_turns:
        return  # as `apply_entry` does
    one.state, one.failure = "going on", None  # it may have been taken up again after its end
    one.num_turns += 1
    one.reward += turn["reward"]
    one.penalty += turn["penalty"]
    one.num_tokens += turn["generation"]["num_tokens"]
    taken = {**turn["times"], **turn["generation"]["times"]}
    one.seconds = max(one.seconds, sum(taken.values()))


def _figures(everything: list[Summary]) -> dict[str, Any]:
    ended = [one for one in everything if one.state != "going on"]
    return {
        "num_all": len(everything),
        "num_turns": sum(one.num_turns for one in everything),
        "num_tokens": sum(one.num_tokens for one in everything),
        "num_ended": len(ended),
        "mean_score": sum(one.score for one in ended) / len(ended) if ended else None,
        "states": dict(Counter(one.state for one in everything)),
        "failures": dict(Counter(one.failure for one in everything if one.failure is not None)),
        "num_masked": sum(one.is_masked for one in everything),
        "tags": sorted({one.tag for one in everything}),
        "groups": len({one.group_id for one in everything}),
    }
