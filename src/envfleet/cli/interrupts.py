"""Ctrl-C in two steps: the first asks for an end, the second makes it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

__all__ = ["Interrupts"]


class Interrupts:
    """Counts Ctrl-C while it is entered. Law: outside, a Ctrl-C means what it meant before."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        """Call `on_first` at the first one, in the middle of whatever is being done."""
        self._on_first = on_first
        self._before: Any = None
        self.is_asked = False
        """Whether somebody asked for an end."""

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        self._on_first()
