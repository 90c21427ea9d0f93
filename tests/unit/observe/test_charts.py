"""Pictures: round axes, points where their values are, markup that cannot be broken out of."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from envfleet.observe.charts import (
    MOST_POINTS,
    Curve,
    Mark,
    axis,
    labels,
    line_chart,
    share_bar,
    short,
    thin,
    ticks,
    usual,
)
from envfleet.observe.markup import Markup, join, tag

NUMBERS = st.floats(-1e9, 1e9)


def parsed(markup):
    return ElementTree.fromstring(f"<body>{markup}</body>")


def drawn(chart):
    """The points of every polyline, as values again."""
    svg = chart.find(".//svg")
    x0, x1, y0, y1 = map(float, svg.get("data-range").split())
    found = []
    for polyline in svg.iter("polyline"):
        places = [tuple(map(float, pair.split(","))) for pair in polyline.get("points").split()]
        found.append([(x0 + x / 1000 * (x1 - x0), y1 - y / 1000 * (y1 - y0)) for x, y in places])
    return found


class TestAxes:
    @pytest.mark.parametrize(
        ("low", "high", "most", "expected"),
        [
            (0, 100_096, 6, [0, 20_000, 40_000, 60_000, 80_000, 100_000]),
            (0, 1, 3, [0, 0.5, 1]),
            (-3, 3, 7, [-3, -2, -1, 0, 1, 2, 3]),
        ],
    )
    def test_ticks_are_round(self, low, high, most, expected):
        assert ticks(low, high, most) == pytest.approx(expected)

    def test_an_axis_ends_on_round_numbers_outside_its_values(self):
        assert axis(-0.032, 0.002, 5) == pytest.approx([-0.04, -0.02, 0, 0.02])
        assert axis(3, 497, 6) == pytest.approx([0, 100, 200, 300, 400, 500])
        assert axis(0, 0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])

    @given(NUMBERS, NUMBERS, st.integers(3, 10))
    def test_an_axis_holds_its_values_in_few_steps_of_one_length(self, one, other, most):
        low, high = min(one, other), max(one, other)
        found = axis(low, high, most)
        slack = 1e-6 * max(abs(low), abs(high), 1e-9)
        assert 2 <= len(found) <= most
        assert found[0] <= low + slack
        assert found[-1] >= high - slack
        steps = [(b - a) / (found[-1] - found[0]) for a, b in pairwise(found)]
        assert steps == pytest.approx([1 / len(steps)] * len(steps))

    @given(NUMBERS, NUMBERS, st.integers(2, 10))
    def test_ticks_lie_between_the_ends(self, one, other, most):
        low, high = min(one, other), max(one, other)
        largest = max(abs(low), abs(high))
        assume(high - low > 1e-6 * largest)
        found = ticks(low, high, most)
        slack = 1e-6 * (high - low)
        assert len(found) <= most
        assert all(low - slack <= place <= high + slack for place in found)

    def test_equal_values_lie_inside_an_axis(self):
        for value in (0.0, 5.0, -3e-7, 1e12):
            found = axis(value, value)
            assert found[0] < value < found[-1]

    def test_one_wild_value_does_not_flatten_the_others(self):
        values = [-1300.0, *(math.sin(i) for i in range(200))]
        low, high = usual(values)
        assert -3 < low < -0.9
        assert high == max(values)
        assert usual([0.0, 1.0, 100.0]) == (0.0, 100.0)

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (25_600, "25.6k"), (1_500_000, "1.5M"), (0.003, "0.003"), (-2e9, "-2G")],
    )
    def test_numbers_are_short(self, value, text):
        assert short(value) == text

    @pytest.mark.parametrize(
        ("values", "texts"),
        [
            (
                [1.609425, 1.60943, 1.609435, 1.60944],
                ["1.609425", "1.60943", "1.609435", "1.60944"],
            ),
            ([1_234_567.0, 1_234_568.0], ["1.234567M", "1.234568M"]),
            ([-500.0, 0.0, 500.0], ["-500", "0", "500"]),
        ],
    )
    def test_labels_of_an_axis_differ(self, values, texts):
        assert labels(values) == texts


class TestLines:
    def test_points_are_where_their_values_are(self):
        points = tuple((256.0 * i, math.sin(i)) for i in range(1, 40))
        (found,) = drawn(parsed(line_chart("x", [Curve("x", points)])))
        assert len(found) == 39
        for got, wanted in zip(found, points, strict=True):
            assert got == pytest.approx(wanted, abs=0.2, rel=2e-5)

    def test_many_points_become_means_with_a_band(self):
        points = [(float(i), float(i % 7)) for i in range(10 * MOST_POINTS + 3)]
        line = thin("x", points)
        assert len(line.points) <= MOST_POINTS
        assert (min(line.low), max(line.high)) == (0, 6)
        banded = zip(line.low, line.points, line.high, strict=True)
        assert all(low <= y <= high for low, (_, y), high in banded)
        assert parsed(line_chart("x", [line])).find(".//polygon") is not None

    def test_few_points_stay_as_they_are(self):
        points = [(float(i), float(i)) for i in range(MOST_POINTS)]
        assert thin("x", points) == Curve("x", tuple(points))

    def test_marks_show_their_spread(self):
        marks = [Mark(100, 20, 5, "at 100: 20"), Mark(200, 40, 0, "at 200: 40")]
        chart = parsed(line_chart("return", [], marks, is_large=True))
        (joined,) = drawn(chart)
        assert joined == [pytest.approx((100, 20), rel=1e-4), pytest.approx((200, 40), rel=1e-4)]
        spreads = [one for one in chart.iter("line") if one.get("class") == "spread"]
        _, _, y0, y1 = map(float, chart.find(".//svg").get("data-range").split())
        length = (float(spreads[0].get("y1")) - float(spreads[0].get("y2"))) / 1000 * (y1 - y0)
        assert length == pytest.approx(10, rel=1e-3)
        assert [one.find("title").text for one in chart.iter("path")] == [
            "at 100: 20",
            "at 200: 40",
        ]

    def test_a_single_point_is_seen(self):
        chart = parsed(line_chart("x", [Curve("x", ((64.0, 3.0),))]))
        assert "dot" in chart.find(".//polyline").get("class")

    def test_nothing_measured_is_said(self):
        chart = parsed(line_chart("x", []))
        assert chart.find(".//svg") is None
        assert "nothing was measured yet" in "".join(chart.itertext())

    def test_labels_are_placed_in_percent(self):
        chart = line_chart("x", [Curve("x", ((0.0, 0.0), (100.0, 1.0)))], x_ticks=3)
        assert re.findall(r'class="tick x" style="left:([\d.]+)%">(\w+)<', chart) == [
            ("0.00", "0"),
            ("50.00", "50"),
            ("100.00", "100"),
        ]


class TestShares:
    def test_parts_fill_the_bar_largest_first(self):
        shares = {"small": 0.2, "nothing": 0.0, "large": 0.8}
        texts = {name: f"{share:.0%}" for name, share in shares.items()}
        bar = parsed(share_bar(shares, texts, {name: at for at, name in enumerate(shares)}))
        found = [(float(one.get("x")), float(one.get("width"))) for one in bar.iter("rect")]
        assert found == [(0, 800), (800, 200)]
        assert [one.text for one in bar.iter("b")] == ["large", "small"]


class TestMarkup:
    def test_text_is_escaped_and_markup_is_not(self):
        assert tag("p", "<b>&", tag("i", "x")) == "<p>&lt;b&gt;&amp;<i>x</i></p>"
        assert join(["<", Markup("<br/>")]) == "&lt;<br/>"

    def test_attributes_are_escaped_named_and_left_out(self):
        found = tag("a", class_='"><script>', data_x=1.5, hidden=True, title=None, muted=False)
        assert found == '<a class="&quot;&gt;&lt;script&gt;" data-x="1.5" hidden=""></a>'
