"""What fits is written exactly; what does not is refused with its path, never bent into place."""

from __future__ import annotations

import array as array_module
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from envfleet.errors import LayoutMismatch
from envfleet.layout import Columns, plan_layout

FLOATS = Box(-np.inf, np.inf, (4,))
GRID = Box(-100, 100, (2, 3), np.int16)
BYTES = Box(0, 255, (4,), np.uint8)
BITS: Any = Box(0, 1, (2,), bool)
grid = np.arange(12, dtype=np.int16).reshape(3, 4)


def bind(space: Any, rows: int = 3) -> Columns:
    layout = plan_layout(space, "observation")
    return layout.bind(bytearray(layout.nbytes(rows)), 0, rows)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (FLOATS, np.arange(4, dtype=np.float32)[::-1]),
        (FLOATS, np.arange(8, dtype=np.float32)[::2]),
        (FLOATS, np.arange(4, dtype=np.float64)),
        (FLOATS, np.arange(4, dtype=">f4")),
        (FLOATS, np.arange(4)),
        (FLOATS, [1, 2.5, 3, 4]),
        (FLOATS, (np.float64(1), np.float32(2), 3, True)),
        (FLOATS, array_module.array("f", [1, 2, 3, 4])),
        (FLOATS, np.ma.array([1, 2, 3, 4], np.float32)),
        (GRID, np.asfortranarray(grid[:2, :3])),
        (GRID, grid[1:, :3][::-1, ::-1]),
        (GRID, grid.T[:2, :]),
        (GRID, [[1, 2, 3], [4, 5, 6]]),
        (GRID, grid[:2, 1:].astype(np.int64)),
        (BYTES, [0, 1, 254, 255]),
        (BYTES, np.array([0, 1, 254, 255], np.int64)),
        (BYTES, np.array([True, False, True, False])),
        (BITS, [0, 1]),
        (Box(0, 1, (0,), np.int8), []),
        (Box(-1, 1, ()), 0.5),
        (Box(-1, 1, ()), np.float32(0.5)),
        (Box(-1, 1, ()), np.array(0.5)),
        (Discrete(300), 299),
        (Discrete(300), np.int64(299)),
        (Discrete(300), np.uint8(7)),
        (Discrete(300), np.array(299, np.int32)),
        (Discrete(2), True),
        (Discrete(2), np.True_),
        (Discrete(9, dtype=np.uint8), 8),
        (MultiDiscrete([5, 6]), [4, 5]),
        (MultiBinary(3), np.array([True, False, True])),
    ],
)
def test_values_in_other_clothes_are_taken(space: Any, value: Any) -> None:
    columns = bind(space)
    assert columns.writer(1)(value) is None
    row = columns.read(1)
    assert (row.dtype, row.shape) == (space.dtype, space.shape)
    np.testing.assert_array_equal(row, np.asarray(value))
    assert columns.write_batch(slice(0, 3), [value] * 3) is None
    np.testing.assert_array_equal(columns.read_batch(slice(0, 3)), [np.asarray(value)] * 3)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (FLOATS, np.zeros(1, np.float32)),
        (FLOATS, np.zeros((), np.float32)),
        (FLOATS, np.zeros((1, 4), np.float32)),
        (FLOATS, np.zeros((4, 1), np.float32)),
        (FLOATS, 0.0),
        (FLOATS, [[1, 2], [3]]),
        (FLOATS, [1, None, 3, 4]),
        (FLOATS, None),
        (FLOATS, "abcd"),
        (FLOATS, np.zeros(4, np.complex64)),
        (FLOATS, {"a": 1}),
        (BYTES, np.zeros(4, np.float32)),
        (BYTES, [0, 0, 0, 256]),
        (BYTES, np.array([-1, 0, 0, 0])),
        (GRID, np.zeros((3, 2), np.int16)),
        (GRID, np.zeros(6, np.int16)),
        (GRID, np.full((2, 3), 40_000)),
        (GRID, np.zeros((2, 3))),
        (Discrete(3), 1.0),
        (Discrete(3), np.float64(1)),
        (Discrete(3), np.array([1])),
        (Discrete(3), [1]),
        (Discrete(3), 2**70),
        (Discrete(3), "1"),
        (Discrete(3, dtype=np.int8), 128),
        (Discrete(3, dtype=np.uint8), -1),
        (Box(-1, 1, ()), np.zeros(1)),
        (Box(0, 1, (0,)), np.zeros(1)),
        (BITS, [0, 2]),
        (Text(4), b"abc"),
        (Text(4), None),
    ],
)
def test_values_that_do_not_fit_are_refused(space: Any, value: Any) -> None:
    columns = bind(space)
    with pytest.raises(LayoutMismatch, match=r"^observation should be .* but is ") as caught:
        columns.writer(1)(value)
    assert caught.value.path == "observation"
    with pytest.raises(LayoutMismatch, match=r"^observation"):
        columns.write_batch(slice(0, 3), [value] * 3)


def test_an_error_says_what_was_expected_and_what_came() -> None:
    with pytest.raises(LayoutMismatch) as caught:
        bind(FLOATS).writer(0)(np.zeros(1))
    assert str(caught.value) == (
        "observation should be an array of shape (4,) and dtype float32 "
        "but is an array of shape (1,) and dtype float64"
    )
    with pytest.raises(LayoutMismatch, match="dtype int64 with values out of range"):
        bind(BYTES).writer(0)([0, 0, 0, 256])
    with pytest.raises(LayoutMismatch, match="a scalar of dtype int64 but is of type NoneType"):
        bind(Discrete(3)).writer(0)(None)


