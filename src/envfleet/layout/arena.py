"""Codecs of the two built-in spaces without a fixed size: Text, and Sequence of anything encodable.

Law: decoding makes a new value every time, from bytes that are no longer shared. A Sequence of
`count` items is stored leaf by leaf, so that one of arrays is one block:

    count: u32, then for every leaf of the feature space
        array          the items' rows, one after another
        text, ragged   the items' sizes: count x u32, then their bytes

No bytes at all are an empty sequence. Errors carry a path relative to the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.errors import LayoutMismatch
from envfleet.layout import fields
from envfleet.layout.fields import Codec, Field, Tree, Value, fit, got, path_text, values_of

__all__ = ["Ragged", "Utf8"]

_U32 = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Utf8:
    """Any str, lone surrogates included, unchanged."""

    def encode(self, value: Value) -> bytes:
        """The text as UTF-8."""
        if isinstance(value, str):
            return value.encode("utf-8", "surrogatepass")
        raise LayoutMismatch("", "a str", got(value))

    def decode(self, data: bytes) -> str:
        """The text again."""
        return data.decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Ragged:
    """Any number of items of one space, as a tuple or, stacked, in Gymnasium's batched form."""

    tree: Tree
    """The feature space: at least one leaf, all of them numbered."""
    is_stacked: bool

    def encode(self, value: Value) -> bytes | None:
        """The items as bytes; None if one of them must spill."""
        leaves = tuple(fields.leaves(self.tree))
        columns: list[Any] = [[] for _ in leaves]
        if self.is_stacked or isinstance(self.tree, Field):
            fields.take_apart(
                self.tree, "", value, lambda leaf, part: columns.__setitem__(leaf.index, part)
            )
            count = len(values_of(columns[0], None, path_text("", leaves[0].path)))
        else:
            items = values_of(value, None, "")
            count = len(items)
            for i, item in enumerate(items):
                fields.take_apart(
                    self.tree, f"[{i}]", item, lambda leaf, part: columns[leaf.index].append(part)
                )
        if count == 0:
            return b""
        chunks = [count.to_bytes(4, "little")]
        for leaf, column in zip(leaves, columns, strict=True):
            if leaf.codec is None:
                chunks.append(self._block(leaf, column, count).tobytes())
                continue
            parts = self._parts(leaf, leaf.codec, values_of(column, count, self._where(leaf)))
            if parts is None:
                return None
            chunks += [np.array([len(part) for part in parts], _U32).tobytes(), *parts]
        return b"".join(chunks)

    def decode(self, data: bytes) -> Value:
        """The items again."""
        count = int.from_bytes(data[:4], "little")
        start = 4
        columns: list[Any] = []
        for leaf in fields.leaves(self.tree):
            if leaf.codec is None:
                stop = start + count * leaf.row_nbytes
                block = np.frombuffer(data[start:stop], leaf.dtype).reshape(count, *leaf.shape)
                columns.append(block.copy())
            else:
                stop = start + 4 * count
                values = []
                for size in np.frombuffer(data[start:stop], _U32).tolist():
                    values.append(leaf.codec.decode(data[stop : stop + size]))
                    stop += size
                columns.append(tuple(values))
            start = stop
        if self.is_stacked:
            return fields.assemble(self.tree, columns)
        return tuple(fields.assemble_each(self.tree, columns, count))

    def _block(self, leaf: Field, column: Value, count: int) -> NDArray[Any]:
        block = np.empty((count, *leaf.shape), leaf.dtype)
        if self.is_stacked:
            block[...] = fit(column, block.shape, leaf.dtype, self._where(leaf))
            return block
        for i, value in enumerate(column):
            try:
                block[i] = fit(value, leaf.shape, leaf.dtype, "")
            except LayoutMismatch as exc:
                raise fields.under(self._where(leaf, i), exc) from None
        return block

    def _parts(self, leaf: Field, codec: Codec, column: Value) -> list[bytes] | None:
        parts = []
        for i, value in enumerate(column):
            try:
                part = codec.encode(value)
            except LayoutMismatch as exc:
                raise fields.under(self._where(leaf, i), exc) from None
            if part is None:
                return None
            parts.append(part)
        return parts

    def _where(self, leaf: Field, *item: int) -> str:
        return path_text("", (*leaf.path, *item) if self.is_stacked else (*item, *leaf.path))
