"""Configurations of environments: only fields that exist, with values of the types they declare.

A YAML file has no types, so a wrong value would be found where it is used, far from its name, or
not at all: `is_slippery: "no"` is true. Law: a field whose annotation is made of plain types (bool,
numbers, text, literals, lists, mappings, functions, and unions of them) holds such a value or is
named in a ConfigError; any other annotation is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any

from envfleet.errors import ConfigError, did_you_mean


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
