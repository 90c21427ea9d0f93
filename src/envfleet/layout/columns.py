"""A layout laid over a buffer: writing and reading rows.

Law: what a read returns owns its memory, except arrays asked for with ``copy=False``, which change
when the rows do. Cells are decoded anew each time. A cell whose value spilled says so
in its prefix; reading it without that Spill raises.

A column is contiguous, ``[rows, *shape]``, and starts on a cache line. Nothing here orders memory
between processes: a row is written by one side, signalled by other means, then read by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envfleet.errors import LayoutMismatch
from envfleet.layout.fields import (
    PREFIX_BYTES,
    Codec,
    Field,
    Spill,
    Tree,
    Value,
    assemble,
    assemble_each,
    branches,
    fit,
    got,
    node_value,
    path_text,
    take_apart,
    under,
    values_of,
)

__all__ = ["ALIGN_BYTES", "Columns", "Rows", "Spills", "Write", "column_nbytes"]

ALIGN_BYTES = 64

Rows: TypeAlias = slice | NDArray[np.integer[Any]]
"""A slice within the rows, or an array of row numbers."""
Write: TypeAlias = Callable[[Value], Spill | None]
Spills: TypeAlias = Mapping[int, Spill]
"""Position within the rows asked for -> what spilled there."""

_NONE: Mapping[int, Any] = {}
_SPILLED = 0xFFFF_FFFF
_POISONED = 0xCDCD_CDCD
_REFUSALS = (TypeError, ValueError, NotImplementedError, BufferError)


def column_nbytes(field: Field, rows: int) -> int:
    """Bytes of a column, padded so that the next one starts on a cache line."""
    return -(-field.row_nbytes * rows // ALIGN_BYTES) * ALIGN_BYTES


class Columns:
    """Rows of one layout in one buffer; any number of these, in any process, may share the bytes.

    `Layout.bind` makes them. In every method a row that does not exist raises IndexError, and a
    value that does not fit raises LayoutMismatch with its path; of a batch, other fields may have
    been written by then. Values of a Spill are handed out as they are.
    """

    def __init__(
        self, tree: Tree, fields: Sequence[Field], name: str, memory: memoryview, rows: int
    ) -> None:
        """Lay the columns over the start of `memory`, which is large enough."""
        self.rows = rows
        self._tree, self._name = tree, name
        self.arrays: list[NDArray[Any]] = []
        """All fields as they lie in memory, rows first."""
        self._columns: list[_ArrayColumn | _CellColumn] = []
        self._sole: _ArrayColumn | None = None
        """The one column, where a value is one array."""
        start = 0
        for field in fields:
            where = path_text(name, field.path)
            stop = start + rows * field.row_nbytes
            array = np.frombuffer(memory[start:stop], field.dtype).reshape(rows, *field.shape)
            self.arrays.append(array)
            self._columns.append(
                _ArrayColumn(field, where, array)
                if field.codec is None
                else _CellColumn(field.codec, field.index, where, array)
            )
            start += column_nbytes(field, rows)
        if isinstance(tree, Field) and isinstance(self._columns[0], _ArrayColumn):
            self._sole = self._columns[0]

    @property
    def sole_array(self) -> NDArray[Any] | None:
        """All rows as one array, if values are single arrays in this machine's byte order."""
        sole = self._sole
        return sole.array if sole is not None and sole.dtype.isnative else None

    def writer(self, row: int) -> Write:
        """The function that writes one value into this row; it gives what spilled, or None."""
        self._count(slice(row, row + 1))
        return self._writer(self._tree, row, self._name)

    def array_of(self, row: int) -> NDArray[Any] | None:
        """The row itself, if values are single arrays; the caller writes only what fits."""
        self._count(slice(row, row + 1))
        array = self.sole_array
        return None if array is None else array[row, ...]

    def write_batch(self, rows: Rows, batch: Value) -> dict[int, Spill] | None:
        """Write a batch in Gymnasium's form; gives position within `rows` -> Spill, or None."""
        count = self._count(rows)
        if self._sole is not None:
            self._sole.write(rows, count, batch)
            return None
        spills: dict[int, Spill] = {}

        def write(field: Field, values: Value) -> None:
            for i, value in self._columns[field.index].write(rows, count, values).items():
                spills.setdefault(i, {})[field.index] = value

        take_apart(self._tree, self._name, batch, write)
        return spills or None

    def read(self, row: int, spill: Spill | None = None) -> Value:
        """One row's value, in the form of `read_each`."""
        self._count(slice(row, row + 1))
        return assemble(self._tree, [column.get(row, spill) for column in self._columns])

    def read_each(self, rows: Rows, spills: Spills | None = None) -> list[Value]:
        """The rows' values one by one, as `gymnasium.vector.utils.iterate` gives a batch's."""
        count = self._count(rows)
        columns = [column.read(rows, spills or _NONE, copy=True) for column in self._columns]
        return assemble_each(self._tree, columns, count)

    def reader(self, rows: slice) -> Callable[[], list[Value]]:
        """The function that reads these rows one by one, again and again, if none has spilled."""
        self._count(rows)
        if self._sole is not None:
            view = self._sole.array[rows]
            return lambda: list(view.copy())
        return lambda: self.read_each(rows)

    def read_batch(self, rows: Rows, spills: Spills | None = None, *, copy: bool = True) -> Value:
        """The rows' values batched, as `gymnasium.vector.utils.concatenate` gives them.

        With ``copy=False`` and a slice, arrays are views of the rows; they change when those are
        written, and keep the buffer exported.
        """
        self._count(rows)
        if self._sole is not None:
            return self._sole.read(rows, _NONE, copy=copy)
        columns = [column.read(rows, spills or _NONE, copy=copy) for column in self._columns]
        return assemble(self._tree, columns)

    def poison(self, rows: Rows) -> None:
        """Overwrite rows with NaN or 0xCD, so that a view that outlived its promise shows it."""
        self._count(rows)
        for column in self._columns:
            column.poison(rows)

    def _count(self, rows: Rows) -> int:
        """How many rows are meant, after making sure that all of them exist."""
        if isinstance(rows, slice):
            start, stop = rows.start or 0, self.rows if rows.stop is None else rows.stop
            if not 0 <= start <= stop <= self.rows:
                raise IndexError(f"rows {start}:{stop} are not within 0:{self.rows}")
            return stop - start if rows.step is None else len(range(start, stop, rows.step))
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise TypeError(f"rows are a slice or a list of integers, got {got(rows)}")
        # As unsigned numbers negative ones are large: one pass finds both ends.
        if len(rows) and rows.astype(np.uint64, copy=False).max() >= self.rows:
            raise IndexError(f"rows {rows.tolist()} are not all within 0:{self.rows}")
        return len(rows)

    def _writer(self, tree: Tree, row: int, where: str) -> Write:
        if isinstance(tree, Field):
            return self._columns[tree.index].writer(row)
        node, kind, size = tree, type(tree), len(tree)
        children = tuple(
            (key, self._writer(child, row, f"{where}[{key!r}]")) for key, child in branches(node)
        )

        def write(value: Value) -> Spill | None:
            if type(value) is not kind or len(value) != size:
                value = node_value(node, where, value)
            spill: Spill | None = None
            for key, write_child in children:
                try:
                    part = value[key]
                except KeyError:
                    node_value(node, where, value)
                    raise
                spilled = write_child(part)
                if spilled is not None:
                    spill = spilled if spill is None else spill | spilled
            return spill

        return write


