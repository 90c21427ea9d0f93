"""Copies as a journey to another process makes them, for those who share one memory.

What cannot be copied, or nests too deep, is handed over as it is; of dicts, lists and tuples all
the rest is copied.
"""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import numpy as np

from envfleet.engine.interrupts import uninterrupted

_NEVER_CHANGE = {type(None), bool, int, float, complex, str, bytes}
_NEVER_CHANGE |= {np.dtype(code).type for code in "?bhilqBHILQefdgFDG"}
_DEPTH = 4
"""Things in things in things, and no deeper, are looked at one by one."""


class _NotPlain(Exception):
    """There is something in it that only its own class can copy."""


def detached_copy(value: Any) -> Any:
    """A copy of `value` that shares nothing with it that could change."""
    try:
        return _plain(value, _DEPTH)
    except _NotPlain:
        with (
            uninterrupted
        ):  # what a signal's handler raises is not to be taken for a failure to copy
            return _travelled(value)


def _plain(value: Any, depth: int) -> Any:
    """The same of numbers, texts, arrays, and dicts, lists and tuples of these: most infos."""
    kind = type(value)
    if kind in _NEVER_CHANGE:
        return value
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if depth and kind is dict:
        return {key: _plain(item, depth - 1) for key, item in value.items()}
    if depth and (kind is list or kind is tuple):
        return kind([_plain(item, depth - 1) for item in value])
    raise _NotPlain


def _travelled(value: Any, above: tuple[int, ...] = ()) -> Any:
    nests_too_deep = False
    for copy in (_by_pickle, deepcopy):  # the first is many times as fast, and as processes do
        try:
            return copy(value)
        except KeyboardInterrupt:  # the second one: the first is waiting
            raise
        except RecursionError:
            nests_too_deep = True
        except BaseException:
            continue
    if id(value) in above or (above and nests_too_deep):
        return value
    above = (*above, id(value))
    if type(value) is dict:
        return {key: _travelled(item, above) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_travelled(item, above) for item in value)
    return value


def _by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
