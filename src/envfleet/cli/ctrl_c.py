"""Ctrl-C in two steps: the first asks a run to stop, the second stops it at once.

SIGTERM (from schedulers and containers) and SIGHUP (from a terminal that is closed) count as
Ctrl-C. Worker processes have handlers of their own. Law: afterwards all handlers are as before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, while it only imports modules.

    KeyboardInterrupt does not work there: numpy turns it into an ImportError, and PyTorch aborts.
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
        """Call `on_first` at the first one, from the signal handler."""
        self._on_first = on_first
        self._before: dict[signal.Signals, Any] = {}
        self.is_asked = False
        """Whether there was one."""

    def __enter__(self) -> Self:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if one == signal.SIGHUP and signal.getsignal(one) is signal.SIG_IGN:
                continue  # under nohup the run outlives its terminal
            self._before[one] = signal.signal(one, self._hear)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            if number == signal.SIGHUP:  # it comes twice: from the shell and from the kernel
                return
            raise KeyboardInterrupt
        self.is_asked = True
        self._on_first()
