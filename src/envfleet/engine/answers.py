"""What `reset` and `step` must return, and what to say to an environment that returns otherwise.

What `reset` returned is looked at; what `step` returned is not, since that would cost every step:
there the error of unpacking it is put into words.
"""

from __future__ import annotations

import re
from typing import Any

_OLD_API = "environments of the old Gym API need a wrapper, such as shimmy's GymV21CompatibilityV0"
_WANTED = {
    "2": "reset must return two values (obs, info)",
    "5": "step must return five values (obs, reward, terminated, truncated, info)",
}
_UNPACKING = re.compile(r"values to unpack \(expected ([25])(?:, got (\d+))?\)")
_SEEKERS = ("gymnasium.core", "gymnasium.vector", "envfleet.engine.")
"""Where attributes are looked up by name; a method that is found may lack things of its own."""
_UNPACKERS = ("envfleet.engine.", "gymnasium.wrappers.")
"""Where environments' answers are unpacked; an environment may unpack things of its own."""


def read_reset(answer: Any) -> tuple[Any, dict[str, Any]]:
    """The observation and the info, if these are what `reset` returned."""
    is_tuple = isinstance(answer, tuple | list)
    if is_tuple and len(answer) == 2:
        obs, info = answer
        return obs, info
    got = len(answer) if is_tuple else f"1 of type {type(answer).__name__}"
    raise TypeError(f"{_WANTED['2']}, got {got}; {_OLD_API}")


def in_words(exc: BaseException) -> BaseException:
    """`exc`; if an answer of the wrong length raised it, an error that says so, caused by it."""
    found = _UNPACKING.search(str(exc)) if isinstance(exc, ValueError) else None
    if found is None or not _raised_in(exc).startswith(_UNPACKERS):
        return exc
    expected, got = found.groups()
    error = TypeError(f"{_WANTED[expected]}, got {got or 'another number of them'}; {_OLD_API}")
    error.__cause__ = exc
    return error


def kind_of(exc: BaseException) -> str:
    """The name of its class; "AttributeError" only of what was looked up by name and not found."""
    if isinstance(exc, AttributeError) and not _raised_in(exc).startswith(_SEEKERS):
        return Exception.__name__
    return type(exc).__name__


def _raised_in(exc: BaseException) -> str:
    """The module that raised `exc`."""
    step = exc.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return "" if step is None else str(step.tb_frame.f_globals.get("__name__", ""))
