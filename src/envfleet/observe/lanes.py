"""A timeline as inline SVG: one lane for each thing that happened, parts of it in colours. Pure.

The picture is stretched like that of a chart; a lane is a few pixels high, and what a part is
shows when it is pointed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envfleet.observe.charts import SIDE, caption, empty_chart, part_colour, plot, short, ticks
from envfleet.observe.markup import Markup, join, tag

__all__ = ["Lane", "Part", "lane_chart"]

_LANE_PIXELS = 14
_FILLED = 0.72
"""Of a lane's height; the rest keeps lanes apart."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of time spent on one thing."""

    kind: str
    begin_s: float
    end_s: float
    text: str
    """What is shown when it is pointed at."""


@dataclass(frozen=True, slots=True)
class Lane:
    """All parts of one thing."""

    label: str
    parts: tuple[Part, ...]


def lane_chart(title: str, lanes: Sequence[Lane], kinds: Sequence[str], note: str = "") -> Markup:
    """Lanes from top to bottom over one axis of seconds.

    Args:
        title: What is drawn.
        lanes: In their order.
        kinds: The kinds of parts, in the order of the key.
        note: A sentence below the title.
    """
    ends = [part.end_s for lane in lanes for part in lane.parts]
    if not ends or max(ends) <= 0:
        return empty_chart(title, note)
    end_s, height = max(ends), SIDE / len(lanes)
    rows = [
        tag(
            "g",
            *(_rect(part, part_colour(part.kind), end_s, number, height) for part in lane.parts),
            data_label=lane.label,
        )
        for number, lane in enumerate(lanes)
    ]
    drawn = plot(title, rows, (0.0, end_s, 0.0, float(len(lanes))))
    labels = [
        tag("span", lane.label, class_="tick y", style=f"top:{(number + 0.5) / len(lanes):.2%}")
        for number, lane in enumerate(lanes)
    ]
    times = [
        tag("span", short(value), class_="tick x", style=f"left:{value / end_s:.2%}")
        for value in ticks(0.0, end_s)
    ]
    keys = [tag("li", tag("i", class_=f"key c{part_colour(kind)}"), kind) for kind in kinds]
    return tag(
        "figure",
        caption(title, note),
        tag(
            "div",
            join([drawn, *labels, *times]),
            class_="frame",
            style=f"height:{max(len(lanes), 4) * _LANE_PIXELS}px",
        ),
        tag("p", "seconds", class_="axis"),
        tag("ul", *keys, class_="keys"),
        class_="chart lanes",
    )


def _rect(part: Part, colour: int, end_s: float, number: int, height: float) -> Markup:
    return tag(
        "rect",
        tag("title", part.text),
        class_=f"part c{colour}",
        x=f"{SIDE * part.begin_s / end_s:.2f}",
        y=f"{(number + (1 - _FILLED) / 2) * height:.2f}",
        width=f"{SIDE * (part.end_s - part.begin_s) / end_s:.2f}",
        height=f"{_FILLED * height:.2f}",
    )
