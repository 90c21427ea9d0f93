"""What a row of a table takes and returns, and the rounds in which its contenders take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.tables import Curves, Entry, Line, compared, entries
from envfleet.cli.measure import Contender, Slice, compare
from envfleet.observe.progress import Progress


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to measure."""

    rounds: int
    seconds: float
    """The length of one slice."""
    seeds: int = 1
    """Training runs of a row that learns."""
    part: float = 1.0
    """The part of the usual amount of work that is done."""
    jobs: int = 1
    """Training runs at the same time."""

    def scaled(self, rounds: float = 1.0, seconds: float = 1.0) -> Pace:
        """The same with fewer rounds or longer slices."""
        return replace(
            self, rounds=max(1, round(self.rounds * rounds)), seconds=self.seconds * seconds
        )


@dataclass(slots=True)
class Outcome:
    """What one row measured."""

    lines: list[Line] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    curves: list[Curves] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "lines": [line.as_json() for line in self.lines],
            "entries": [entry.as_json() for entry in self.entries],
            "notes": self.notes,
            "curves": [curves.as_json() for curves in self.curves],
        }


Row = Callable[[Pace, Progress, str], Outcome]


class Rounds:
    """Runs contenders in turns, and makes table lines of their slices."""

    def __init__(
        self, work: str, contenders: Sequence[Contender], pace: Pace, progress: Progress, title: str
    ) -> None:
        self._work = work
        self.slices: dict[str, list[Slice]]
        self.slices, self.failures = compare(
            contenders, rounds=pace.rounds, seconds=pace.seconds, progress=progress, title=title
        )
        self._labels = {one.key: one.label for one in contenders}

    def line(
        self, work: str, against: str, target: float, own: str, others: str | Sequence[str]
    ) -> Line:
        """`own` against the better of `others`."""
        keys = [others] if isinstance(others, str) else others
        return compared(work, against, target, self.slices, self.failures, own, keys)

    def entries(self) -> list[Entry]:
        """Steps per second of every contender."""
        return entries(self._work, self._labels, self.slices)
