"""`with uninterrupted:` postpones signal handlers until a piece of bookkeeping is complete.

Python runs handlers between any two operations of the main thread, and Ctrl-C raises there. A
handler that raised halfway would leave the fleet's records inconsistent, so it waits for the end of
the block. A signal that arrives a second time is let through at once: a user who asks twice does
not want to wait.
"""

from __future__ import annotations

import functools
import os
import threading

# those of `signal` make an enumeration's member of what they return, which takes ten times as long
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from signal import SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, valid_signals
from typing import Any

_HELD = tuple(int(one) for one in (SIGINT, SIGTERM, SIGALRM, SIGHUP, SIGUSR1, SIGUSR2))


class _Uninterrupted:
    """Of the main thread alone: no other ever runs a handler.

    In here too a handler may raise between any two operations, as long as it is not held or as soon
    as it is given back; giving back can be done again, from any point.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Callable[[int, Any], object]] = {}
        """Those that wait."""
        self._came: dict[int, Any] = {}
        """Signals that have come meanwhile, with the frames that they came in."""
        self._holder = self._hold
        """Of one identity, so that it is known again."""

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth:
            self._depth += 1
            return
        try:
            for number in _HELD:
                handler = getsignal(number)
                if callable(handler) and handler is not self._holder:
                    self._handlers[number] = handler
                    signal(number, self._holder)
            self._depth = 1
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *exc_info: object) -> None:
        if not self._depth or threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if not self._depth:
            self._give_back()

    def _hold(self, number: int, frame: Any) -> None:
        if number in self._came:
            self._handlers[number](number, frame)
        self._came[number] = frame

    def _give_back(self) -> None:
        """Put the handlers where they were, and let them have what came."""
        try:
            for number, handler in self._handlers.items():
                if getsignal(number) is self._holder:
                    signal(number, handler)
            while self._came:
                number, frame = self._came.popitem()
                self._handlers[number](number, frame)
        except BaseException:
            self._give_back()
            raise

    def leave_to_parent(self) -> None:
        """A copy of the process has nothing to finish that was begun before, nor its signals."""
        self._came.clear()
        self._depth = 0
        self._give_back()


def is_from_handler(exc: BaseException) -> bool:
    """Whether the handler of a signal raised `exc`: one of its frames is a handler's."""
    codes = {_code_of(getsignal(number)) for number in valid_signals()}
    step = exc.__traceback__
    while step is not None:
        if step.tb_frame.f_code in codes:
            return True
        step = step.tb_next
    return False


def _code_of(handler: Any) -> Any:
    """What a handler runs; None if it is none, or not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    own = getattr(handler, "__code__", None)
    return own if own is not None else getattr(type(handler).__call__, "__code__", None)


uninterrupted = _Uninterrupted()
os.register_at_fork(after_in_child=uninterrupted.leave_to_parent)
