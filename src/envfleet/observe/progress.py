"""Progress bars for work that takes a while: silent, plain text, or drawn by rich.

Owns the choice between the three and nothing else. Law: a bar only ever writes to the stream it was
given, leaves that stream's line clean when it ends, and never raises because of what it displays.
What the work is, and when it advances, is the caller's business.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

__all__ = ["PlainProgress", "Progress", "ProgressBar", "RichProgress", "Silent", "progress_on"]


class ProgressBar(Protocol):
    """One piece of work under way."""

    def note(self, text: str) -> None:
        """Say what is being done now."""

    def advance(self, num: int = 1) -> None:
        """Count ``num`` more units as done."""


class Progress(Protocol):
    """Something that can show bars."""

    def bar(self, title: str, total: int) -> AbstractContextManager[ProgressBar]:
        """Open a bar of ``total`` units; it disappears when the context ends."""


class Silent:
    """Shows nothing: for ``--json``, for pipes and for tests."""

    def note(self, text: str) -> None:
        """Ignore the note."""

    def advance(self, num: int = 1) -> None:
        """Ignore the progress."""

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[ProgressBar]:
        """Give a bar that does nothing."""
        yield self


class PlainProgress:
    """One line of ordinary characters, drawn over itself with a carriage return."""

    def __init__(self, stream: TextIO) -> None:
        """Draw on ``stream``, which should be a terminal."""
        self._stream = stream

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[ProgressBar]:
        """Draw a bar and wipe it when the work ends, however it ends."""
        bar = _PlainBar(self._stream, title, total)
        bar.draw()
        try:
            yield bar
        finally:
            bar.wipe()


class _PlainBar:
    def __init__(self, stream: TextIO, title: str, total: int) -> None:
        self._stream, self._title, self._total = stream, title, max(total, 1)
        self._done, self._note, self._start_s = 0, "", time.monotonic()

    def note(self, text: str) -> None:
        self._note = text
        self.draw()

    def advance(self, num: int = 1) -> None:
        self._done = min(self._done + num, self._total)
        self.draw()

    def draw(self) -> None:
        columns = shutil.get_terminal_size((80, 24)).columns
        elapsed_s = time.monotonic() - self._start_s
        line = plain_bar(self._title, self._done, self._total, elapsed_s, self._note)
        # one column stays free: a full line would wrap, and the return then misses its start
        self._stream.write("\r" + line[: columns - 1].ljust(columns - 1))
        self._stream.flush()

    def wipe(self) -> None:
        columns = shutil.get_terminal_size((80, 24)).columns
        self._stream.write("\r" + " " * (columns - 1) + "\r")
        self._stream.flush()


def plain_bar(title: str, done: int, total: int, elapsed_s: float, note: str) -> str:
    """The text of a plain bar, without any control characters."""
    width = 20
    filled = width * done // max(total, 1)
    return (
        f"{title} [{'#' * filled}{'.' * (width - filled)}] {done}/{total} {elapsed_s:.0f}s {note}"
    )


class RichProgress:
    """A bar drawn by rich, with the time that is left."""

    def __init__(self, stream: TextIO) -> None:
        """Draw on ``stream``, which should be a terminal."""
        self._stream = stream

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[ProgressBar]:
        """Draw a bar and remove it when the work ends, however it ends."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Drawn

        drawn = Drawn(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=Console(file=self._stream),
            transient=True,
            # rich would refresh from a thread of its own, and the work shown here forks processes
            auto_refresh=False,
            # workers and environments write to the real descriptors anyway, so nothing is gained by
            # replacing sys.stdout, and doing so would send results to the wrong stream
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with drawn:
            task = drawn.add_task(title, total=total, note="")

            class Drawing:
                def note(self, text: str) -> None:
                    drawn.update(task, note=text, refresh=True)

                def advance(self, num: int = 1) -> None:
                    drawn.update(task, advance=num, refresh=True)

            yield Drawing()


def progress_on(stream: TextIO, *, rich: bool) -> Progress:
    """Choose how progress shows on ``stream``: nothing unless it is a terminal.

    Args:
        stream: Where bars go, usually ``sys.stderr``.
        rich: Whether rich may draw them; plain characters otherwise.
    """
    if not stream.isatty():
        return Silent()
    return RichProgress(stream) if rich else PlainProgress(stream)
