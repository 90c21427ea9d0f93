"""Turn measured figures into tables.

A line of a table has a target, and knows whether its figures meet it. Tables are printed for a
terminal or as Markdown, and filled into documents. A ratio is taken within a round, and the median
of the ratios counts. A line whose contender failed never meets its target. No figure is rounded to
the better side. Nothing here reads a clock, starts a process or opens a file.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from envfleet.cli.measure import Shares, Slice, median_shares
from envfleet.cli.report import Table
from envfleet.cli.screen import table_lines


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a measured figure must meet."""

    bound: float
    unit: str = "x"
    """"x" for ratios, "%" for shares, "ms" for times, empty for counts."""
    is_ceiling: bool = False

    def is_met_by(self, value: float) -> bool:
        """Whether `value` meets the target."""
        return value <= self.bound if self.is_ceiling else value >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.is_ceiling else ">="
        return f"{sign} {self.bound:g}{_suffix(self.unit)}"

    def show(self, value: float) -> str:
        """A figure with two or three digits, never rounded to the better side."""
        scale = 10 if self.unit == "%" or abs(value) >= 10 else 100
        # a small tolerance, or 1.15 * 100 = 114.99999999999999 would show as 1.14
        worse, hair = (math.ceil, -1e-9) if self.is_ceiling else (math.floor, 1e-9)
        rounded = worse(value * scale + hair)
        return f"{rounded / scale:.{1 if scale == 10 else 2}f}{_suffix(self.unit)}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    work: str
    against: str
    target: Target
    values: tuple[float, ...]
    """One value, or several that must all meet the target; none if the line failed."""
    rounds: tuple[tuple[float, ...], ...] = ()
    """What each value is the median or mean of: ratios of rounds, returns of seeds."""
    failure: str | None = None

    @property
    def is_met(self) -> bool:
        """Whether there are values and all of them meet the target."""
        return (
            bool(self.values)
            and self.failure is None
            and all(map(self.target.is_met_by, self.values))
        )

    @property
    def measured(self) -> str:
        """The figures as text."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        return " / ".join(map(self.target.show, self.values))

    def as_json(self) -> dict[str, Any]:
        """Plain data; `line_from` reads it back."""
        return {**asdict(self), "ok": self.is_met}


def line_from(data: Mapping[str, Any]) -> Line:
    """A line from what `as_json` gave."""
    return Line(
        data["work"],
        data["against"],
        Target(**data["target"]),
        tuple(data["values"]),
        tuple(tuple(one) for one in data["rounds"]),
        data["failure"],
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """Steps per second of one contender, and for a fleet, where its time went."""

    row: str
    label: str
    rates: tuple[float, ...]
    shares: Shares | None = None

    @property
    def rate(self) -> float:
        """Median steps per second."""
        return statistics.median(self.rates)

    def as_json(self) -> dict[str, Any]:
        """Plain data; `entry_from` reads it back."""
        return asdict(self)


def entry_from(data: Mapping[str, Any]) -> Entry:
    """An entry from what `as_json` gave."""
    shares = data["shares"] and Shares(**data["shares"])
    return Entry(data["row"], data["label"], tuple(data["rates"]), shares)


@dataclass(frozen=True, slots=True)
class Curves:
    """Returns of a policy during training, for each seed."""

    work: str
    runs: dict[int, tuple[tuple[int, float, float], ...]]
    """By seed: environment steps so far, mean and deviation of the returns, at each evaluation."""

    @property
    def last(self) -> tuple[float, ...]:
        """The mean return of each seed's last policy."""
        return tuple(points[-1][1] for points in self.runs.values())

    def mean_at(self, part: float) -> float:
        """The mean over all seeds after this part of the evaluations."""
        each = [points[max(round(part * len(points)), 1) - 1][1] for points in self.runs.values()]
        return statistics.mean(each)

    def as_json(self) -> dict[str, Any]:
        """Plain data; `curves_from` reads it back."""
        return asdict(self)


def curves_from(data: Mapping[str, Any]) -> Curves:
    """Curves from what `as_json` gave; JSON turns the seeds into text."""
    runs = {
        int(seed): tuple((int(steps), mean, std) for steps, mean, std in points)
        for seed, points in data["runs"].items()
    }
    return Curves(data["work"], runs)


def _suffix(unit: str) -> str:
    return unit if unit in ("", "x") else f" {unit}"


def ratios(own: Sequence[Slice], other: Sequence[Slice]) -> tuple[float, ...]:
    """The speed of `own` over the speed of `other`, round by round."""
    return tuple(one.rate / two.rate for one, two in zip(own, other, strict=True))


def better(slices: Mapping[str, Sequence[Slice]], keys: Sequence[str]) -> str:
    """Which of these has the higher median rate.

    One is chosen for all rounds. The best of each round would be a contender that does not exist.
    """
    return max(keys, key=lambda key: statistics.median(one.rate for one in slices[key]))


def compared(
    work: str,
    against: str,
    target: float,
    slices: Mapping[str, Sequence[Slice]],
    failures: Mapping[str, str],
    own: str,
    others: Sequence[str],
) -> Line:
    """A line: the median of `own`'s ratios to the better of `others`."""
    bound = Target(target)
    missing = [key for key in (own, *others) if key not in slices]
    if missing:
        reason = failures.get(missing[0], "it was not measured")
        return Line(work, against, bound, (), failure=f"{missing[0]}: {reason}")
    per_round = ratios(slices[own], slices[better(slices, others)])
    return Line(work, against, bound, (statistics.median(per_round),), (per_round,))


