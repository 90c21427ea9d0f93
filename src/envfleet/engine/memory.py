"""One shared block for the whole fleet: a control part, then a part planned from the spaces.

Law: a slot's record is written by exactly one worker, and only between a command for it and its
reply; actions, tickets and ring entries are written by the parent only while that slot or entry is
not in flight.

The block has no name in the file system (memfd, elsewhere an unlinked temporary file). It is gone
when the last process that maps it is, however that ended. Nothing has to be unlinked.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine.machine import available_memory
from envfleet.engine.rng import CELL_BYTES
from envfleet.errors import NotEnoughSharedMemory
from envfleet.layout import Columns, Field, Layout, are_equal, plan_layout

INFO_BYTES = 512
"""Room for one slot's numeric infos: 64 doubles. A larger info travels by the control path."""
_RING_PER_SLOT, _RING_SPARE = 4, 16
"""Ring entries: a step, a rebuild and what follows for every slot, and some for calls."""
_LINE = 64
_PAGE = mmap.ALLOCATIONGRANULARITY

Array = npt.NDArray[Any]


HAS_MEMFD = hasattr(os, "memfd_create")


def unnamed_file(label: str) -> int:
    """The descriptor of a file that no folder lists and that ends with its last user."""
    if HAS_MEMFD:
        return os.memfd_create(label)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Slab:
    """The descriptor, and how parts are mapped. The creator grows it; each side closes its own.

    Without a descriptor the parts are memory of this process alone.
    """

    def __init__(self, fd: int | None) -> None:
        self.fd = fd

    @classmethod
    def create(cls, *, is_shared: bool) -> Slab:
        """Make an empty block."""
        if not is_shared:
            return cls(None)
        return cls(unnamed_file("envfleet"))

    def grow(self, size: int, num_slots: int) -> None:
        """Make the block `size` bytes long, or say that the memory is not there."""
        available, why = available_memory()
        if size > available:
            raise NotEnoughSharedMemory(size, available, num_slots, why)
        if self.fd is None:
            return
        try:
            os.ftruncate(self.fd, size)
            # on a full disk a file with holes would end the first that writes into its map
            if not HAS_MEMFD and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, size)
        except OSError as exc:
            why = exc.strerror or ""
            if not HAS_MEMFD:
                left = os.fstatvfs(self.fd)
                available = left.f_bavail * left.f_frsize
                why = f"{why} in {tempfile.gettempdir()}; TMPDIR names another folder"
            raise NotEnoughSharedMemory(size, available, num_slots, why) from exc

    def map(self, offset: int, length: int) -> mmap.mmap:
        """Map a page-aligned part."""
        if self.fd is None:
            return mmap.mmap(-1, length)
        return mmap.mmap(self.fd, length, offset=offset)

    def close(self) -> None:
        """Give up the descriptor; existing maps and the arrays on them stay valid."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _aligned(nbytes: int, to: int = _LINE) -> int:
    return -(-nbytes // to) * to


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """Where every field that does not depend on the spaces lies."""

    num_slots: int
    ring_sizes: tuple[int, ...]

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]]) -> ControlPlan:
        """Plan for workers that own the slot ranges `bounds`."""
        return cls(
            bounds[-1][1], tuple((hi - lo) * _RING_PER_SLOT + _RING_SPARE for lo, hi in bounds)
        )

    @property
    def nbytes(self) -> int:
        """Size of the control part, a whole number of pages."""
        return _aligned(Control.measure(self), _PAGE)


class Control:
    """The control part, bound: scalars of slots, rings of commands, where workers stand."""

    def __init__(self, plan_: ControlPlan, buffer: Any) -> None:
        n = plan_.num_slots
        self._buffer, self._offset = buffer, 0
        self.rewards = self._take((n,), "f8")
        self.flags = self._take((3, n), "?")
        """What is special about each row, in one block: mostly nothing, seen at one glance."""
        self.terminated, self.truncated, self.invalid = self.flags
        """`invalid`: the row is no transition: next_step's reset row, or a restarted slot."""
        self.tickets = self._take((n,), "u4")
        """The request a slot was last sent in: how a worker finds the slots of a partial send."""
        self.schemas = self._take((n,), "u2")
        self.infos = self._take((n, INFO_BYTES), "u1")
        self.final_schemas = self._take((n,), "u2")
        self.final_infos = self._take((n, INFO_BYTES), "u1")
        """same_step: the last infos of episodes, where a row says that one ended."""
        self.rng = self._take((n, CELL_BYTES), "u1")
        self.status = [memoryview(self._take((8,), "u8").data) for _ in plan_.ring_sizes]
        """Per worker: [commands posted, on which it sleeps; what it does; ns in hosts; ns idle]."""
        self.rings = [memoryview(self._take((size * 3,), "u8").data) for size in plan_.ring_sizes]
        """Per worker: triples (request, operation, flags)."""

    @property
    def rows(self) -> tuple[Array, ...]:
        """What a worker writes of its slots, an array with an item for each slot at a time."""
        return (
            self.rewards,
            self.flags.T,
            self.schemas,
            self.infos,
            self.final_schemas,
            self.final_infos,
            self.rng,
        )

    @classmethod
    def measure(cls, plan_: ControlPlan) -> int:
        """Bytes needed, found by binding to nothing."""
        control = cls.__new__(cls)
        control.__init__(plan_, None)  # type: ignore[misc]
        return control._offset

    def _take(self, shape: tuple[int, ...], dtype: str) -> Array:
        kind = np.dtype(dtype)
        count = int(np.prod(shape))
        start, self._offset = self._offset, self._offset + _aligned(count * kind.itemsize)
        if self._buffer is None:
            return np.zeros(shape, kind)
        return np.frombuffer(self._buffer, kind, count, start).reshape(shape)


