"""What a row of a table is given and what it gives back, and the rounds in between."""

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
    """Of one slice."""
    seeds: int = 1
    """Runs of a row that learns."""
    part: float = 1.0
    """Of its steps."""
    jobs: int = 1
    """Of its runs at a time."""

    def scaled(self, rounds: float = 1.0, seconds: float = 1.0) -> Pace:
        """The same for work that needs fewer rounds or longer slices."""
        return replace(
            self, rounds=max(1, round(self.rounds * rounds)), seconds=self.seconds * seconds
        )


@dataclass(slots=True)
class Outcome:
    """What one row has to show."""

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
    """The slices of contenders that took turns, and the lines that can be drawn from them."""

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
        self, work: str, against: str, floor: float, own: str, others: str | Sequence[str]
    ) -> Line:
        """`own` against the better of `others`."""
        keys = [others] if isinstance(others, str) else others
        return compared(work, against, floor, self.slices, self.failures, own, keys)

    def entries(self) -> list[Entry]:
        """Everybody's steps per second."""
        return entries(self._work, self._labels, self.slices)
