"""Streams whose reader may go away while there is still something to do.

Law: a pipe that nobody reads any more, or a terminal that was closed, costs what was to be shown
there and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

__all__ = ["dispensable", "silence", "take_any_sign"]


@contextmanager
def dispensable(stream: TextIO) -> Iterator[None]:
    """In here `stream` is written to; once that cannot be done it is silenced."""
    try:
        yield
    except OSError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Point a stream at nothing: what others write to it, and the interpreter's last flush, too."""
    with suppress(OSError, ValueError):  # it has no file descriptor, or none any more
        place = stream.fileno()
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, place)
        os.close(devnull)


def take_any_sign(stream: TextIO | None) -> None:
    """Let a stream show a sign that its encoding does not have as another, instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and getattr(stream, "errors", "") in ("strict", "surrogateescape"):
        reconfigure(errors="replace")
