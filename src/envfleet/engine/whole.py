"""Things that are done as a whole: a signal's handler, which may raise, waits until they are done.

Python runs handlers between any two operations of the main thread, and Ctrl-C raises there. Where
the books would be left half written, `with whole:` keeps what comes for its end. A signal that
comes a second time is let through at once: whoever asks twice does not want to wait.
"""

from __future__ import annotations

import os
import threading

# those of `signal` make an enumeration's member of what they return, which takes ten times as long
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from signal import SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from typing import Any

_HELD = tuple(int(one) for one in (SIGINT, SIGTERM, SIGALRM, SIGHUP, SIGUSR1, SIGUSR2))


class _Whole:
    """Of the main thread alone: no other ever runs a handler."""

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Callable[[int, Any], object]] = {}
        """Those that wait."""
        self._came: dict[int, Any] = {}
        """Signals that have come meanwhile, with the frames that they came in."""

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth:
            self._depth += 1
            return
        self._came.clear()
        try:
            for number in _HELD:
                handler = getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal(number, self._note)
        except BaseException:  # of one that is not held yet
            self._restore()
            raise
        self._depth = 1

    def __exit__(self, *exc_info: object) -> None:
        if not self._depth or threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if not self._depth:
            self._restore()

    def _note(self, number: int, frame: Any) -> None:
        handler = self._handlers.get(number)
        if number in self._came and handler is not None:
            handler(number, frame)
        self._came[number] = frame

    def _restore(self) -> None:
        """Give the handlers back, and let them have what came."""
        handlers = self._handlers
        while handlers:
            number, handler = handlers.popitem()
            try:
                signal(number, handler)
                if number in self._came:
                    handler(number, self._came.pop(number))
            except BaseException:
                self._restore()
                raise

    def leave_to_parent(self) -> None:
        """A copy of the process has none of its business to finish, nor its signals."""
        self._came.clear()
        self._depth = 0
        self._restore()


whole = _Whole()
os.register_at_fork(after_in_child=whole.leave_to_parent)
