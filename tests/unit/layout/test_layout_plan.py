"""The byte plan itself: fields, sizes, alignment, binding, and teaching it a new space."""

from __future__ import annotations

import doctest
import mmap
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, OneOf, Sequence, Space, Text, Tuple

from envfleet.errors import LayoutMismatch
from envfleet.layout import (
    SEQUENCE_CELL_BYTES,
    TEXT_CELL_MAX_BYTES,
    are_equal,
    are_same,
    array,
    plan_layout,
    register,
    spaces,
)

NESTED = Dict(
    image=Tuple((Box(0, 255, (2, 3), np.uint8), Discrete(4))),
    mission=Text(10),
    objects=Sequence(Dict(at=Box(-1, 1, (2,)), name=Text(5))),
    graph=Graph(Box(-1, 1, (1,)), None),
)


def boxed(high: Any = 1.0, dtype: Any = np.float32) -> Dict:
    return Dict(a=Box(-1, high, (3,), dtype), b=Tuple((Discrete(3), Box(0, 255, (2,), np.uint8))))


@pytest.mark.parametrize(
    ("one", "other", "is_same", "is_equal"),
    [
        (boxed(), boxed(), True, True),
        (boxed(), boxed(2.0), False, False),
        (boxed(), boxed(1.0 + 1e-6), False, True),  # Gymnasium's word: as good as equal
        (boxed(), boxed(dtype=np.float64), False, False),
        (Discrete(3), Discrete(3, dtype=np.int32), False, Discrete(3) == Discrete(3, dtype="i4")),
        (Discrete(3), Discrete(4), False, False),
        (Tuple((Discrete(3),)), Tuple((Discrete(3), Discrete(3))), False, False),
        (Text(4), Text(4), False, True),  # only its own word is known
        (Box(0, 1, (2,)), Box(0, 1, (1, 2)), False, False),
        (NESTED, NESTED, True, True),
    ],
)
def test_what_is_the_same_is_equal_and_the_others_are_asked(
    one: Any, other: Any, is_same: bool, is_equal: bool
) -> None:
    assert are_same(one, other) is are_same(other, one) is is_same
    assert are_equal(one, other) is are_equal(other, one) is is_equal is bool(one == other)


def test_fields_tell_path_kind_dtype_and_shape() -> None:
    fields = plan_layout(NESTED).fields
    assert [(field.path, field.kind) for field in fields] == [
        (("image", 0), "array"),
        (("image", 1), "array"),
        (("mission",), "text"),
        (("objects",), "ragged"),
        (("graph",), "spill"),
    ]
    assert [field.index for field in fields] == list(range(5))
    assert (fields[0].dtype, fields[0].shape) == (np.dtype(np.uint8), (2, 3))
    assert (fields[1].dtype, fields[1].shape) == (np.dtype(np.int64), ())


@pytest.mark.parametrize(
    ("space", "spills"),
    [
        (Box(0, 1), False),
        (Text(3), False),
        (Sequence(Text(3)), False),
        (Sequence(Graph(Box(0, 1), None)), True),
        (Sequence(Tuple(())), True),
        (OneOf([Box(0, 1)]), True),
        (Dict(a=Box(0, 1), b=OneOf([Box(0, 1)])), True),
    ],
)
def test_layout_says_whether_some_leaf_always_spills(space: Any, spills: bool) -> None:
    assert plan_layout(space).spills is spills


def test_columns_are_contiguous_and_start_on_cache_lines() -> None:
    layout = plan_layout(Tuple((Box(0, 1, (3,), np.uint8), Box(0, 1, (2,)), Discrete(3))))
    assert layout.nbytes(5) == 3 * 64
    assert layout.nbytes(0) == 0
    buffer = mmap.mmap(-1, 4096)
    views = layout.bind(buffer, 128, 5).read_batch(slice(0, 5), copy=False)
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    assert [view.ctypes.data - start for view in views] == [128, 192, 256]
    assert all(view.flags.c_contiguous for view in views)


