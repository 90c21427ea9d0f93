"""Infos: dicts of numbers are written into shared memory, all others are sent as messages.

A worker that sees an info dict of numbers (or small numeric arrays) registers its *schema*, the
keys and types, once. From then on only the bytes are written into the slot's cell. All other infos,
and those that are too large, are sent by the control path. Both ways give back equal dicts with
equal types.

`collate` makes Gymnasium's vector form of many dicts: `key` -> values, `_key` -> which slots have
it. Unlike Gymnasium's own it promotes (an int beside a float is not cut off) and keeps ragged
arrays. In that form the mask of `t` and a value that an environment calls `_t` have the same key:
the mask wins, and the value is found in the slot's own dict.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine.memory import INFO_BYTES
from envfleet.engine.rows_python import Form

NO_INFO = 0
ON_CONTROL_PATH = 0xFFFF
_MAX_SCHEMAS = 64
"""A worker that has used so many registers no more: each schema costs one message."""
_PYTHON_KINDS: dict[type, str] = {float: "f8", int: "i8", bool: "?"}
_FORMATS = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "i2": "h", "i1": "b"}
_FORMATS |= {"u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?", "f2": "e"}

Array = npt.NDArray[Any]
Info = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Schema:
    """The keys of an info dict and the type of each value; arrays also have a dtype and a shape."""

    keys: tuple[str, ...]
    types: tuple[type, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    """None for scalars."""

    @property
    def is_row_of_doubles(self) -> bool:
        """Whether all values are floats, as in most simulators: they are copied at once."""
        return self.dtypes == ("f8",) * len(self.keys) and self.shapes == (None,) * len(self.keys)

    @classmethod
    def of(cls, info: Info) -> Schema | None:
        """The schema of `info`, or None if it cannot travel as fields."""
        dtypes, shapes = [], []
        for key, value in info.items():
            if not isinstance(key, str):
                return None
            if type(value) in _PYTHON_KINDS:
                dtype, shape = np.dtype(_PYTHON_KINDS[type(value)]), None
            elif isinstance(value, np.bool_ | np.number):
                dtype, shape = value.dtype, None
            elif type(value) is np.ndarray:
                dtype, shape = value.dtype, value.shape
            else:
                return None
            if dtype.str[1:] not in _FORMATS or not dtype.isnative:
                return None
            dtypes.append(dtype.str[1:])
            shapes.append(shape)
        types = tuple(type(value) for value in info.values())
        schema = cls(tuple(info), types, tuple(dtypes), tuple(shapes))
        return schema if struct.calcsize(schema.format) <= INFO_BYTES else None

    @property
    def format(self) -> str:
        """The struct format of a cell."""
        parts = [
            _FORMATS[dtype]
            if shape is None
            else f"{int(np.prod(shape)) * np.dtype(dtype).itemsize}s"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        return "=" + "".join(parts)

    def columns(self, cells: Array) -> list[Array]:
        """The values of each key in cells of many slots, as arrays of their own."""
        if self.is_row_of_doubles:
            return list(cells.view(np.float64)[:, : len(self.keys)].T.copy())
        record = _record(self.dtypes, self.shapes)
        table = cells.view(record)[:, 0]
        return [table[name].copy() for name in record.names or ()]


@lru_cache(maxsize=256)
def _record(dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...] | None, ...]) -> np.dtype[Any]:
    """A cell as a numpy record, so that a key of many slots is one strided view."""
    formats, offsets, offset = [], [], 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        formats.append(np.dtype((dtype, shape or ())))
        offsets.append(offset)
        offset += formats[-1].itemsize
    names = [f"f{index}" for index in range(len(dtypes))]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": INFO_BYTES}
    )


class SchemaRegistry:
    """The schemas that one worker has used, numbered from 1."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, Any, tuple[Any, ...]]] = {}
        self._fresh: list[Schema] = []
        """Registered since the last reply."""
        self.form: list[Form | None] = [None]
        """Of the last new schema of a step that was all numbers: most infos are like it."""

    def take_fresh(self) -> list[Schema]:
        """The schemas that the parent has not been told of, in the order of their numbers."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def find(self, info: Info, *, is_final: bool) -> tuple[int, Any, tuple[Any, ...]]:
        """The number of the schema of `info`, how to pack it, and which values are arrays."""
        key = (*info, *map(type, info.values()))
        return self._known.get(key) or self._register(key, info, is_final=is_final)

    def _register(
        self, key: tuple[Any, ...], info: Info, *, is_final: bool
    ) -> tuple[int, Any, tuple[Any, ...]]:
        schema = Schema.of(info) if len(self._known) < _MAX_SCHEMAS else None
        if schema is None:
            known: tuple[int, Any, tuple[Any, ...]] = (ON_CONTROL_PATH, None, ())
            if len(self._known) >= _MAX_SCHEMAS:
                return known
        else:
            arrays = tuple(
                (index, shape, np.dtype(dtype))
                for index, (shape, dtype) in enumerate(
                    zip(schema.shapes, schema.dtypes, strict=True)
                )
                if shape is not None
            )
            number = 1 + sum(1 for entry in self._known.values() if entry[1] is not None)
            if not arrays and not is_final:
                codes = schema.format.removeprefix("=").encode()
                self.form[0] = (schema.keys, schema.types, codes, number)
            known = (number, struct.Struct(schema.format).pack_into, arrays)
            self._fresh.append(schema)
        self._known[key] = known
        return known


class InfoWriter:
    """The worker's side: puts one slot's info into its cell if it can."""

    def __init__(
        self,
        cells: Array,
        schema_of_slot: Array,
        first_slot: int,
        schemas: SchemaRegistry,
        *,
        is_final: bool = False,
    ) -> None:
        """`is_final`: these are the last infos of episodes, which tell little about the others."""
        self._cells = cells.data.cast("B")
        self._schema_of_slot = schema_of_slot.data
        self._first, self._schemas, self._is_final = first_slot, schemas, is_final

    def clear(self, row: int) -> None:
        """This slot has no info now."""
        self._schema_of_slot[self._first + row] = NO_INFO

    def write(self, row: int, info: Info) -> bool:
        """Write a non-empty info; False if it must travel by the control path."""
        if not isinstance(info, dict):
            raise TypeError(f"the info must be a dict, got {type(info).__name__}")
        slot = self._first + row
        number, pack_into, arrays = self._schemas.find(info, is_final=self._is_final)
        self._schema_of_slot[slot] = ON_CONTROL_PATH
        if pack_into is None:
            return False
        values: Iterable[Any] = info.values()
        if arrays:
            values = list(values)
            for index, shape, dtype in arrays:
                if values[index].shape != shape or values[index].dtype != dtype:
                    return False
                values[index] = values[index].tobytes()
        try:
            pack_into(self._cells, slot * INFO_BYTES, *values)
        except struct.error:  # an int beyond 64 bits
            return False
        self._schema_of_slot[slot] = number
        return True


@dataclass(frozen=True, slots=True)
class PackedInfos:
    """Cells of some slots, copied out of shared memory, with the schemas to read them."""

    groups: tuple[tuple[Schema, Array, Array], ...] = ()
    """(schema, positions in the batch, cells [len(positions), INFO_BYTES])."""

    def columns(self) -> Iterable[tuple[str, Array, Array]]:
        """Every key of every group: (key, positions, values)."""
        for schema, positions, cells in self.groups:
            for key, values in zip(schema.keys, schema.columns(cells), strict=True):
                yield key, positions, values

    def moved_to(self, positions: Array) -> PackedInfos:
        """The same cells, where position i is now `positions[i]`."""
        return PackedInfos(
            tuple((schema, positions[where], cells) for schema, where, cells in self.groups)
        )

    def each(self) -> Iterable[tuple[int, Info]]:
        """Every slot's own dict, types as the environment gave them."""
        for schema, positions, cells in self.groups:
            columns = schema.columns(cells)
            for index, position in enumerate(positions.tolist()):
                yield (
                    position,
                    {
                        key: np.array(column[index])
                        if kind is np.ndarray
                        else kind(column[index].item() if kind in _PYTHON_KINDS else column[index])
                        for key, kind, column in zip(
                            schema.keys, schema.types, columns, strict=True
                        )
                    },
                )


