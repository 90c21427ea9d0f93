"""What `compat="agilerl"` changes: NaN for agents that are not there, and the class of errors."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.errors import ActionError, EnvFailed
from envfleet.multiagent.agent_fleet import Array, Bools


@contextmanager
def own_class_of_errors() -> Iterator[None]:
    """An environment's ValueError is a ValueError here too, and `EnvFailed` as well."""
    try:
        yield
    except EnvFailed as exc:
        name = exc.reason.partition(":")[0]
        raise _agilerl_failure(name, *exc.args).with_traceback(exc.__traceback__) from exc.__cause__


def _agilerl_failure(name: str, *args: Any) -> EnvFailed:
    try:
        return _class_of(name)(*args)
    except TypeError:  # a few cannot be built with arguments of ours
        return EnvFailed(*args)


@functools.cache
def _class_of(name: str) -> type[EnvFailed]:
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return EnvFailed  # a class of the environment's own, which may not exist here
    return type(
        EnvFailed.__name__,
        (EnvFailed, kind),
        {"__reduce__": lambda self: (_agilerl_failure, (name, *self.args))},
    )


def or_nan(values: Array, there: Bools) -> Array:
    """NaN for those that are not there."""
    return values if there.all() else np.where(there, values, np.nan)


def obs_with_nan(tree: Any, there: Bools) -> Any:
    """NaN for those that are not there, where NaN exists; numbers have an axis of their own."""
    if isinstance(tree, dict):
        return {key: obs_with_nan(part, there) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(obs_with_nan(part, there) for part in tree)
    values = tree[:, np.newaxis] if tree.ndim == there.ndim else tree
    if values.dtype.kind != "f" or there.all():
        return values
    values = values.copy()
    values[~there] = np.nan
    return values


def without_nan(given: Any, space: Any, alive: Bools, name: Any) -> Any:
    """Actions as AgileRL gives them: NaN for agents that are not there."""
    if isinstance(given, Mapping | tuple):
        return given
    values = np.asarray(given)
    if isinstance(space, spaces.Discrete) and values.shape == (*alive.shape, 1):
        values = values[..., 0]
    if values.dtype.kind == "f":
        is_nan = np.isnan(values).reshape(*alive.shape, -1).any(axis=-1)
        if (is_nan & alive).any():
            raise ActionError(f"{name!r} is alive in some slots where its action is NaN")
        values = np.nan_to_num(values) if is_nan.any() else values
        if space.dtype.kind in "iu" and np.array_equal(values, np.trunc(values)):
            values = values.astype(space.dtype)
    return values
