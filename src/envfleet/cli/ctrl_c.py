"""Ctrl-C in two steps, the first asks for an end, the second makes it; and in one while importing.

SIGTERM, by which schedulers and containers ask for an end, is heard as Ctrl-C is, and so is SIGHUP,
by which a terminal that is closed does. Worker processes hear none of them here: they have handlers
of their own. Law: outside, all mean what they meant before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

__all__ = ["StopRequests", "exit_on_ctrl_c"]


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """In here a Ctrl-C ends the process, for while nothing is done but imports.

    A KeyboardInterrupt would not do: numpy makes an ImportError of it, and PyTorch aborts.
    """
    is_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_plain or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"envfleet: stopped\n")
    os._exit(130)


class StopRequests:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is entered."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        """Call `on_first` at the first one, in the middle of whatever is being done."""
        self._on_first = on_first
        self._before: dict[signal.Signals, Any] = {}
        self.is_asked = False
        """Whether somebody asked for an end."""

    def __enter__(self) -> Self:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if one == signal.SIGHUP and signal.getsignal(one) is signal.SIG_IGN:
                continue  # by nohup: the terminal may go, the run shall stay
            self._before[one] = signal.signal(one, self._hear)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            if number == signal.SIGHUP:  # both the shell and the kernel tell of a terminal
                return
            raise KeyboardInterrupt
        self.is_asked = True
        self._on_first()
