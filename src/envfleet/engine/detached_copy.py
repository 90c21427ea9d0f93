"""Copies of values between threads of one process, as sending them to another process would do.

What cannot be copied, or nests too deep, is handed over as it is. In dicts, lists and tuples
everything else is still copied.
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
"""How deep containers are copied item by item; deeper ones are pickled."""


class _NotPlain(Exception):
    """The value holds an object that only its own class can copy."""


def detached_copy(value: Any) -> Any:
    """A copy of `value` that shares nothing with it that could change."""
    try:
        return _copied_plain(value, _DEPTH)
    except _NotPlain:
        with uninterrupted:  # an exception of a signal handler is not a failure to copy
            return _copied_by_class(value)


def _copied_plain(value: Any, depth: int) -> Any:
    """A copy of numbers, texts, arrays, and of dicts, lists and tuples of these: most infos."""
    kind = type(value)
    if kind in _NEVER_CHANGE:
        return value
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if depth and kind is dict:
        return {key: _copied_plain(item, depth - 1) for key, item in value.items()}
    if depth and (kind is list or kind is tuple):
        return kind([_copied_plain(item, depth - 1) for item in value])
    raise _NotPlain


def _copied_by_class(value: Any, above: tuple[int, ...] = ()) -> Any:
    nests_too_deep = False
    for copy in (_by_pickle, deepcopy):  # pickle is many times as fast, and what processes use
        try:
            return copy(value)
        except KeyboardInterrupt:  # the second Ctrl-C: the first one is held back
            raise
        except RecursionError:
            nests_too_deep = True
        except BaseException:
            continue
    if id(value) in above or (above and nests_too_deep):
        return value
    above = (*above, id(value))
    if type(value) is dict:
        return {key: _copied_by_class(item, above) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied_by_class(item, above) for item in value)
    return value


def _by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
