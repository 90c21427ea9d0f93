"""From a space to its byte plan, and the one place where a new space is taught.

Law: the plan depends on the space alone, so every process that plans the same space (with the same
functions registered) binds the same bytes. A space that is not registered spills; that is no error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple
from gymnasium.spaces import Sequence as SequenceSpace

from envfleet.layout.arena import Ragged, Utf8
from envfleet.layout.columns import ALIGN_BYTES, Columns, column_nbytes
from envfleet.layout.fields import Field, Tree, array, cell, leaves, spill
from envfleet.layout.record import RecordSpace

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "SEQUENCE_CELL_BYTES",
    "TEXT_CELL_MAX_BYTES",
    "Layout",
    "are_equal",
    "are_same",
    "plan_layout",
    "register",
]

# Pages of a cell that no value reached are never touched, so they cost address space, not memory;
# what is larger than its cell still arrives, by the slower control path.
TEXT_CELL_MAX_BYTES = 64 * 1024
SEQUENCE_CELL_BYTES = 64 * 1024

_Describe = TypeVar("_Describe", bound=Callable[[Any], Tree])


def are_same(one: Any, other: Any) -> bool:
    """Whether two spaces are known to be alike to the last bit; False says nothing."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is Box:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return np.array_equal(one.low, other.low) and np.array_equal(one.high, other.high)
    if kind is Dict:
        return list(one) == list(other) and all(are_same(one[key], other[key]) for key in one)
    if kind is Tuple:
        return len(one) == len(other) and all(map(are_same, one, other))
    if kind in (Discrete, MultiBinary, MultiDiscrete):
        return bool(one.dtype == other.dtype and one == other)
    if kind is RecordSpace:
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and all(are_same(space, other.fields[name]) for name, space in one.fields.items())
        )
    return False


def are_equal(one: Any, other: Any) -> bool:
    """Whether two spaces are equal by their own word, which a large box takes seconds to find."""
    return are_same(one, other) or bool(one == other)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of one space's values lie, for any number of rows."""

    space: Space[Any]
    tree: Tree
    fields: tuple[Field, ...]
    name: str
    """What an error calls the value, such as "observation"."""

    @property
    def spills(self) -> bool:
        """Whether some leaf always travels outside the row."""
        return any(field.kind == "spill" for field in self.fields)

    @property
    def is_one_array(self) -> bool:
        """Whether values are single arrays."""
        return isinstance(self.tree, Field) and self.tree.codec is None

    def nbytes(self, rows: int) -> int:
        """Bytes that `rows` rows take, a multiple of 64."""
        return sum(column_nbytes(field, rows) for field in self.fields)

    def bind(self, buffer: Buffer, offset: int, rows: int) -> Columns:
        """Lay the plan over `buffer` from `offset`; nothing is copied or cleared.

        Args:
            buffer: Anything writable with the buffer protocol; exported while the Columns live.
            offset: Where the first column starts, a multiple of 64.
            rows: How many rows to lay out.

        Raises:
            ValueError: The buffer is too small or read-only, or the offset is not aligned.
        """
        if rows < 0 or offset < 0 or offset % ALIGN_BYTES:
            raise ValueError(
                f"offset must be a multiple of {ALIGN_BYTES} and rows not negative, "
                f"got offset {offset} and {rows} rows"
            )
        memory = memoryview(buffer).cast("B")
        if memory.readonly or memory.nbytes < offset + self.nbytes(rows):
            raise ValueError(
                f"{rows} rows at offset {offset} need a writable buffer of "
                f"{offset + self.nbytes(rows)} bytes, got {memory.nbytes} bytes"
                + (", read-only" if memory.readonly else "")
            )
        return Columns(self.tree, self.fields, self.name, memory[offset:], rows)


def plan_layout(space: Space[Any], name: str = "value") -> Layout:
    """The byte plan of a space.

    Args:
        space: Any Gymnasium space; parts that are unknown or have no bound spill by themselves.
        name: What errors call the value: "observation" gives ``observation['image'][1]``.
    """
    tree = _number(_describe(space))
    return Layout(space, tree, tuple(leaves(tree)), name)


def register(space_type: type[Space[Any]]) -> Callable[[_Describe], _Describe]:
    """Teach the layout a new type of space: decorate the one function that describes it.

    The function gets the space and returns a leaf made by `array`, `cell` or `spill`, or a dict or
    tuple of such. Gymnasium batches a space it does not know into a tuple of values, as a `cell`
    does; return an `array` only if the space is registered with `gymnasium.vector.utils` as well.
    A process that did not run the registration plans other bytes, so register where the space is
    defined.

    Example:
        >>> from gymnasium import Space
        >>> from envfleet.layout import cell, plan_layout, register
        >>> class Card(Space):
        ...     "Values such as ('hearts', 7)."
        >>> class CardCodec:
        ...     def encode(self, value):
        ...         return f"{value[0]} {value[1]}".encode()
        ...     def decode(self, data):
        ...         suit, rank = data.decode().split()
        ...         return suit, int(rank)
        >>> @register(Card)
        ... def describe_card(space):
        ...     return cell(16, CardCodec())
        >>> layout = plan_layout(Card())
        >>> columns = layout.bind(bytearray(layout.nbytes(2)), 0, 2)
        >>> columns.write_batch(slice(0, 2), (("hearts", 7), ("spades", 1)))
        >>> columns.read_batch(slice(0, 2))
        (('hearts', 7), ('spades', 1))
    """

    def decorate(describe: _Describe) -> _Describe:
        _describe.register(space_type, describe)
        return describe

    return decorate


@singledispatch
def _describe(space: object) -> Tree:
    raise TypeError(f"a layout is planned for a gymnasium Space, got {type(space).__name__}")


def _number(tree: Tree) -> Tree:
    """The same tree with every leaf told its path and its index."""
    count = 0

    def number(node: Tree, path: tuple[Any, ...]) -> Tree:
        nonlocal count
        if isinstance(node, Field):
            count += 1
            return replace(node, path=path, index=count - 1)
        if isinstance(node, dict):
            return {key: number(child, (*path, key)) for key, child in node.items()}
        return tuple(number(child, (*path, i)) for i, child in enumerate(node))

    return number(tree, ())


@register(Space)
def _any_space(space: Space[Any]) -> Tree:
    return spill()


@register(Box)
@register(MultiDiscrete)
@register(MultiBinary)
@register(Discrete)
@register(RecordSpace)
def _array_space(space: Space[Any]) -> Tree:
    assert space.shape is not None
    assert space.dtype is not None
    return array(space.shape, space.dtype)


@register(Dict)
def _dict(space: Dict[Any]) -> Tree:
    return {key: _describe(child) for key, child in space.spaces.items()}


@register(Tuple)
def _tuple(space: Tuple[Any]) -> Tree:
    return tuple(_describe(child) for child in space.spaces)


@register(Text)
def _text(space: Text) -> Tree:
    widest = max(
        (len(char.encode("utf-8", "surrogatepass")) for char in space.character_set), default=1
    )
    return cell(min(space.max_length * widest, TEXT_CELL_MAX_BYTES), Utf8(), "text")


@register(SequenceSpace)
def _sequence(space: SequenceSpace) -> Tree:
    feature = _number(_describe(space.feature_space))
    kinds = {field.kind for field in leaves(feature)}
    if not kinds or "spill" in kinds:
        return spill()
    return cell(SEQUENCE_CELL_BYTES, Ragged(feature, space.stack))
