"""The result of a command: one document for scripts, and the same facts as blocks for people.

Pure data, the same for every screen. Everything in ``document`` is plain JSON (strings, numbers,
booleans, None, lists, dicts with string keys).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from envfleet.runs.callbacks import RunOutcome

Level = Literal["ok", "warn", "bad", "info"]


def plural(number: int, what: str) -> str:
    """A number with its noun: 1 core, 2 cores."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Heading:
    """The first line of a screen or of a part of it."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; ``level`` colours it where there are colours."""

    text: str
    level: Level = "info"


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to paste elsewhere: shown as they are, never wrapped."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names. Cells are strings; ``right`` names the columns of numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    levels: tuple[Level, ...] = ()
    """One per row, or empty when no row stands out."""
    notes: tuple[str, ...] = ()
    """Small print under the table."""

    def __post_init__(self) -> None:
        """Refuse rows that do not fit the columns."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"a row of {len(row)} cells under {len(self.columns)} columns: {row}"
                )
        if self.levels and len(self.levels) != len(self.rows):
            raise ValueError(f"{len(self.levels)} levels for {len(self.rows)} rows")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing checked: its state, and what to change if it is not ok."""

    name: str
    level: Level
    text: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """A list of findings, shown one per line."""

    items: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class BarRow:
    """A length with its name and its text; ``mark`` shows where another length would end."""

    name: str
    value: float
    text: str
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Lengths below each other, to one scale."""

    items: tuple[BarRow, ...]


Block = Heading | Text | Code | Table | Findings | BarChart


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one command."""

    ok: bool
    """False when the thing checked failed: the exit code is then 1."""
    document: dict[str, Any]
    blocks: tuple[Block, ...] = field(default=())


def run_document(outcome: RunOutcome) -> dict[str, Any]:
    """What scripts are told of a run of any kind."""
    return {
        "run_dir": str(outcome.run_dir),
        "env_steps": outcome.env_steps,
        "seconds": round(outcome.seconds, 3),
        "env_steps_per_second": round(outcome.env_steps_per_second, 1),
        "best_return": outcome.best_return,
        "verdict": outcome.verdict,
        "shares": {name: round(share, 4) for name, share in outcome.shares.items()},
        "incidents": outcome.incidents,
        "report": str(outcome.report),
        "is_stopped": outcome.is_stopped,
    }


def where_it_is(outcome: RunOutcome, command: str) -> list[Block]:
    """How the run goes on if it was stopped, and where to look."""
    blocks: list[Block] = []
    if outcome.is_stopped:
        go_on = f"envfleet {command} --resume {shlex.quote(str(outcome.run_dir))}"
        blocks += [Text("It was stopped; to go on:"), Code((go_on,))]
    blocks.append(Text(f"The run is in {outcome.run_dir}"))
    blocks.append(Text(f"The report is {outcome.report}"))
    return blocks