class _ArrayColumn:
    """Rows that are arrays."""

    def __init__(self, field: Field, where: str, array: NDArray[Any]) -> None:
        self.shape, self.dtype, self.where, self.array = field.shape, field.dtype, where, array

    def writer(self, row: int) -> Write:
        shape, dtype, where, view = self.shape, self.dtype, self.where, self.array[row, ...]
        # A memoryview takes only an equal shape and item type (an integer item: only what has
        # __index__), so its assignment is the check as well: half the time of comparing first.
        if len(shape) == 1 and shape[0] and dtype.isnative:
            vector = view.data

            def write_vector(value: Value) -> None:
                try:
                    vector[:] = value
                except _REFUSALS:
                    view[...] = fit(value, shape, dtype, where)

            return write_vector
        if not shape and dtype.isnative and dtype.kind in "iu":
            column = self.array.data

            def write_integer(value: Value) -> None:
                try:
                    column[row] = value
                except _REFUSALS:
                    view[...] = fit(value, shape, dtype, where)

            return write_integer

        def write_array(value: Value) -> None:
            if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
                value = fit(value, shape, dtype, where)
            view[...] = value

        return write_array

    def write(self, rows: Rows, count: int, values: Value) -> Mapping[int, Value]:
        shape = (count, *self.shape)
        if type(values) is not np.ndarray or values.shape != shape or values.dtype != self.dtype:
            values = fit(values, shape, self.dtype, self.where)
        if values.ndim == 2 and values.strides[0] < values.strides[1] and isinstance(rows, slice):
            for item in range(shape[1]):  # it lies column by column: half the time of one copy
                self.array[rows, item] = values[:, item]
        else:
            self.array[rows] = values
        return _NONE

    def get(self, row: int, spill: Spill | None) -> Value:
        return self.array[row].copy()

    def read(self, rows: Rows, spills: Spills, *, copy: bool) -> NDArray[Any]:
        if isinstance(rows, slice):
            return self.array[rows].copy() if copy else self.array[rows]
        return self.array.take(rows, axis=0)  # a third of the time of self.array[rows]

    def poison(self, rows: Rows) -> None:
        for part in _plain_arrays(self.array):
            trash = np.frombuffer(b"\xcd" * part.itemsize, part.dtype)[0]
            part[rows] = np.nan if part.dtype.kind == "f" else trash