def joined(lines: Sequence[Line], work: str) -> Line:
    """Join lines with the same target into one. It meets the target if all of them do."""
    first = lines[0]
    return Line(
        work,
        first.against,
        first.target,
        tuple(value for line in lines for value in line.values),
        tuple(one for line in lines for one in line.rounds),
        next((line.failure for line in lines if line.failure is not None), None),
    )


def entries(
    row: str, labels: Mapping[str, str], slices: Mapping[str, Sequence[Slice]]
) -> list[Entry]:
    """One entry for each contender that did not fail, with the medians of its shares."""
    return [
        Entry(row, labels[key], tuple(one.rate for one in own), median_shares(own))
        for key, own in slices.items()
    ]


# ---- how it looks -----------------------------------------------------------------------------


def targets_table(
    lines: Sequence[Line], rows: Sequence[str] = (), commands: Sequence[str] = ()
) -> Table:
    """The main table. A line may begin with its row's name and end with its command."""
    cells: list[tuple[str, ...]] = [
        (line.work, line.against, str(line.target), line.measured, "yes" if line.is_met else "NO")
        for line in lines
    ]
    right = frozenset({"target", "measured"})
    columns: tuple[str, ...] = ("work", "against", "target", "measured", "met")
    if rows:
        columns = ("row", *columns)
        cells = [(row, *rest) for row, rest in zip(rows, cells, strict=True)]
    if commands:
        columns = (*columns, "command")
        cells = [(*rest, command) for rest, command in zip(cells, commands, strict=True)]
    return Table(columns, tuple(cells), right)


def summary_table(lines: Sequence[Line]) -> Table:
    """The figures alone, for a reader who does not care about targets."""
    cells = tuple((line.work, line.against, line.measured) for line in lines)
    return Table(("work", "against", "speed-up"), cells, frozenset({"speed-up"}))


def rates_table(found: Sequence[Entry]) -> Table:
    """Steps per second of every contender, and where the time of fleets went."""
    shares = ("env", "waiting", "copying") if any(entry.shares for entry in found) else ()
    return Table(
        ("work", "contender", "steps/s", "rounds", *shares),
        tuple(
            (
                entry.row,
                entry.label,
                f"{entry.rate:,.0f}",
                f"{min(entry.rates):,.0f} to {max(entry.rates):,.0f}",
                *(_shares(entry.shares) if shares else ()),
            )
            for entry in found
        ),
        frozenset({"steps/s", "rounds", *shares}),
    )


CURVE_PARTS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


def curves_table(found: Sequence[Curves]) -> Table:
    """Evaluations during training, as means over the seeds, and the last one of each seed."""
    parts = tuple(f"{part:.0%}" for part in CURVE_PARTS)
    return Table(
        ("work", *parts, "each seed at the end"),
        tuple(_curves_row(curves) for curves in found),
        frozenset(parts),
    )


def _curves_row(curves: Curves) -> tuple[str, ...]:
    parts = [curves.mean_at(part) for part in CURVE_PARTS]
    digits = 2 if all(abs(value) < 10 for value in (*parts, *curves.last)) else 1
    last = " / ".join(f"{value:,.{digits}f}" for value in curves.last)
    return (curves.work, *(f"{value:,.{digits}f}" for value in parts), last)


def provenance(commits: Mapping[str, str | None]) -> str | None:
    """One sentence on which rows were measured on which commit; None if no commit is known."""
    known = list(dict.fromkeys(commits.values()))
    if known == [None] or not known:
        return None
    said = [commit or "an unknown commit" for commit in known]
    if len(known) > 1:
        said = [
            f"{one} ({_spans(commits, commit)})" for one, commit in zip(said, known, strict=True)
        ]
    *first, last = said
    sentence = f"Measured on {', '.join(first)}{' and ' if first else ''}{last}"
    has_changes = any(commit and commit.endswith("+") for commit in known)
    return f"{sentence}; + means with uncommitted changes" if has_changes else sentence


def _spans(commits: Mapping[str, str | None], wanted: str | None) -> str:
    """The rows of one commit; three or more neighbours are shown as "first to last"."""
    spans: list[str] = []
    for commit, group in itertools.groupby(commits, key=lambda row: commits[row]):
        rows = list(group)
        if commit == wanted:
            spans += rows if len(rows) < 3 else [f"{rows[0]} to {rows[-1]}"]
    return ", ".join(spans)


def _shares(shares: Shares | None) -> tuple[str, str, str]:
    if shares is None:
        return "", "", ""
    return f"{shares.env:.0%}", f"{shares.waiting:.0%}", f"{shares.copying:.0%}"


def text_table(table: Table) -> str:
    """The table for a terminal, aligned with spaces."""
    return "\n".join(table_lines(table))


def markdown_table(table: Table) -> str:
    """The table as Markdown."""
    rules = ["---:" if name in table.right else "---" for name in table.columns]
    rows = [table.columns, rules, *table.rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


class NoMarker(ValueError):
    """A document has no marker for any of the tables."""


def fill_in(document: str, tables: Mapping[str, str]) -> str:
    """Put each table between its markers, `<!-- table:NAME -->` and `<!-- /table -->`.

    Raises:
        NoMarker: The document has no marker for any of them.
    """
    found = 0
    for name, text in tables.items():
        # a marker without an end must not match up to the end of the next one
        place = rf"(?s)<!-- table:{re.escape(name)} -->\n(?:(?!<!-- table:).)*?<!-- /table -->"
        filled = f"<!-- table:{name} -->\n{text}\n<!-- /table -->"
        document, count = re.subn(place, filled.replace("\\", r"\\"), document)
        found += count
    if not found:
        markers = " or ".join(f"<!-- table:{name} -->" for name in tables)
        raise NoMarker(f"no place to put a table: add the lines {markers} and <!-- /table -->")
    return document
