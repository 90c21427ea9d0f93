"""Caches as JSON: one line per environment, for whoever reads rollouts later.

Law: whatever an environment put into its cache has a line; what JSON has no form for is told in
words, and infinite or undefined numbers as text.
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
"""A larger array, a picture say, is told by its shape."""


def as_json_line(cache: Cache) -> str:
    """A cache on one line, without its end."""
    return json.dumps(as_json(cache), allow_nan=False)


def as_json(value: Any) -> Any:
    """The same, of strings, numbers, booleans, None, lists and dicts alone."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, np.ndarray) and value.size <= _MOST_NUMBERS:
        return as_json(value.tolist())
    shape = getattr(value, "shape", None) or getattr(value, "size", None)
    return f"{type(value).__name__} {shape}" if shape is not None else repr(value)
