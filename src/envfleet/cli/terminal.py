"""What a stream can show, and streams that are closed while a command still works.

Law: when a reader goes away (`head`, a closed terminal), only the output is lost; the work goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from envfleet.errors import MissingExtra


@contextmanager
def silenced_if_closed(stream: TextIO) -> Iterator[None]:
    """Silence `stream` if writing to it fails in here."""
    try:
        yield
    except OSError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Send all later output to nowhere, also that of the interpreter's last flush."""
    with suppress(OSError, ValueError):  # it has no file descriptor, or none any more
        place = stream.fileno()
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, place)
        os.close(devnull)


def replace_unknown_characters(stream: TextIO | None) -> None:
    """Let a stream replace characters that its encoding does not have, instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and getattr(stream, "errors", "") in ("strict", "surrogateescape"):
        reconfigure(errors="replace")


def require_rich() -> None:
    """Refuse to draw on a terminal without rich.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError as exc:
        raise MissingExtra(
            "rich, which draws on a terminal, is not installed: pip install 'envfleet[cli]', or "
            "add --plain"
        ) from exc


def can_redraw(stream: TextIO) -> bool:
    """Whether rich can draw over itself on ``stream``: a terminal that can, with Unicode."""
    if not stream.isatty():
        return False
    require_rich()
    from rich.console import Console

    console = Console(file=stream)
    return not console.is_dumb_terminal and not console.options.ascii_only