@dataclass(slots=True)
class _Column:
    """Values of one key while a vector info is put together."""

    positions: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    """Stacked numeric values, one array per group of slots."""
    objects: list[tuple[int, Any]] = field(default_factory=list)
    dicts: list[tuple[int, Info]] = field(default_factory=list)


def collate(num: int, packed: PackedInfos, plain: Sequence[tuple[int, Info]]) -> dict[str, Any]:
    """Put infos of `num` slots together; `plain` holds (position, dict) pairs."""
    if len(packed.groups) == 1 and not plain and _are_all(packed.groups[0][1], num):
        return _collate_alike(num, packed)
    columns: dict[str, _Column] = {}
    for key, positions, values in packed.columns():
        column = columns.setdefault(key, _Column())
        column.positions.append(positions)
        column.values.append(values)
    for position, info in plain:
        for key, value in info.items():
            column = columns.setdefault(key, _Column())
            if isinstance(value, dict) and key != "final_obs":
                column.dicts.append((position, value))
            elif key != "final_obs" and _is_numeric(value):
                column.positions.append(np.array([position]))
                column.values.append(np.asarray(value)[None])
            else:
                column.objects.append((position, value))
    vector: dict[str, Any] = {key: _join(num, column) for key, column in columns.items()}
    masks = {f"_{key}": _mask(num, column) for key, column in columns.items()}
    return vector | masks


