"""Which of an environment's named actions is meant: by its number or by its name."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any


def chosen(action: Any, names: Mapping[int, str]) -> int | None:
    """The number of the action, or None if it is none of them.

    A name is taken whole and in any case, as the rest of the library takes it: "left" is "Left",
    "Left!" is nothing.
    """
    if isinstance(action, str):
        # A megabyte is not worth a lower-case copy.
        if len(action) > 2 * max(map(len, names.values()), default=0):
            return None
        said = action.lower()
        return next((number for number, name in names.items() if name.lower() == said), None)
    try:
        number = operator.index(action)
    except TypeError:
        return None
    return number if number in names else None
