"""Values of Gymnasium spaces made comparable: canonical form, rows of a batch, first difference.

Law: nothing here keeps a reference to what it was given; a canonical value is a copy, so an
environment that reuses its array cannot change a stream that was already recorded.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from functools import singledispatch
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import GraphInstance

from envfleet.layout import RecordSpace


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()
"""Stands where one side has a value and the other has none."""


class ValueDifference(NamedTuple):
    """Where two values part: a path such as ``['camera'][3, 4]`` below the value, and both ends."""

    path: str
    expected: Any
    got: Any


# ---- canonical form ------------------------------------------------------------------------------


@singledispatch
def canonical(space: spaces.Space[Any], value: Any) -> Any:
    """Copy `value` into the form a batch of `space` would hold it in.

    Arrays get the dtype of their space, as Gymnasium's batching gives them. A space of a type
    unknown here keeps its values as they are; register a function to change that.
    """
    return snapshot(value)


@canonical.register(spaces.Box)
@canonical.register(spaces.Discrete)
@canonical.register(spaces.MultiBinary)
@canonical.register(spaces.MultiDiscrete)
@canonical.register(RecordSpace)
def _(space: spaces.Space[Any], value: Any) -> Any:
    return np.array(value, dtype=space.dtype)


@canonical.register
def _(space: spaces.Dict, value: Any) -> Any:
    return {
        key: canonical(inner, value[key]) if key in value else MISSING
        for key, inner in space.spaces.items()
    }


@canonical.register(spaces.Tuple)
def _(space: Any, value: Any) -> Any:
    return tuple(canonical(inner, part) for inner, part in zip(space.spaces, value, strict=True))


@canonical.register
def _(space: spaces.Text, value: Any) -> Any:
    return str(value)


@canonical.register
def _(space: spaces.Sequence, value: Any) -> Any:
    if space.stack:
        return _stacked(space.feature_space, value)
    return tuple(canonical(space.feature_space, part) for part in value)


@canonical.register
def _(space: spaces.Graph, value: Any) -> Any:
    def of(inner: spaces.Space[Any] | None, part: Any) -> Any:
        return None if part is None or inner is None else np.array(part, dtype=inner.dtype)

    links = None if value.edge_links is None else np.array(value.edge_links)
    return GraphInstance(
        of(space.node_space, value.nodes), of(space.edge_space, value.edges), links
    )


@canonical.register(spaces.OneOf)
def _(space: Any, value: Any) -> Any:
    index, part = value
    return int(index), canonical(space.spaces[int(index)], part)


def _stacked(feature: spaces.Space[Any], value: Any) -> Any:
    if isinstance(feature, spaces.Dict):
        return {key: _stacked(inner, value[key]) for key, inner in feature.spaces.items()}
    if isinstance(feature, spaces.Tuple):
        return tuple(
            _stacked(inner, part) for inner, part in zip(feature.spaces, value, strict=True)
        )
    if feature.shape is not None and feature.dtype is not None:
        return np.array(value, dtype=feature.dtype)
    return tuple(canonical(feature, part) for part in value)


def snapshot(value: Any) -> Any:
    """Copy a tree of dicts, sequences, arrays and leaves; what refuses to be copied is shared."""
    if isinstance(value, np.ndarray):
        duplicate = value.copy()
        if value.dtype == object:
            for index in np.ndindex(value.shape):
                duplicate[index] = snapshot(value[index])
        return duplicate
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(snapshot(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(snapshot(item) for item in value)
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


# ---- rows of a batch -----------------------------------------------------------------------------


def unbatch(space: spaces.Space[Any], batch: Any, row: int) -> Any:
    """One row of a batch of `space` (the single space), copied but never cast.

    Casting would hide a backend that hands out the wrong dtype.
    """
    if isinstance(space, spaces.Dict):
        return {key: unbatch(inner, batch[key], row) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            unbatch(inner, part, row) for inner, part in zip(space.spaces, batch, strict=True)
        )
    return snapshot(batch[row])


def info_row(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """One environment's info out of Gymnasium's vector form, by its ``_key`` masks."""
    info: dict[str, Any] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        # "_key" is a mask and has none of its own, unless the environment itself reports "_key"
        if mask is None or not mask[row]:
            continue
        info[key] = info_row(value, row) if isinstance(value, Mapping) else snapshot(value[row])
    return info


# ---- comparison ----------------------------------------------------------------------------------


def value_difference(
    expected: Any, got: Any, *, same_types: bool = True, path: str = ""
) -> ValueDifference | None:
    """Find the first place where two values differ, or None when they are bit-equal.

    NaN equals NaN here, and tuples equal lists of the same items.

    Args:
        expected: the reference.
        got: what is judged.
        same_types: False compares numbers by value alone, so that 1 equals 1.0. Infos of many
            slots share one array per key, which may have to widen the type of a number.
        path: where `expected` stands, for nested calls.
    """
    if expected is MISSING or got is MISSING:
        return None if expected is got else ValueDifference(path, expected, got)
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key in [*expected, *(key for key in got if key not in expected)]:
            found = value_difference(
                expected.get(key, MISSING),
                got.get(key, MISSING),
                same_types=same_types,
                path=f"{path}[{key!r}]",
            )
            if found is not None:
                return found
        return None
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(expected) != len(got):
            return ValueDifference(f"{path}.length", len(expected), len(got))
        for i, (left, right) in enumerate(zip(expected, got, strict=True)):
            found = value_difference(left, right, same_types=same_types, path=f"{path}[{i}]")
            if found is not None:
                return found
        return None
    if _are_records(expected, got):
        return value_difference(
            _by_field(expected), _by_field(got), same_types=same_types, path=path
        )
    if _is_numeric(expected) and _is_numeric(got):
        return _array_difference(expected, got, same_types=same_types, path=path)
    if isinstance(expected, np.ndarray) and isinstance(got, np.ndarray):
        if expected.shape != got.shape:
            return ValueDifference(f"{path}.shape", expected.shape, got.shape)
        return value_difference(
            expected.ravel().tolist(), got.ravel().tolist(), same_types=same_types, path=path
        )
    return None if _same_object(expected, got) else ValueDifference(path, expected, got)


def _are_records(*values: Any) -> bool:
    return all(
        isinstance(value, np.ndarray | np.void) and value.dtype.names is not None
        for value in values
    )


def _by_field(records: Any) -> dict[str, Any]:
    return {name: records[name] for name in records.dtype.names}


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, bool | int | float | complex)


def _array_difference(
    expected: Any, got: Any, *, same_types: bool, path: str
) -> ValueDifference | None:
    numpy_typed = all(isinstance(value, np.ndarray | np.generic) for value in (expected, got))
    left, right = np.asarray(expected), np.asarray(got)
    if left.shape != right.shape:
        return ValueDifference(f"{path}.shape", left.shape, right.shape)
    if same_types and numpy_typed:
        if left.dtype != right.dtype:
            return ValueDifference(f"{path}.dtype", left.dtype, right.dtype)
        unequal = (_bits(left) != _bits(right)).any(axis=1).reshape(left.shape)
    else:
        # as Python objects: numpy would round 2**60 + 1 before it compares it with a float
        left, right = left.astype(object), right.astype(object)
        unequal = ~np.asarray((left == right) | ((left != left) & (right != right)), dtype=bool)
    if not unequal.any():
        return None
    if left.ndim == 0:
        return ValueDifference(path, left[()], right[()])
    index = tuple(int(i) for i in np.argwhere(unequal)[0])
    return ValueDifference(f"{path}[{', '.join(map(str, index))}]", left[index], right[index])


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)


def _same_object(expected: Any, got: Any) -> bool:
    kind: Any = type(expected)
    if kind.__eq__ is object.__eq__:
        # compared by identity, which no copy through a pipe keeps: the type is all there is
        return kind is type(got)
    try:
        return bool(expected == got)
    except Exception:
        return False


# ---- digest --------------------------------------------------------------------------------------


def digest(value: Any, crc: int = 0) -> int:
    """A small number that depends on every bit of a canonical value, the same in every process."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            crc = digest(value[key], zlib.crc32(str(key).encode(), crc))
        return crc
    if isinstance(value, list | tuple):
        for item in value:
            crc = digest(item, crc)
        return zlib.crc32(str(len(value)).encode(), crc)
    if isinstance(value, str):
        return zlib.crc32(value.encode("utf-8", "surrogatepass"), crc)
    if _are_records(value):
        return digest(_by_field(value), crc)
    if isinstance(value, np.ndarray | np.generic):
        head = f"{value.dtype.str}{value.shape}".encode()
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), zlib.crc32(head, crc))
    return zlib.crc32(repr(value).encode(), crc)
