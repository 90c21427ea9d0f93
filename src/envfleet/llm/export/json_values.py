"""Any value as JSON, such as caches with one line per environment.

Law: every cache can be written. A value that JSON cannot hold is written as a description, and a
number that is infinite or NaN as text.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.llm.manager_types import Cache

_MOST_NUMBERS = 10_000
"""A larger array, an image say, is described by its shape."""
_AS_THEY_ARE = frozenset((type(None), str, bool, int))
"""Looked up first: what an abstract class says of a type takes longer."""


def as_json_line(cache: Cache) -> str:
    """A cache as one line, without a newline."""
    return json.dumps(as_json(cache), allow_nan=False)


def as_json(value: Any) -> Any:
    """The value made of strings, numbers, booleans, None, lists and dicts only."""
    if type(value) in _AS_THEY_ARE or isinstance(value, str | bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if not isinstance(value, float) and isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, float | numbers.Real):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, dict | Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, np.ndarray) and value.size <= _MOST_NUMBERS:
        return as_json(value.tolist())
    shape = getattr(value, "shape", None) or getattr(value, "size", None)
    return f"{type(value).__name__} {shape}" if shape is not None else repr(value)
