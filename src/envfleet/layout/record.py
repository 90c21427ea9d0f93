"""A space of records: named arrays that lie side by side in one numpy structured array.

Law: a value is an array of one structured dtype, which follows from the fields alone. A batch has
one more axis in front and the same dtype, so ``batch["reward"]`` is a view and never a copy.

A record of several agents has fields whose first axis is the agent: batched, a field is
``[slot, agent, ...]``. A fleet moves a record as one piece. A Dict of the same arrays is moved
array by array, which takes several times as long when the arrays are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

__all__ = ["RecordSpace"]

_DTYPES: dict[np.dtype[Any], np.dtype[Any]] = {}
"""The dtype of all spaces with these fields."""


class RecordSpace(Space[NDArray[Any]]):
    """Records whose fields are values of other spaces.

    An environment may return a 0-d array of `dtype` (what `zeros` and `sample` give) or a numpy
    record scalar (``np.void``, what indexing an array of records gives). The array is faster. An
    environment may fill one array again and again: a fleet copies it before the next call.

    Args:
        fields: Names and their spaces: Box, Discrete, MultiDiscrete, MultiBinary or RecordSpace.
        shape: The shape of an array of such records; one record by itself has shape ``()``.
        seed: The seed of all fields.

    Example:
        >>> from gymnasium.spaces import Box, Discrete, MultiBinary
        >>> space = RecordSpace(
        ...     {
        ...         "observation": Box(-1, 1, (3, 4)),
        ...         "reward": Box(-10, 10, (3,)),
        ...         "alive": MultiBinary(3),
        ...         "turn": Discrete(3),
        ...     }
        ... )
        >>> record = space.zeros()
        >>> record["alive"] = 1
        >>> record["reward"][2] = 0.5
        >>> record in space
        True
        >>> print(record["reward"], record["turn"])
        [0.  0.  0.5] 0
    """

    def __init__(
        self,
        fields: Mapping[str, Space[Any]],
        shape: Iterable[int] = (),
        seed: int | None = None,
    ) -> None:
        """See the class."""
        name: Any
        for name, space in fields.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"the name of a field must be a non-empty str, got {name!r}")
            if not isinstance(space, (Box, Discrete, MultiBinary, MultiDiscrete, RecordSpace)):
                raise TypeError(
                    f"the field {name!r} of a record must be a Box, Discrete, MultiDiscrete, "
                    f"MultiBinary or RecordSpace, got {space!r}; put other spaces beside the "
                    "record, in a Dict"
                )
        # aligned: numpy is slow with numbers that lie across their natural borders
        dtype = np.dtype(
            [(name, space.dtype, space.shape) for name, space in fields.items()], align=True
        )
        if not dtype.itemsize:
            raise ValueError(f"a record must have a field that holds something, got {fields!r}")
        self._fields = dict(fields)
        # equal spaces share one dtype, because to compare two of them takes long
        super().__init__(tuple(int(n) for n in shape), _DTYPES.setdefault(dtype, dtype), seed)

    @property
    def fields(self) -> Mapping[str, Space[Any]]:
        """The space of each field, by name."""
        return MappingProxyType(self._fields)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a value; ``()`` for one record."""
        assert self._shape is not None
        return self._shape

    @property
    def is_np_flattenable(self) -> bool:
        """False: Gymnasium's `flatten` does not know records."""
        return False

    def zeros(self) -> NDArray[Any]:
        """A new value, all of it zero, for an environment to fill."""
        return np.zeros(self.shape, self.dtype)

    def seed(self, seed: int | None = None) -> int:
        """Seed every field from one number."""
        used = super().seed(seed)
        for space in self._fields.values():
            space.seed(int(self.np_random.integers(2**31)))
        return int(used)

    def sample(
        self, mask: Mapping[str, Any] | None = None, probability: Mapping[str, Any] | None = None
    ) -> NDArray[Any]:
        """A random value; masks and probabilities are given by field, as Gymnasium's Dict does."""
        value = self.zeros()
        for name, space in self._fields.items():
            column = value[name]
            given = ((mask or {}).get(name), (probability or {}).get(name))
            for index in np.ndindex(self.shape):
                column[index] = space.sample(*given)
        return value

    def contains(self, x: Any) -> bool:
        """Whether it is an array, or a record scalar, of this shape and dtype within the fields."""
        if not isinstance(x, (np.ndarray, np.void)):
            return False
        value = np.asarray(x)
        if value.shape != self.shape or value.dtype != self.dtype:
            return False
        return all(
            value[name][(*index, ...)] in space
            for name, space in self._fields.items()
            for index in np.ndindex(self.shape)
        )

    def __eq__(self, other: object) -> bool:
        """Whether the fields are equal and in the same order, and the shapes are."""
        return (
            isinstance(other, RecordSpace)
            and self.shape == other.shape
            and self.dtype == other.dtype
            and self._fields == other._fields
        )

    def __repr__(self) -> str:
        """Fields and shape."""
        fields = ", ".join(f"{name!r}: {space}" for name, space in self._fields.items())
        return f"RecordSpace({{{fields}}}" + (f", {self.shape})" if self.shape else ")")


# ---- how Gymnasium's vector environments batch records ----------------------------------------


@batch_space.register(RecordSpace)
def _batch_space(space: RecordSpace, n: int = 1) -> RecordSpace:
    return RecordSpace(deepcopy(dict(space.fields)), (n, *space.shape))


@create_empty_array.register(RecordSpace)
def _create_empty_array(
    space: RecordSpace, n: int = 1, fn: Callable[..., NDArray[Any]] = np.zeros
) -> NDArray[Any]:
    return fn((n, *space.shape), dtype=space.dtype)


@concatenate.register(RecordSpace)
def _concatenate(space: RecordSpace, items: Iterable[Any], out: NDArray[Any]) -> NDArray[Any]:
    for row, item in enumerate(items):
        out[row] = item
    return out


@iterate.register(RecordSpace)
def _iterate(  # type: ignore[misc]  # a type variable of Gymnasium's hides the subclass
    space: RecordSpace, items: NDArray[Any]
) -> Iterator[Any]:
    return iter(items)
