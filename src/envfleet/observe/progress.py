"""Progress bars for work that takes a while, drawn by rich on a terminal.

Law: a bar writes only to the stream it was given, leaves that stream's line clean when it ends, and
never raises because of what it displays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

__all__ = ["Progress", "ProgressBar", "RichProgress", "Silent", "progress_on"]


class ProgressBar(Protocol):
    """One piece of work under way."""

    def note(self, text: str) -> None:
        """Say what is being done now."""

    def advance(self, num: int = 1) -> None:
        """Count ``num`` more units as done."""

    def hidden(self) -> AbstractContextManager[None]:
        """Take the bar away while something else is written to its stream."""


class Progress(Protocol):
    """Something that can show bars."""

    is_drawn: bool
    """Whether a person sees them."""

    def bar(self, title: str, total: int) -> AbstractContextManager[ProgressBar]:
        """Open a bar of ``total`` units; it disappears when the context ends."""


class Silent:
    """Shows nothing: for ``--json``, for pipes and for tests."""

    is_drawn = False

    def note(self, text: str) -> None:
        """Ignore the note."""

    def advance(self, num: int = 1) -> None:
        """Ignore the progress."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Nothing is in the way."""
        yield

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[ProgressBar]:
        """Give a bar that does nothing."""
        yield self


class RichProgress:
    """A bar drawn by rich, with the time that is left."""

    is_drawn = True

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
        from rich.table import Column

        # it has the room that the others leave: as wide as it is, it would squeeze them all
        note = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        drawn = Drawn(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False, table_column=note),
            console=Console(file=self._stream),
            expand=True,
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

                @contextmanager
                def hidden(self) -> Iterator[None]:
                    drawn.stop()
                    try:
                        yield
                    finally:
                        drawn.start()

            yield Drawing()


def progress_on(stream: TextIO) -> Progress:
    """Bars on a terminal where rich is installed, else nothing."""
    if not stream.isatty():
        return Silent()
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        return Silent()
    return RichProgress(stream)
