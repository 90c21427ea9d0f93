"""Configurations of environments: only fields that exist, with values of the types they declare.

A YAML file has no types, so a wrong value would be found where it is used, far from its name, or
not at all: `is_slippery: "no"` is true. Law: a field whose annotation is made of plain types (bool,
numbers, text, literals, lists, mappings, functions, and unions of them) holds such a value or is
named in a ConfigError; any other annotation is not checked.
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

_Test = Callable[[Any], bool]
_Type = tuple[str, _Test]
"""How an error names a type, and whether a value is of it."""

_PLAIN: dict[Any, _Type] = {
    bool: ("true or false", lambda value: _is_bool(value)),
    int: ("a whole number", lambda value: isinstance(value, Integral) and not _is_bool(value)),
    float: ("a finite number", lambda value: _is_number(value)),
    str: ("text", lambda value: isinstance(value, str)),
    types.NoneType: ("none", lambda value: value is None),
}
_PLURALS = {bool: "truths", int: "whole numbers", float: "finite numbers", str: "texts"}


def build_config(config_class: type[Any], settings: Mapping[str, Any] | None) -> Any:
    """A configuration with these fields; a field that does not exist is a ConfigError.

    Values are copied, so that two configurations share nothing that could change, but for the
    fields that their class names in `shared`.
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
        **{name: one if name in shared else _copy(one) for name, one in given.items()}
    )


def _copy(value: Any) -> Any:
    """A copy, or the value itself if it cannot be copied: a lock, say."""
    try:
        return deepcopy(value)
    except Exception:
        return value


def check_range(config: Any, *names: str, least: float, most: float | None = None) -> None:
    """Raise ConfigError for the first of these fields that is out of range; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value <= (math.inf if most is None else most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ConfigError(f"{name} must be {limits}, got {value}")


def check_field_types(config: Any) -> None:
    """Raise ConfigError for the first field of a dataclass that holds a value of another type.

    A default always passes, even if it does not match its annotation.
    """
    config_class: Any = type(config)
    for name, default, words, is_right in _field_types(config_class):
        value = getattr(config, name)
        if value is not default and not is_right(value):
            raise ConfigError(f"{name} must be {words}, got {value!r:.60}")


@lru_cache(maxsize=64)
def _field_types(config_class: type[Any]) -> tuple[tuple[str, Any, str, _Test], ...]:
    """Name, default and type of every field; cached, as thousands of configurations are checked."""
    try:
        hints = get_type_hints(config_class)
    except Exception:  # names that are imported for type checkers only
        return ()
    return tuple(
        (one.name, one.default, *_type_of(hints[one.name])) for one in fields(config_class)
    )


def _type_of(hint: Any) -> _Type:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        either = [_type_of(one) for one in inner]
        words = " or ".join(dict.fromkeys(words for words, _ in either))
        return words, lambda value: any(test(value) for _, test in either)
    if origin is Literal:
        words = f"one of {', '.join(map(str, inner))}"
        return words, lambda value: isinstance(value, str | int) and value in inner
    if origin is Callable:
        return "a function", callable
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of, hold = _items_of(inner[1:])
        return f"a mapping{of}", lambda value: isinstance(value, Mapping) and hold(value.values())
    if isinstance(origin, type) and issubclass(origin, Sequence):
        of, hold = _items_of(inner)
        return f"a list{of}", lambda value: _is_list(value) and hold(value)
    return getattr(hint, "__name__", str(hint)), lambda value: True


def _items_of(inner: tuple[Any, ...]) -> _Type:
    """The type of the items of a container, if they are all of one plain type."""
    hints = {one for one in inner if one is not ...}
    if len(hints) != 1 or not hints <= _PLAIN.keys():
        return "", lambda values: True
    hint = hints.pop()
    of = f" of {_PLURALS[hint]}" if hint in _PLURALS else ""
    return of, lambda values: all(map(_PLAIN[hint][1], values))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_number(value: Any) -> bool:
    if not isinstance(value, Real) or _is_bool(value):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
