"""Both looks of a report say the same words, and tables line up."""

import io

import pytest

from envfleet.cli.report import BarChart, BarRow, Code, Finding, Findings, Heading, Table, Text
from envfleet.cli.screen import PlainScreen, RichScreen, screen_on
from envfleet.cli.terminal import can_redraw

BLOCKS = (
    Heading("a heading"),
    Table(
        columns=("name", "steps/s", ""),
        rows=(("plain loop", "1,234", ""), ("x", "99", "<- advised")),
        right=frozenset({"steps/s"}),
        levels=("info", "ok"),
        notes=("small print",),
    ),
    Findings(
        (
            Finding("cores", "ok", "2 usable"),
            Finding("open files", "bad", "12 of 16 in use", "ulimit -n 4096"),
        )
    ),
    BarChart(
        (
            BarRow("1 env", 1.0, "1.00x", 1.0),
            BarRow("8 envs", 2.0, "2.00x", 4.0),
            BarRow("x", 0.5, "?"),
        )
    ),
    Text("done [bold]not markup[/bold]", "ok"),
    Code(("envs = envfleet.make_vec('CartPole-v1', num_envs=64)",)),
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(kind, blocks=BLOCKS, width=100):
    stream = io.StringIO()
    kind(stream, width=width).show(blocks)
    return stream.getvalue()


def words(text):
    """Without rules and boxes, which are not words."""
    return [word for word in text.split() if set(word) - set("-─━│#| ")]


def test_columns_line_up():
    lines = shown(PlainScreen, BLOCKS[1:2]).splitlines()

    assert lines == [
        "name        steps/s",
        "----------  -------  ----------",
        "plain loop    1,234",
        "x                99  <- advised",
        "small print",
    ]


def test_a_remedy_stands_below_its_finding():
    lines = shown(PlainScreen, BLOCKS[2:3]).splitlines()

    assert lines == [
        "ok    cores       2 usable",
        "bad   open files  12 of 16 in use",
        "                  -> ulimit -n 4096",
    ]


@pytest.mark.parametrize("kind", [PlainScreen, RichScreen])
def test_a_long_finding_wraps_below_its_own_text(kind):
    finding = Finding("cores", "warn", "word " * 30 + "end")

    lines = [line.rstrip() for line in shown(kind, [Findings((finding,))], 60).splitlines()]

    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(" " * len("warn  cores  ") + "word") for line in lines[1:-1])


def test_both_looks_say_the_same_words():
    assert words(shown(PlainScreen)) == words(shown(RichScreen))


def test_a_line_to_paste_is_never_broken():
    line = "x = " + "1 + " * 40 + "1"

    for kind in (PlainScreen, RichScreen):
        assert line in shown(kind, [Code((line,))], width=40)


def test_bars_have_one_scale_and_a_mark():
    lines = shown(PlainScreen, BLOCKS[3:4], width=35).splitlines()

    assert lines == [
        " 1 env  #####|                1.00x",
        "8 envs  ##########          | 2.00x",
        "     x  ##                        ?",
    ]
    assert shown(
        PlainScreen, [BarChart((BarRow("a", 0.0, "0"), BarRow("b", 0.0, "0")))]
    ).split() == [*("a", "0", "b", "0")]


@pytest.mark.parametrize("width", [1, 10, 20, 35, 80, 300])
def test_bars_fit_their_window(width):
    for line in shown(PlainScreen, BLOCKS[3:4], width).splitlines():
        assert len(line) <= max(width, 17)


def test_rich_draws_on_a_terminal_only():
    assert isinstance(screen_on(Terminal(), plain=False), RichScreen)
    assert isinstance(screen_on(Terminal(), plain=True), PlainScreen)
    assert isinstance(screen_on(io.StringIO(), plain=False), PlainScreen)


@pytest.mark.parametrize(
    ("term", "encoding", "is_able"),
    [("xterm", "utf-8", True), ("dumb", "utf-8", False), ("xterm", "ascii", False)],
)
def test_only_some_terminals_can_be_drawn_over(monkeypatch, term, encoding, is_able):
    class Encoded(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", term)
    with Encoded(io.BytesIO(), encoding=encoding) as terminal:
        assert can_redraw(terminal) is is_able
    assert not can_redraw(io.StringIO())


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2 cells under 1 columns"):
        Table(("a",), (("1", "2"),))
    with pytest.raises(ValueError, match="1 levels for 0 rows"):
        Table(("a",), (), levels=("ok",))
