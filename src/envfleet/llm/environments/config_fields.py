"""Configurations by their fields: those that exist, with values of the kinds that they say.

Pure. A file has no types, so a wrong value would else be found where it is used, far from its name,
or not at all: `is_slippery: "no"` is true. Law: a field whose annotation is made of plain kinds
(truth, numbers, text, choices, lists, mappings, functions, and either of them) holds such a value
or is named in a ConfigError; of any other annotation nothing is asked.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from envfleet.errors import ConfigError, did_you_mean

Test = Callable[[Any], bool]

_PLAIN: dict[Any, tuple[str, Test]] = {
    bool: ("true or false", lambda value: isinstance(value, bool | np.bool_)),
    int: ("a whole number", lambda value: isinstance(value, Integral) and not _is_truth(value)),
    float: ("a finite number", lambda value: _is_number(value)),
    str: ("text", lambda value: isinstance(value, str)),
    types.NoneType: ("none", lambda value: value is None),
}


def build_config(config_class: type[Any], settings: Mapping[str, Any] | None) -> Any:
    """A configuration whose fields are as given; one that does not exist is a ConfigError.

    Its values are its own: two configurations of the same settings share nothing that could change,
    but for fields that their class names in `shared`.
    """
    given = dict(settings or {})
    known = [one.name for one in fields(config_class) if one.init]
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{config_class.__name__} has no field {key!r}"
                f"{did_you_mean(str(key), known) or '; it has ' + ', '.join(known)}"
            )
    shared = getattr(config_class, "shared", ())
    return config_class(
        **{name: one if name in shared else _own(one) for name, one in given.items()}
    )


def _own(value: Any) -> Any:
    """A copy; or the value itself if it is of a kind of which there is only one: a lock, say."""
    try:
        return deepcopy(value)
    except Exception:
        return value


def check_field_types(config: Any) -> None:
    """Raise ConfigError for the first field of a dataclass that holds a value of another kind.

    A default is what its author meant, whatever the annotation says.
    """
    config_class: Any = type(config)
    for name, default, kind, is_right in _fields(config_class):
        value = getattr(config, name)
        if value is not default and not is_right(value):
            raise ConfigError(f"{name} must be {_said(kind)}, got {value!r:.60}")


@lru_cache(maxsize=64)
def _fields(config_class: type[Any]) -> tuple[tuple[str, Any, Any, Test], ...]:
    """Name, default, annotation and test of every field: there may be thousands to be checked."""
    try:
        kinds = get_type_hints(config_class)
    except Exception:  # names that are there for type checkers only
        return ()
    return tuple(
        (one.name, one.default, kinds[one.name], _test_of(kinds[one.name]))
        for one in fields(config_class)
    )


def _test_of(kind: Any) -> Test:
    if kind in _PLAIN:
        return _PLAIN[kind][1]
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        either = [_test_of(one) for one in inner]
        return lambda value: any(test(value) for test in either)
    if origin is Literal:
        return lambda value: isinstance(value, str | int) and value in inner
    if origin is Callable:
        return callable
    if _is_a(origin, Mapping):
        hold = _test_of_all(inner[1:])
        return lambda value: isinstance(value, Mapping) and hold(value.values())
    if _is_a(origin, Sequence):
        hold = _test_of_all(inner)
        return lambda value: _is_list(value) and hold(value)
    return lambda value: True


def _test_of_all(inner: tuple[Any, ...]) -> Test:
    """Whether all are of the one plain kind that is asked for, if it is one."""
    kinds = {one for one in inner if one is not ...}
    if len(kinds) != 1 or not kinds <= _PLAIN.keys():
        return lambda values: True
    test = _PLAIN[kinds.pop()][1]
    return lambda values: all(map(test, values))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


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