def _collate_alike(num: int, packed: PackedInfos) -> dict[str, Any]:
    """All slots have the same keys: nothing has to be put together."""
    schema, _, cells = packed.groups[0]
    vector: dict[str, Any] = dict(zip(schema.keys, schema.columns(cells), strict=True))
    masks = np.ones((len(schema.keys), num), np.bool_)
    for key, mask in zip(schema.keys, masks, strict=True):
        vector[f"_{key}"] = mask
    return vector


def _are_all(positions: Array, num: int) -> bool:
    return len(positions) == num and bool((positions[:-1] < positions[1:]).all())


def _mask(num: int, column: _Column) -> Array:
    """Which slots have the key."""
    mask = np.zeros(num, np.bool_)
    for positions in column.positions:
        mask[positions] = True
    for position, _ in (*column.objects, *column.dicts):
        mask[position] = True
    return mask


def _join(num: int, column: _Column) -> Any:
    numeric = bool(column.values)
    if column.dicts and not numeric and not column.objects:
        return collate(num, PackedInfos(), column.dicts)
    shapes = {values.shape[1:] for values in column.values}
    dtype = np.result_type(*column.values) if numeric else np.dtype(object)
    if (
        len(shapes) == 1
        and not column.objects
        and not column.dicts
        and all(_keeps_all(values, dtype) for values in column.values)
    ):
        joined = np.zeros((num, *shapes.pop()), dtype)
        for positions, values in zip(column.positions, column.values, strict=True):
            joined[positions] = values
        return joined
    objects = np.full(num, None, object)
    for positions, values in zip(column.positions, column.values, strict=True):
        for position, value in zip(positions.tolist(), values, strict=True):
            objects[position] = value
    for position, value in (*column.objects, *column.dicts):
        objects[position] = value
    return objects


def _keeps_all(values: Array, dtype: np.dtype[Any]) -> bool:
    """Whether promotion is exact: an int beyond 2**53 beside a float would be rounded."""
    if dtype.kind != "f" or values.dtype.kind not in "iu":
        return True
    return bool((values.astype(dtype).astype(values.dtype) == values).all())


def _is_numeric(value: Any) -> bool:
    if type(value) in _PYTHON_KINDS:
        return type(value) is not int or -(2**63) <= value < 2**63
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    return isinstance(value, np.number | np.bool_)
