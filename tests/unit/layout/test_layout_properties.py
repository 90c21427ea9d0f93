"""For any space, all ways in and all ways out agree with each other and with Gymnasium."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    GraphInstance,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Space,
    Text,
    Tuple,
)
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envfleet.layout import Columns, RecordSpace, plan_layout

ROWS = 5


class Pair(Space[Any]):
    """A space that is registered nowhere."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return self.np_random.integers(9, size=2), "pair"

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple)


SHAPES = st.sampled_from([(), (1,), (3,), (0,), (2, 2), (2, 1, 3)])
INTEGERS = st.sampled_from([np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64])
DTYPES = st.one_of(INTEGERS, st.sampled_from([np.bool_, np.float16, np.float32, np.float64, ">f4"]))
SIMPLE_ARRAYS = st.one_of(
    st.builds(lambda shape, dtype: Box(0, 1, shape, dtype), SHAPES, DTYPES),
    st.builds(lambda shape: Box(-np.inf, np.inf, shape), SHAPES),
    st.builds(lambda n, start: Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(lambda n, dtype: Discrete(n, dtype=dtype), st.integers(1, 9), INTEGERS),
    st.builds(MultiDiscrete, st.sampled_from([[2, 3], [[2, 3], [4, 5]]]), dtype=INTEGERS),
    st.sampled_from([MultiBinary(3), MultiBinary([2, 2])]),
)
RECORDS = st.recursive(
    st.builds(lambda a, b: RecordSpace({"a": a, "b": b}), SIMPLE_ARRAYS, st.just(Discrete(3))),
    lambda inner: st.builds(lambda a, b: RecordSpace({"a": a, "b": b}), inner, SIMPLE_ARRAYS),
    max_leaves=2,
)
ARRAYS = st.one_of(SIMPLE_ARRAYS, RECORDS)
LEAVES = st.one_of(
    ARRAYS,
    st.builds(lambda n: Text(n, min_length=0, charset="aé漢🙂"), st.integers(1, 9)),
    st.builds(Graph, st.just(Box(-1, 1, (2,))), st.sampled_from([None, Discrete(3)])),
    st.builds(lambda *spaces: OneOf(spaces), ARRAYS, ARRAYS),
    st.builds(Pair),
)


def _nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", "long key"])
    return st.one_of(
        st.builds(Dict, st.dictionaries(keys, inner, min_size=1, max_size=3)),
        st.builds(Tuple, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda space, stack: Sequence(space, stack=stack), inner, st.booleans()),
    )


SPACES = st.recursive(LEAVES, _nest, max_leaves=5)
PROPERTY = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])


def assert_same(left: Any, right: Any) -> None:
    """Equal in structure, types, dtypes, shapes and values.

    A 0-d array is as good as a scalar: Gymnasium itself samples either, depending on the dtype.
    """
    left, right = (x[()] if isinstance(x, np.ndarray) else x for x in (left, right))
    assert type(left) is type(right), (left, right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, (np.ndarray, np.generic)):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right


