"""Bars: silent in pipes, and gone from a terminal when the work is over."""

import io
import sys
import threading

import pytest

from envfleet.cli.terminal import has_rich
from envfleet.observe.progress import (
    PlainProgress,
    RichProgress,
    Silent,
    plain_bar,
    progress_on,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("kind", [PlainProgress, RichProgress, lambda stream: Silent()])
def test_advances_and_ends(kind):
    stream = Terminal()

    with kind(stream).bar("bench", 4) as bar:
        bar.note("one")
        bar.advance()
        bar.advance(3)

    if kind in (PlainProgress, RichProgress):
        assert "bench" in stream.getvalue()
        assert "4/4" in stream.getvalue()
    else:
        assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", [PlainProgress, RichProgress])
def test_an_error_inside_leaves_a_clean_line(kind):
    stream = Terminal()

    with pytest.raises(KeyError), kind(stream).bar("bench", 4):
        raise KeyError

    last = stream.getvalue().replace("\x1b[2K", "\r" + " " * 79).replace("\x1b[1A", "")
    last = last.replace("\x1b[?25h", "").rstrip("\r").rpartition("\r")[2]
    assert last.strip() == ""


def test_a_plain_bar_fits_its_line():
    stream = Terminal()

    with PlainProgress(stream).bar("bench", 2) as bar:
        bar.note("a very long note " * 20)

    assert max(len(line) for line in stream.getvalue().split("\r")) == 79


def test_plain_bar_text():
    assert plain_bar("tune", 5, 10, 3.4, "serial") == "tune [##########..........] 5/10 3s serial"
    assert plain_bar("tune", 0, 0, 0.0, "").startswith("tune [....................] 0/0")


def test_rich_draws_from_no_thread_of_its_own():
    before = threading.active_count()

    with RichProgress(Terminal()).bar("bench", 1) as bar:
        bar.advance()
        assert threading.active_count() == before


def test_only_terminals_get_bars(monkeypatch):
    assert isinstance(progress_on(io.StringIO(), rich=True), Silent)
    assert isinstance(progress_on(Terminal(), rich=True), RichProgress)
    assert isinstance(progress_on(Terminal(), rich=False), PlainProgress)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(progress_on(Terminal(), rich=has_rich()), PlainProgress)