def _plain_arrays(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The array, or the fields of its records as views."""
    if array.dtype.names is None:
        yield array
    for name in array.dtype.names or ():
        yield from _plain_arrays(array[name])


class _CellColumn:
    """Rows that hold one encoded value each."""

    def __init__(self, codec: Codec, index: int, where: str, cells: NDArray[Any]) -> None:
        self.codec, self.index, self.where = codec, index, where
        self.rows, self.size = cells.shape
        self.bytes = cells.reshape(-1).data
        self.lengths = cells.view(np.uint32)[:, 0].data

    def writer(self, row: int) -> Write:
        return lambda value: None if self._put(row, value) else {self.index: deepcopy(value)}

    def write(self, rows: Rows, count: int, values: Value) -> Mapping[int, Value]:
        values = values_of(values, count, self.where)
        return {
            i: deepcopy(values[i])
            for i, row in enumerate(self._numbers(rows))
            if not self._put(row, values[i], i)
        }

    def get(self, row: int, spill: Spill | None) -> Value:
        length = self.lengths[row]
        if length == _SPILLED:
            if spill is None or self.index not in spill:
                raise LayoutMismatch(self.where, "read with what spilled from its row", "not")
            return spill[self.index]
        if length > self.size - PREFIX_BYTES:
            raise LayoutMismatch(self.where, "read before it is given back", "not: it is poisoned")
        start = row * self.size + PREFIX_BYTES
        try:
            return self.codec.decode(bytes(self.bytes[start : start + length]))
        except LayoutMismatch as exc:
            raise under(self.where, exc) from None

    def read(self, rows: Rows, spills: Spills, *, copy: bool) -> tuple[Value, ...]:
        return tuple(self.get(row, spills.get(i)) for i, row in enumerate(self._numbers(rows)))

    def poison(self, rows: Rows) -> None:
        # There are no views of cells, so an impossible length is enough.
        for row in self._numbers(rows):
            self.lengths[row] = _POISONED

    def _numbers(self, rows: Rows) -> Sequence[int]:
        return range(*rows.indices(self.rows)) if isinstance(rows, slice) else rows.tolist()

    def _put(self, row: int, value: Value, *item: int) -> bool:
        """Write one value, or mark that it spilled; True if it was written."""
        try:
            data = self.codec.encode(value)
        except LayoutMismatch as exc:
            raise under(path_text(self.where, item), exc) from None
        if data is None or len(data) > self.size - PREFIX_BYTES:
            self.lengths[row] = _SPILLED
            return False
        start = row * self.size + PREFIX_BYTES
        self.bytes[start : start + len(data)] = data
        self.lengths[row] = len(data)
        return True