def arrays_in(value: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [a for v in value for a in arrays_in(v)] if isinstance(value, (list, tuple)) else []


def bind(space: Space[Any], rows: int = ROWS) -> Columns:
    layout = plan_layout(space)
    return layout.bind(bytearray(layout.nbytes(rows)), 0, rows)


def batch_of(space: Space[Any], items: list[Any]) -> Any:
    out: Any = create_empty_array(space, len(items))
    return concatenate(space, items, out)


def samples(space: Space[Any], seed: int) -> list[Any]:
    space.seed(seed)
    return [space.sample() for _ in range(ROWS)]


@PROPERTY
@given(space=SPACES, seed=st.integers(0, 99))
def test_rows_written_one_by_one_read_as_gymnasium_batches_them(space: Any, seed: int) -> None:
    items = samples(space, seed)
    columns = bind(space)
    everything = slice(0, ROWS)

    written = {i: columns.writer(i)(item) for i, item in enumerate(items)}
    spills = {i: spill for i, spill in written.items() if spill is not None}
    expected = batch_of(space, items)
    expected_each = list(iterate(batch_space(space, ROWS), expected))

    assert_same(columns.read_batch(everything, spills), expected)
    assert_same(columns.read_batch(everything, spills, copy=False), expected)
    assert_same(columns.read_each(everything, spills), expected_each)
    for i in range(ROWS):
        assert_same(columns.read(i, spills.get(i)), expected_each[i])


# Gymnasium warns when a Box() holds a numpy scalar, which is what it samples itself.
@pytest.mark.filterwarnings("ignore:.*Casting input x")
@PROPERTY
@given(space=SPACES, seed=st.integers(0, 99), rows=st.sampled_from(["slice", "strided", "numbers"]))
def test_a_batch_written_reads_back_on_every_path(space: Any, seed: int, rows: str) -> None:
    choices: dict[str, Any] = {
        "slice": slice(2, 2 + ROWS),
        "strided": slice(1, 2 * ROWS, 2),
        "numbers": np.array([7, 0, 9, 3, 4]),
    }
    where = choices[rows]
    numbers = np.arange(2 * ROWS)[where].tolist()
    batch = batch_of(space, samples(space, seed))
    expected_each = list(iterate(batch_space(space, ROWS), batch))
    columns = bind(space, 2 * ROWS)

    spills = columns.write_batch(where, batch)

    assert_same(columns.read_batch(where, spills), batch)
    assert_same(columns.read_each(where, spills), expected_each)
    assert columns.read_batch(where, spills) in batch_space(space, ROWS)
    for i, row in enumerate(numbers):
        assert_same(columns.read(row, (spills or {}).get(i)), expected_each[i])


@PROPERTY
@given(space=SPACES, seed=st.integers(0, 99))
def test_what_is_read_owns_its_memory_and_what_is_written_is_copied(space: Any, seed: int) -> None:
    items = samples(space, seed)
    expected = batch_of(space, items)
    columns = bind(space)
    everything = slice(0, ROWS)
    batch = deepcopy(expected)
    spills = columns.write_batch(everything, batch)
    first = columns.read_batch(everything, spills)
    each = columns.read_each(everything, spills)

    for array in arrays_in(batch):
        array.fill(1)
    if spills is None:  # values of a Spill are handed out as they are
        for array in arrays_in(columns.read_batch(everything)) + arrays_in(each):
            array.fill(1)
        assert_same(columns.read_batch(everything), expected)
    columns.poison(everything)
    assert_same(first, expected)


@PROPERTY
@given(space=SPACES, seed=st.integers(0, 99), rows=st.sampled_from([(0, ROWS), (1, 4), (2, 2)]))
def test_a_reader_reads_what_is_there_now_and_keeps_nothing(
    space: Any, seed: int, rows: tuple[int, int]
) -> None:
    columns = bind(space)
    everything, some = slice(0, ROWS), slice(*rows)
    read = columns.reader(some)
    kept: list[tuple[Any, Any]] = []
    for another in (seed, seed + 100):
        if columns.write_batch(everything, batch_of(space, samples(space, another))) is not None:
            return  # a reader is for rows from which nothing has spilled
        each = read()
        assert_same(each, columns.read_each(some))
        kept.append((each, deepcopy(each)))
    for each, as_it_was in kept:
        assert_same(each, as_it_was)
    for array in arrays_in(kept[-1][0]):
        array.fill(1)
    assert_same(read(), kept[-1][1])


def test_a_reader_of_rows_that_do_not_exist_is_refused() -> None:
    with pytest.raises(IndexError):
        bind(Discrete(3)).reader(slice(0, ROWS + 1))


@pytest.mark.parametrize("shape", [(4,), (1,), (0,), (), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["as it is", "to be cast"])
@pytest.mark.parametrize(
    "rows",
    [slice(0, ROWS), slice(1, 4), slice(2, 3), slice(3, 3), slice(0, ROWS, 2), np.array([4, 0, 2])],
    ids=str,
)
def test_a_batch_that_lies_column_by_column_is_written_like_any_other(
    rows: Any, dtype: Any, shape: tuple[int, ...]
) -> None:
    columns, others = (bind(Box(-np.inf, np.inf, shape)) for _ in range(2))
    count = len(np.arange(ROWS)[rows])
    batch = np.arange(1, 1 + count * int(np.prod(shape))).reshape(count, *shape).astype(dtype)
    by_column = np.asfortranarray(batch)
    transposed = batch.T.copy().T  # what `x.T.astype(...)` gives

    others.write_batch(rows, batch)
    expected = others.read_batch(slice(0, ROWS))
    for other in (by_column, transposed, batch[::-1][::-1], np.repeat(batch, 2, axis=0)[::2]):
        columns.write_batch(slice(0, ROWS), np.zeros((ROWS, *shape), np.float32))
        columns.write_batch(rows, other)
        assert_same(columns.read_batch(slice(0, ROWS)), expected)


def test_one_row_for_all_is_written_to_all() -> None:
    """A broadcast array lies nowhere: its first stride is 0."""
    columns = bind(Box(-np.inf, np.inf, (3,)))
    columns.write_batch(slice(0, ROWS), np.broadcast_to(np.arange(3.0), (ROWS, 3)))
    assert columns.read_batch(slice(0, ROWS)).tolist() == [[0, 1, 2]] * ROWS


@PROPERTY
@given(space=SPACES, seed=st.integers(0, 99))
def test_two_bindings_share_the_bytes_and_views_follow_them(space: Any, seed: int) -> None:
    layout = plan_layout(space)
    buffer = bytearray(64 + layout.nbytes(ROWS))
    here, there = layout.bind(buffer, 64, ROWS), layout.bind(buffer, 64, ROWS)
    everything = slice(0, ROWS)
    has_only_arrays = all(field.kind == "array" for field in layout.fields)
    view = there.read_batch(everything, copy=False) if has_only_arrays else None
    batch = batch_of(space, samples(space, seed))

    spills = here.write_batch(everything, batch)

    assert_same(there.read_batch(everything, spills), batch)
    if has_only_arrays:
        assert_same(view, batch)
    assert bytes(buffer[:64]) == bytes(64)


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=()), max_size=40))
@pytest.mark.parametrize("max_length", [1, 8, 40])
def test_any_str_arrives_unchanged(max_length: int, text: str) -> None:
    columns = bind(Text(max_length))
    spill = columns.writer(1)(text)
    assert columns.read(1, spill) == text
    spills = columns.write_batch(slice(0, 2), ("x", text))
    assert columns.read_batch(slice(0, 2), spills) == ("x", text)


def test_a_graph_is_copied_when_it_spills() -> None:
    space = Graph(Box(-1, 1, (2,)), None)
    nodes = np.ones((3, 2), np.float32)
    spill = bind(space).writer(0)(GraphInstance(nodes, None, None))
    nodes[:] = 0
    assert spill is not None
    assert spill[0].nodes.all()
