"""Figures in, pictures out: line charts and a bar of shares as inline SVG. Pure.

    figure.chart
      svg.plot        stretched to the room there is: 1000 x 1000 units, lines keep their width
      span.tick       labels, placed in percent beside it, so that text never shrinks with the page

A plot says its range in ``data-range`` ("x0 x1 y0 y1"), from which a script or a test finds the
values of the points again.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from envfleet.observe.markup import Markup, join, tag

__all__ = [
    "Curve",
    "Mark",
    "Range",
    "axis",
    "labels",
    "line_chart",
    "part_colour",
    "share_bar",
    "short",
    "thin",
    "ticks",
]

SIDE = 1000.0
"""Units of a plot's side."""

MOST_POINTS = 500
"""A line has at most so many points; more would not be seen, and would make the page slow."""

_COLOURS = {
    **{"learning": 0, "evaluation": 1, "start-up": 2, "environments": 3, "waiting": 4},
    **{"inference": 5, "transport": 6, "filming": 7, "the rest": 8, "bookkeeping": 9},
    **{"queue": 0, "prefill": 1, "decode": 2, "env": 3, "journal": 9},
}

_HAIR = 1e-9
"""Differences below this are rounding errors: 0.3 / 0.1 is not 3."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve; `low` and `high` are the edges of the band around it, if it has one."""

    label: str
    points: tuple[Point, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A single value with its spread."""

    x: float
    y: float
    spread: float
    text: str
    """What is shown when it is pointed at."""


@dataclass(frozen=True, slots=True)
class Range:
    """What part of the plane a plot shows."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        """A place from the left."""
        return SIDE * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        """A place from the top."""
        return SIDE * (self.y1 - value) / (self.y1 - self.y0)


def thin(label: str, points: Sequence[Point], most: int = MOST_POINTS) -> Curve:
    """A line of few enough points: means of neighbours, with a band from the least to the most."""
    if len(points) <= most:
        return Curve(label, tuple(points))
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return Curve(
        label,
        tuple(
            (_curve_mean(x for x, _ in group), _curve_mean(y for _, y in group)) for group in groups
        ),
        tuple(min(y for _, y in group) for group in groups),
        tuple(max(y for _, y in group) for group in groups),
    )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between `low` and `high`, evenly spaced, at most so many."""
    for step in _steps((high - low) / most):
        begin, end = math.ceil(low / step - _HAIR), math.floor(high / step + _HAIR)
        if end - begin < most:
            break
    return [number * step for number in range(begin, end + 1)]


def axis(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers, evenly spaced, at most so many, the first and last of which enclose both."""
    if high - low <= _HAIR * max(abs(low), abs(high)):
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
    for step in _steps((high - low) / most):
        begin, end = math.floor(low / step + _HAIR), math.ceil(high / step - _HAIR)
        if end - begin < most:
            break
    return [number * step for number in range(begin, end + 1)]


def _steps(least: float) -> Iterator[float]:
    """Round distances, from about the least one upwards, without end."""
    for exponent in itertools.count(math.floor(math.log10(least))):
        yield from (size * 10.0**exponent for size in (1, 2, 5))


def usual(values: Sequence[float]) -> tuple[float, float]:
    """The least and the most, without a few that are far off.

    One wild update must not press all the others into a flat line.
    """
    ordered = sorted(values)
    aside = len(ordered) // 50
    low, high = ordered[aside], ordered[-1 - aside]
    if ordered[-1] - ordered[0] <= 4 * (high - low) or high == low:
        return ordered[0], ordered[-1]
    margin = (high - low) / 2
    return max(ordered[0], low - margin), min(ordered[-1], high + margin)


def short(value: float, digits: int = 3) -> str:
    """A number for an axis: 25k, 1.5M, 0.003."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits + 1}g}{unit}"
    return "0" if abs(value) < 1e-12 else f"{value:.{digits}g}"


def labels(values: Sequence[float]) -> list[str]:
    """Numbers for one axis, with as many digits as tell them apart."""
    for digits in range(3, sys.float_info.dig):
        texts = [short(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def line_chart(
    title: str,
    lines: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    note: str = "",
    x_unit: str = "steps",
    breaks: Sequence[float] = (),
    y_ends: tuple[float, float] | None = None,
    y_ticks: int = 5,
    x_ticks: int = 6,
    is_large: bool = False,
) -> Markup:
    """Curves over one axis.

    Args:
        title: What is drawn.
        lines: The curves; the first one is the main one.
        marks: Single values with their spread, joined by a thin line.
        note: What the quantity means, below the title.
        x_unit: What the horizontal axis counts.
        breaks: Where something worth a thin vertical line happened.
        y_ends: Where the vertical axis begins and ends, if not by the values.
        y_ticks: About how many labels the vertical axis has.
        x_ticks: About how many labels the horizontal axis has.
        is_large: Whether it is the main picture of a page: it shows every value, while a small one
            may leave out a few that are far off.
    """
    plane = _plane(lines, marks, y_ends, y_ticks, is_large)
    if plane is None:
        return empty_chart(title, note)
    y_marks, x_marks = axis(plane.y0, plane.y1, y_ticks), ticks(plane.x0, plane.x1, x_ticks)
    pieces = [_grid(plane, y_marks)]
    pieces += [
        tag(
            "line",
            class_="break",
            x1=_at(plane.x(x)),
            x2=_at(plane.x(x)),
            y1=0,
            y2=SIDE,
        )
        for x in breaks
    ]
    pieces += [_band(plane, line) for line in lines if line.low]
    pieces += [_curve(plane, number, line) for number, line in enumerate(lines)]
    if marks:
        pieces += _marked(plane, marks)
    drawn = plot(title, pieces, (plane.x0, plane.x1, plane.y0, plane.y1))
    last = short(lines[0].points[-1][1]) if lines and lines[0].points else ""
    return tag(
        "figure",
        caption(title, note, "" if is_large else last),
        tag(
            "div",
            drawn,
            *(
                _chart_label("y", plane.y(value), text)
                for value, text in zip(y_marks, labels(y_marks), strict=True)
            ),
            *(
                _chart_label("x", plane.x(value), text)
                for value, text in zip(x_marks, labels(x_marks), strict=True)
            ),
            tag("output", class_="tip", hidden=True),
            class_="frame",
        ),
        tag("p", x_unit, class_="axis"),
        class_="chart large" if is_large else "chart",
    )


def empty_chart(title: str, note: str) -> Markup:
    """A chart of which nothing is known yet."""
    empty = tag("p", "nothing was measured yet", class_="empty")
    return tag("figure", caption(title, note), empty, class_="chart")


def plot(title: str, pieces: Sequence[Markup], range_: tuple[float, float, float, float]) -> Markup:
    """Pieces in a square that the page stretches; the range is that of x, then of y."""
    return tag(
        "svg",
        tag("title", title),
        *pieces,
        class_="plot",
        viewBox=f"0 0 {SIDE:g} {SIDE:g}",
        preserveAspectRatio="none",
        role="img",
        data_range=" ".join(map(repr, range_)),
    )


def part_colour(name: str) -> int:
    """The colour of a part of the time, which is the same on every page."""
    return _COLOURS.get(name, 8)


def share_bar(
    shares: Mapping[str, float], texts: Mapping[str, str], colours: Mapping[str, int]
) -> Markup:
    """One bar cut into parts, the largest first; `texts` says more of each part."""
    parts = sorted(
        ((name, share) for name, share in shares.items() if share > 0), key=lambda one: -one[1]
    )
    pieces, begins = [], 0.0
    for name, share in parts:
        pieces.append(
            tag(
                "rect",
                tag("title", f"{name}: {texts[name]}"),
                class_=f"part c{colours[name]}",
                x=_at(SIDE * begins),
                y=0,
                width=_at(SIDE * share),
                height=SIDE,
            )
        )
        begins += share
    bar = tag(
        "svg",
        tag("title", "where the time went"),
        *pieces,
        class_="bar",
        viewBox=f"0 0 {SIDE:g} {SIDE:g}",
        preserveAspectRatio="none",
        role="img",
    )
    keys = [
        tag(
            "li",
            tag("i", class_=f"key c{colours[name]}"),
            tag("b", name),
            " ",
            tag("span", texts[name]),
        )
        for name, _ in parts
    ]
    return join([bar, tag("ul", *keys, class_="keys")])


def _plane(
    lines: Sequence[Curve],
    marks: Sequence[Mark],
    ends: tuple[float, float] | None,
    y_ticks: int,
    is_large: bool,
) -> Range | None:
    xs = [x for line in lines for x, _ in line.points] + [mark.x for mark in marks]
    if not xs:
        return None
    ys = [y for line in lines for y in (*(y for _, y in line.points), *line.low, *line.high)]
    if is_large:
        ys += [mark.y + side * mark.spread for mark in marks for side in (-1, 1)]
        ends = ends or (min(ys), max(ys))
    marked = axis(*(ends or usual(ys)), y_ticks)
    return Range(0.0, max(xs) or 1.0, marked[0], marked[-1])


def caption(title: str, note: str, last: str = "") -> Markup:
    """What is drawn, the last value, and a sentence."""
    head = [tag("b", title)] + ([tag("span", last, class_="last")] if last else [])
    return tag("figcaption", *head, *([tag("small", note)] if note else []))


def _grid(plane: Range, values: Iterable[float]) -> Markup:
    lines = [
        tag(
            "line",
            class_="grid",
            x1=0,
            x2=SIDE,
            y1=_at(plane.y(y)),
            y2=_at(plane.y(y)),
        )
        for y in values
    ]
    return tag("g", *lines)


def _curve(plane: Range, number: int, line: Curve) -> Markup:
    """A line of one point alone would not be seen: it is drawn as a dot."""
    path = " ".join(f"{_at(plane.x(x))},{_at(plane.y(y))}" for x, y in line.points)
    dot = " dot" if len(line.points) == 1 else ""
    if dot:
        path = f"{path} {path}"
    return tag("polyline", class_=f"line l{number}{dot}", points=path, data_label=line.label)


def _band(plane: Range, line: Curve) -> Markup:
    xs = [plane.x(x) for x, _ in line.points]
    there = [f"{_at(x)},{_at(plane.y(y))}" for x, y in zip(xs, line.high, strict=True)]
    back = [f"{_at(x)},{_at(plane.y(y))}" for x, y in zip(xs, line.low, strict=True)]
    return tag("polygon", class_="band", points=" ".join([*there, *reversed(back)]))


def _marked(plane: Range, marks: Sequence[Mark]) -> list[Markup]:
    joined = " ".join(f"{_at(plane.x(mark.x))},{_at(plane.y(mark.y))}" for mark in marks)
    pieces = [tag("polyline", class_="joined", points=joined, data_label="evaluation")]
    for mark in marks:
        x = _at(plane.x(mark.x))
        low, high = (
            _at(plane.y(mark.y - mark.spread)),
            _at(plane.y(mark.y + mark.spread)),
        )
        pieces.append(tag("line", class_="spread", x1=x, x2=x, y1=low, y2=high))
        # a path of no length with round ends is a circle however the plot is stretched
        place = f"M{x} {_at(plane.y(mark.y))}h0"
        pieces.append(tag("path", tag("title", mark.text), class_="mark", d=place))
    return pieces


def _chart_label(axis: str, place: float, text: str) -> Markup:
    side = "left" if axis == "x" else "top"
    return tag("span", text, class_=f"tick {axis}", style=f"{side}:{place / SIDE:.2%}")


def _at(place: float) -> str:
    return f"{place:.2f}".rstrip("0").rstrip(".")


def _curve_mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