def test_text_cells_hold_the_longest_text_up_to_a_bound() -> None:
    assert plan_layout(Text(3, charset="ab")).fields[0].shape == (8,)
    assert plan_layout(Text(3, charset="a🙂")).fields[0].shape == (16,)
    assert plan_layout(Text(10**9)).fields[0].shape == (TEXT_CELL_MAX_BYTES + 8,)
    assert plan_layout(Sequence(Box(0, 1))).fields[0].shape == (SEQUENCE_CELL_BYTES + 8,)


def test_a_plan_pickles_and_equal_spaces_have_equal_fields() -> None:
    layout = pickle.loads(pickle.dumps(plan_layout(NESTED)))
    assert layout.fields == plan_layout(NESTED).fields
    columns = layout.bind(bytearray(layout.nbytes(1)), 0, 1)
    value = NESTED.sample()
    spill = columns.writer(0)(value)
    assert columns.read(0, spill)["mission"] == value["mission"]


@pytest.mark.parametrize(
    ("buffer", "offset", "rows", "message"),
    [
        (bytearray(64), 0, 9, "9 rows at offset 0 need a writable buffer of 128 bytes, got 64"),
        (bytearray(128), 64, 9, "192 bytes"),
        (bytes(64), 0, 1, "read-only"),
        (bytearray(128), 8, 1, "multiple of 64"),
        (bytearray(128), -64, 1, "multiple of 64"),
        (bytearray(128), 0, -1, "-1 rows"),
    ],
)
def test_bind_refuses_what_cannot_hold_the_rows(
    buffer: Any, offset: int, rows: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_layout(Discrete(3)).bind(buffer, offset, rows)


def test_no_rows_can_be_bound_and_read() -> None:
    layout = plan_layout(NESTED)
    columns = layout.bind(bytearray(), 0, 0)
    assert columns.read_each(slice(0, 0)) == []
    assert columns.read_batch(slice(0, 0))["mission"] == ()
    assert columns.read_batch(slice(0, 0))["image"][0].shape == (0, 2, 3)


@pytest.mark.parametrize(("space", "value"), [(Dict(), {}), (Tuple(()), ())])
def test_spaces_without_leaves_take_no_bytes(space: Any, value: Any) -> None:
    layout = plan_layout(space)
    columns = layout.bind(bytearray(), 0, 2)
    assert layout.nbytes(2) == 0
    assert columns.writer(0)(value) is None
    assert columns.read_each(slice(0, 2)) == [value, value]
    assert columns.read_batch(slice(0, 2)) == value


def test_only_spaces_are_planned() -> None:
    with pytest.raises(TypeError, match="gymnasium Space, got int"):
        plan_layout(3)  # type: ignore[arg-type]


def test_object_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="no fixed bytes"):
        array((2,), object)


def test_the_example_of_register_runs() -> None:
    result = doctest.testmod(spaces)
    assert result.attempted > 5
    assert result.failed == 0


def test_a_registered_space_may_be_a_tree_and_its_subclasses_follow() -> None:
    class Pose(Space[Any]):
        pass

    class NamedPose(Pose):
        pass

    @register(Pose)
    def describe(space: Pose) -> Any:
        return {"at": array((2,), np.float32), "angle": array((), np.float64)}

    layout = plan_layout(Tuple((NamedPose(), Discrete(2))), "observation")
    columns = layout.bind(bytearray(layout.nbytes(1)), 0, 1)
    columns.writer(0)(({"at": [1, 2], "angle": 0.5}, 1))
    pose, number = columns.read(0)
    assert (pose["at"].tolist(), pose["angle"], number) == ([1, 2], 0.5, 1)
    with pytest.raises(LayoutMismatch, match=r"observation\[0\]\['at'\] should be"):
        columns.writer(0)(({"at": [1], "angle": 0.5}, 1))