@dataclass(frozen=True, slots=True)
class SpaceGroup:
    """Slots that share one observation and one action space, and so one set of columns."""

    observation: Layout
    action: Layout
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Room for the observations of many steps."""

    count: int = 0
    floats: str | None = None
    """The type that floats are kept as, such as "float32"; None keeps what comes."""

    def dtype_of(self, field: Field) -> np.dtype[Any]:
        """How such observations are kept."""
        is_changed = self.floats is not None and field.dtype.kind == "f"
        return np.dtype(self.floats) if is_changed else field.dtype

    def nbytes(self, layout: Layout, rows: int) -> int:
        """Bytes of all pages; 0 if values are not single arrays."""
        if not layout.is_one_array:
            return 0
        (field,) = layout.fields
        return self.count * rows * math.prod(field.shape) * self.dtype_of(field).itemsize


class Data:
    """The part planned from the spaces: observations, final observations and actions.

    With pages there is also room for the observations of as many steps, [page, slot], where values
    are single arrays. Page 1 is the first; 0 means none.
    """

    def __init__(
        self,
        space_groups: Sequence[SpaceGroup],
        buffer: Any,
        offset: int = 0,
        *,
        page_plan: PagePlan = PagePlan(),  # noqa: B008 - frozen
    ) -> None:
        self.space_groups = tuple(space_groups)
        self.obs: list[Columns] = []
        self.final_obs: list[Columns] = []
        self.actions: list[Columns] = []
        num_slots = sum(len(kind.slots) for kind in space_groups)
        self.group_of = np.zeros(num_slots, np.intp)
        self.row_of = np.zeros(num_slots, np.intp)
        for index, kind in enumerate(space_groups):
            rows = len(kind.slots)
            self.group_of[list(kind.slots)] = index
            self.row_of[list(kind.slots)] = np.arange(rows)
            obs, actions = kind.observation, kind.action
            for layout, columns in (
                (obs, self.obs),
                (obs, self.final_obs),
                (actions, self.actions),
            ):
                columns.append(layout.bind(buffer, offset, rows))
                offset += _aligned(layout.nbytes(rows))
        self.pages: Array | None = None
        row = self.obs[0].sole_array if len(self.space_groups) == 1 else None
        if page_plan.count and row is not None:
            (field,) = space_groups[0].observation.fields
            shape = page_plan.count, *row.shape
            dtype = page_plan.dtype_of(field)
            self.pages = np.frombuffer(buffer, dtype, math.prod(shape), offset).reshape(shape)

    def keep(self, page: int, rows: slice) -> None:
        """Put the last observations of these rows on a page."""
        assert self.pages is not None
        seen = self.obs[0].read_batch(rows, copy=False)
        if seen.dtype == self.pages.dtype:
            self.pages[page - 1, rows] = seen
        else:
            with np.errstate(over="ignore"):  # what is too large for its page is infinite there
                self.pages[page - 1, rows] = seen

    @staticmethod
    def measure(space_groups: Sequence[SpaceGroup], page_plan: PagePlan = PagePlan()) -> int:  # noqa: B008
        """Bytes needed for `space_groups`, at least one page."""
        total = 0
        for kind in space_groups:
            rows = len(kind.slots)
            total += 2 * _aligned(kind.observation.nbytes(rows))
            total += _aligned(kind.action.nbytes(rows))
            if len(space_groups) == 1:
                total += page_plan.nbytes(kind.observation, rows)
        return max(_aligned(total, _PAGE), _PAGE)


def group_spaces(spaces: Sequence[tuple[Any, Any]]) -> list[SpaceGroup]:
    """Group slots by equal spaces, in the order in which the spaces first appear."""
    groups: list[tuple[Any, Any, list[int]]] = []
    known: dict[tuple[int, int], list[int]] = {}
    """The slots of the group that a pair of objects is in: each pair is compared once."""
    for slot, (observation_space, action_space) in enumerate(spaces):
        objects = id(observation_space), id(action_space)
        if objects not in known:
            for known_obs, known_action, slots in groups:
                if are_equal(known_obs, observation_space) and are_equal(
                    known_action, action_space
                ):
                    known[objects] = slots
                    break
            else:
                known[objects] = []
                groups.append((observation_space, action_space, known[objects]))
        known[objects].append(slot)
    return [
        SpaceGroup(plan_layout(obs, "observation"), plan_layout(action, "action"), tuple(slots))
        for obs, action, slots in groups
    ]
