"""Whether what a configuration was given is of the kinds that its fields say.

Pure. A file has no types, so a wrong value would else be found where it is used, far from its name,
or not at all: `is_slippery: "no"` is true. Law: a field whose annotation is made of plain kinds
(truth, numbers, text, choices, lists, mappings, functions, and either of them) holds such a value
or is named in a ConfigError; of any other annotation nothing is asked.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from envfleet.errors import ConfigError

_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool | np.bool_)),
    int: ("a whole number", lambda value: isinstance(value, Integral) and not _is_truth(value)),
    float: ("a finite number", lambda value: _is_number(value)),
    str: ("text", lambda value: isinstance(value, str)),
    types.NoneType: ("none", lambda value: value is None),
}


def check_kinds(config: Any) -> None:
    """Raise ConfigError for the first field of a dataclass that holds a value of another kind.

    A default is what its author meant, whatever the annotation says.
    """
    config_class: Any = type(config)
    kinds = _annotations(config_class)
    for one in fields(config):
        value = getattr(config, one.name)
        if _is_default(one, value) or one.name not in kinds:
            continue
        if not _is_of(kinds[one.name], value):
            raise ConfigError(f"{one.name} must be {_said(kinds[one.name])}, got {value!r:.60}")


def _is_default(field: Field[Any], value: Any) -> bool:
    return field.default is not MISSING and value is field.default


@lru_cache(maxsize=64)
def _annotations(config_class: type[Any]) -> dict[str, Any]:
    try:
        return get_type_hints(config_class)
    except Exception:  # names that are there for type checkers only
        return {}


def _is_of(kind: Any, value: Any) -> bool:
    if kind in _PLAIN:
        return _PLAIN[kind][1](value)
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_is_of(one, value) for one in inner)
    if origin is Literal:
        return isinstance(value, str | int) and value in inner
    if origin is Callable:
        return callable(value)
    if _is_a(origin, Mapping):
        return isinstance(value, Mapping) and _hold(inner[1:], value.values())
    if _is_a(origin, Sequence):
        return isinstance(value, Sequence | np.ndarray) and (
            not isinstance(value, str | bytes) and _hold(inner, value)
        )
    return True


def _hold(inner: tuple[Any, ...], values: Any) -> bool:
    """Whether all are of the one plain kind that is asked for, if it is one."""
    kinds = [one for one in inner if one is not ...]
    if len(set(kinds)) != 1 or kinds[0] not in _PLAIN:
        return True
    return all(_PLAIN[kinds[0]][1](value) for value in values)


def _said(kind: Any) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind][0]
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_said, inner)))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is Callable:
        return "a function"
    if _is_a(origin, Mapping):
        return f"a mapping{_said_of(inner[1:])}"
    if _is_a(origin, Sequence):
        return f"a list{_said_of(inner)}"
    return getattr(kind, "__name__", str(kind))


def _said_of(inner: tuple[Any, ...]) -> str:
    many = {bool: "truths", int: "whole numbers", float: "finite numbers", str: "texts"}
    return f" of {many[inner[0]]}" if inner and inner[0] in many else ""


def _is_a(origin: Any, kind: type[Any]) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_number(value: Any) -> bool:
    if not isinstance(value, Real) or _is_truth(value):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