TREE = Dict(image=Tuple((BYTES, FLOATS)), mission=Text(4))
GOOD = {"image": (np.zeros(4, np.uint8), np.zeros(4, np.float32)), "mission": "go"}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"image": (GOOD["image"][0], np.zeros(3)), "mission": "go"}, "observation['image'][1]"),
        ({"image": (GOOD["image"][0],), "mission": "go"}, "observation['image']"),
        ({"image": (*GOOD["image"], 0), "mission": "go"}, "observation['image']"),
        ({"image": {0: 0, 1: 0}, "mission": "go"}, "observation['image']"),
        ({"image": "ab", "mission": "go"}, "observation['image']"),
        ({"image": GOOD["image"], "mission": 3}, "observation['mission']"),
        ({"image": GOOD["image"]}, "observation"),
        ({"image": GOOD["image"], "other": "go"}, "observation"),
        ([1, 2], "observation"),
        (None, "observation"),
    ],
)
def test_errors_name_the_path(value: Any, path: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        bind(TREE).writer(0)(value)
    assert caught.value.path == path


def test_errors_of_a_batch_name_the_path_too() -> None:
    columns = bind(TREE)
    images = np.zeros((2, 4), np.uint8)
    for batch, path in [
        ({"image": (images, images[:1]), "mission": ("a", "b")}, "observation['image'][1]"),
        ({"image": (images,), "mission": ("a", "b")}, "observation['image']"),
        ({"image": (images, images), "mission": ("a", "b", "c")}, "observation['mission']"),
        ({"image": (images, images), "mission": "ab"}, "observation['mission']"),
        ({"image": (images, images), "mission": ("a", 3)}, "observation['mission'][1]"),
        ({"image": (images, images)}, "observation"),
    ]:
        with pytest.raises(LayoutMismatch) as caught:
            columns.write_batch(slice(0, 2), batch)
        assert caught.value.path == path


@pytest.mark.parametrize("kind", [OrderedDict, MappingProxyType])
def test_any_mapping_and_further_keys_are_taken(kind: Any) -> None:
    columns = bind(TREE)
    columns.writer(0)(kind({**GOOD, "image": list(GOOD["image"]), "further": 1}))
    assert list(columns.read(0)) == ["image", "mission"]
    assert columns.read(0)["mission"] == "go"


def test_a_batch_of_the_wrong_length_is_refused() -> None:
    columns = bind(FLOATS)
    for num in (0, 1, 2, 4):
        with pytest.raises(LayoutMismatch, match=r"shape \(3, 4\)"):
            columns.write_batch(slice(0, 3), np.zeros((num, 4), np.float32))
    with pytest.raises(LayoutMismatch):
        columns.write_batch(np.array([0, 2]), np.zeros((3, 4), np.float32))


@pytest.mark.parametrize("space", [FLOATS, Discrete(3), Text(3), TREE])
def test_rows_that_do_not_exist_are_refused(space: Any) -> None:
    columns = bind(space)
    for row in (-1, 3, 99):
        with pytest.raises(IndexError, match="not within 0:3"):
            columns.writer(row)
        with pytest.raises(IndexError, match="not within 0:3"):
            columns.read(row)
    for rows in (slice(0, 4), slice(-1, 2), slice(2, 1), np.array([0, 3]), np.array([-1])):
        for act in (columns.read_each, columns.read_batch, columns.poison):
            with pytest.raises(IndexError, match="within 0:3"):
                act(rows)
        with pytest.raises(IndexError, match="within 0:3"):
            columns.write_batch(rows, None)
    for mask in (np.array([True, False, True]), np.array([0.0]), np.array([[0]])):
        with pytest.raises(TypeError, match="rows are a slice"):
            columns.read_batch(mask)


def test_open_slices_mean_all_rows() -> None:
    columns = bind(Discrete(9))
    columns.write_batch(slice(None), np.array([1, 2, 3]))
    assert columns.read_each(slice(None)) == [1, 2, 3]
    assert columns.read_each(slice(1, None)) == [2, 3]
    assert columns.read_each(slice(None, None, 2)) == [1, 3]
    assert columns.read_each(np.array([], np.int64)) == []


def test_read_each_gives_what_an_env_expects() -> None:
    assert type(bind(Discrete(9)).read_each(slice(0, 1))[0]) is np.int64
    assert type(bind(Discrete(9, dtype=np.int8)).read(0)) is np.int8
    assert type(bind(FLOATS).read(0)) is np.ndarray
    swapped = bind(Discrete(900, dtype=">i4"))
    swapped.writer(0)(513)
    assert swapped.read(0) == 513


def test_a_writer_keeps_to_its_row() -> None:
    for space, value in [(FLOATS, np.ones(4, np.float32)), (GRID, np.ones((2, 3), np.int16))]:
        columns = bind(space)
        columns.writer(1)(value)
        batch = columns.read_batch(slice(0, 3))
        assert batch[1].all()
        assert not batch[[0, 2]].any()


def test_poison_shows_in_views_and_is_not_taken_for_text() -> None:
    columns = bind(Dict(f=FLOATS, i=Discrete(9), b=BYTES, m=Box(0, 1, (1,), np.bool_)))
    view = columns.read_batch(slice(0, 3), copy=False)
    columns.poison(np.array([1]))
    assert np.isnan(view["f"][1]).all()
    assert view["b"][1].tolist() == [0xCD] * 4
    assert view["i"][1] not in range(9)
    assert view["m"][1].all()
    assert not view["f"][[0, 2]].any()
    texts = bind(Text(4))
    texts.write_batch(slice(0, 3), ("a", "b", "c"))
    texts.poison(slice(1, 2))
    assert texts.read(0) == "a"
    with pytest.raises(LayoutMismatch, match="poisoned"):
        texts.read(1)
    texts.writer(1)("d")
    assert texts.read_batch(slice(0, 3)) == ("a", "d", "c")
