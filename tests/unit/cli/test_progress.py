"""Bars: silent in pipes, and gone from a terminal when the work is over."""

import io
import re
import sys
import threading

import pytest

from envfleet.observe.progress import RichProgress, Silent, progress_on
from tests.e2e.terminal import Screen


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("kind", [RichProgress, lambda stream: Silent()])
def test_advances_and_ends(kind):
    stream = Terminal()

    with kind(stream).bar("bench", 4) as bar:
        bar.note("one")
        bar.advance()
        bar.advance(3)

    if kind is RichProgress:
        assert "bench" in stream.getvalue()
        assert "4/4" in stream.getvalue()
    else:
        assert stream.getvalue() == ""


def test_an_error_inside_leaves_a_clean_line():
    stream = Terminal()

    with pytest.raises(KeyError), RichProgress(stream).bar("bench", 4):
        raise KeyError

    last = stream.getvalue().replace("\x1b[2K", "\r" + " " * 79).replace("\x1b[1A", "")
    last = last.replace("\x1b[?25h", "").rstrip("\r").rpartition("\r")[2]
    assert last.strip() == ""


def test_what_is_said_meanwhile_stands_above_a_bar_that_leaves_no_trace():
    stream = Terminal()

    def lines():
        return Screen(80).feed(stream.getvalue().replace("\n", "\r\n")).text.splitlines()

    with RichProgress(stream).bar("rollout", 4) as bar:
        bar.note(f"[/b] {'a long note ' * 9}")
        bar.advance()
        with bar.hidden():
            stream.write("an attempt failed\n")
            assert lines() == ["an attempt failed"]
        bar.advance()
        said, drawn = lines()
        assert said == "an attempt failed"
        assert re.fullmatch(r"rollout ━+╺━+ 2/4 [\d:]+ left [-\d:]+ \[/b\] a long note .*…", drawn)
    assert lines() == ["an attempt failed"]


def test_rich_draws_from_no_thread_of_its_own():
    before = threading.active_count()

    with RichProgress(Terminal()).bar("bench", 1) as bar:
        bar.advance()
        assert threading.active_count() == before


def test_only_terminals_get_bars(monkeypatch):
    assert isinstance(progress_on(io.StringIO()), Silent)
    assert isinstance(progress_on(Terminal()), RichProgress)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(progress_on(Terminal()), Silent)
