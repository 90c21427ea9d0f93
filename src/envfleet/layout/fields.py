"""The pieces of a layout: leaves (`Field`), trees of leaves, and how a value is fitted to a leaf.

Law: a value is written exactly, or cast as numpy's "same_kind" allows, or refused with
`LayoutMismatch`; never broadcast, truncated or wrapped around. Nothing here knows about buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from itertools import repeat
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from envfleet.errors import LayoutMismatch

__all__ = ["Codec", "Field", "Spill", "Tree", "Value", "array", "cell", "spill"]

Value: TypeAlias = Any
"""A sample of some space, a part of one, or a batch of them."""
Spill: TypeAlias = dict[int, Any]
"""Field index -> a private copy of the value that had no place in its row."""
PREFIX_BYTES = 4
"""Every cell starts with the number of its bytes in use, a u32."""


class Codec(Protocol):
    """How one value becomes the bytes of a cell and comes back."""

    def encode(self, value: Value) -> bytes | None:
        """The value as bytes, or None if it must spill."""

    def decode(self, data: bytes) -> Value:
        """A new value from what `encode` gave; ``b""`` for a cell that was never written."""


class _Never:
    """The codec of values that always spill."""

    def encode(self, value: Value) -> None:
        return None

    def decode(self, data: bytes) -> Value:
        raise LayoutMismatch("", "written before it is read", "not")


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf: a column of rows, each an array or a cell of bytes."""

    kind: Literal["array", "text", "ragged", "spill"]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of one row; except for arrays that is the bytes of one cell, its prefix included."""
    codec: Codec | None = attribute(default=None, compare=False, repr=False)
    """How a cell is written; None for arrays."""
    path: tuple[Any, ...] = ()
    index: int = 0

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


Node: TypeAlias = dict[Any, "Tree"] | tuple["Tree", ...]
Tree: TypeAlias = Field | Node


def array(shape: Sequence[int], dtype: DTypeLike) -> Field:
    """A leaf whose values are arrays of one shape and dtype; its batch is one stacked array."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"an array of {dtype} has no fixed bytes; use spill() for such values")
    return Field("array", dtype, tuple(int(n) for n in shape))


def cell(
    max_bytes: int, codec: Codec, kind: Literal["text", "ragged", "spill"] = "ragged"
) -> Field:
    """A leaf whose values become at most `max_bytes` bytes (more spill); its batch is a tuple."""
    size = -(-(PREFIX_BYTES + max_bytes) // 8) * 8
    return Field(kind, np.dtype(np.uint8), (size,), codec)


def spill() -> Field:
    """A leaf whose values never go into the row; its batch is a tuple."""
    return cell(0, _Never(), "spill")


def branches(node: Node) -> Iterator[tuple[Any, Tree]]:
    """Children of a node with their keys."""
    return iter(node.items() if isinstance(node, dict) else enumerate(node))


def leaves(tree: Tree) -> Iterator[Field]:
    """Every leaf, in the order of the columns."""
    if isinstance(tree, Field):
        yield tree
    else:
        for _, child in branches(tree):
            yield from leaves(child)


def path_text(name: str, path: Sequence[Any]) -> str:
    """The path as one would write it in code: ``observation['image'][1]``."""
    return name + "".join(f"[{key!r}]" for key in path)


def assemble(tree: Tree, columns: Sequence[Any]) -> Value:
    """The batched value whose leaves are `columns`."""
    if isinstance(tree, Field):
        return columns[tree.index]
    if isinstance(tree, dict):
        return {key: assemble(child, columns) for key, child in tree.items()}
    return tuple(assemble(child, columns) for child in tree)


def assemble_each(tree: Tree, columns: Sequence[Any], count: int) -> list[Value]:
    """The `count` single values whose leaves are the rows of `columns`."""
    if isinstance(tree, Field):
        return list(columns[tree.index])
    if not tree:
        return [type(tree)() for _ in range(count)]
    rows = zip(*(assemble_each(c, columns, count) for _, c in branches(tree)), strict=True)
    if isinstance(tree, dict):
        return list(map(dict, map(zip, repeat(tuple(tree)), rows)))  # half a comprehension's time
    return list(rows)


def take_apart(tree: Tree, where: str, value: Value, leaf: Callable[[Field, Value], None]) -> None:
    """Call `leaf` with every leaf and its part of the value."""
    if isinstance(tree, Field):
        leaf(tree, value)
        return
    value = node_value(tree, where, value)
    for key, child in branches(tree):
        take_apart(child, f"{where}[{key!r}]", value[key], leaf)


def node_value(node: Node, where: str, value: Value) -> Value:
    """The value of a Dict or Tuple, after making sure that every child can be taken from it.

    Keys beyond those of the space are ignored, as Gymnasium does.
    """
    if isinstance(node, dict):
        if not isinstance(value, Mapping) or any(key not in value for key in node):
            raise LayoutMismatch(where, f"a dict with the keys {list(node)}", got(value))
        return value
    return values_of(value, len(node), where)


def values_of(values: Value, count: int | None, where: str) -> Value:
    """The values, after making sure that there are `count` of them (None: any number)."""
    is_array = isinstance(values, np.ndarray) and values.ndim > 0
    if (is_array or isinstance(values, (tuple, list))) and count in (None, len(values)):
        return values
    expected = "a tuple" if count is None else f"a tuple of length {count}"
    raise LayoutMismatch(where, expected, got(values))


def fit(value: Value, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """The value as an array that may be assigned to a place of this shape and dtype."""
    try:
        given = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # ragged lists; tensors that refuse to be arrays
        given = np.asarray(None)
    remark = ""
    if given.shape == shape:
        if given.dtype == dtype or given.size == 0:
            return given
        if dtype.names is not None or given.dtype.names is not None:
            if given.dtype.names == dtype.names:
                return _fit_record(given, dtype, where)
        elif given.dtype.kind in "biu" and dtype.kind in "biu":
            # same_kind would wrap 300 into an int8 and refuse [1, 2] for a uint8: judge by value
            cast = given.astype(dtype)
            if np.array_equal(cast, given):
                return cast
            remark = " with values out of range"
        # can_cast takes as long as all the rest, and float64 for float32 is an everyday case
        elif given.dtype.kind == dtype.kind == "f" or np.can_cast(given.dtype, dtype, "same_kind"):
            return given
    shown = got(value if given.dtype.hasobject else given)
    raise LayoutMismatch(where, _array_text(shape, dtype), shown + remark)


def _fit_record(given: NDArray[Any], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """The same fields in another dtype; numpy itself would match them by position, not by name."""
    record = np.zeros(given.shape, dtype)
    for name in dtype.names or ():
        place = record[name]
        place[...] = fit(given[name], place.shape, place.dtype, f"{where}[{name!r}]")
    return record


def got(value: Value) -> str:
    """How an error names what it was given."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_text(value.shape, value.dtype)
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    if isinstance(value, (str, bytes, list, tuple)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"of type {type(value).__name__}"


def _array_text(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    return f"an array of shape {shape} and dtype {dtype}" if shape else f"a scalar of dtype {dtype}"


def under(where: str, exc: LayoutMismatch) -> LayoutMismatch:
    """The complaint about a part, told about the whole."""
    return LayoutMismatch(where + exc.path, exc.expected, exc.got)
