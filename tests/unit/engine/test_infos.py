"""Infos: what travels as fields comes back as it was, and many dicts become Gymnasium's one."""

import enum
import struct
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envfleet.engine import Fleet, ResetPlan
from envfleet.engine.infos import (
    NO_INFO,
    ON_CONTROL_PATH,
    InfoWriter,
    PackedInfos,
    Schema,
    SchemaRegistry,
    collate,
)
from envfleet.engine.memory import INFO_BYTES
from envfleet.testing import Counter, VectorCounter


class Color(enum.IntEnum):
    RED = 1


class Channel:
    """One worker's writer, and what the parent reads of it."""

    def __init__(self, num_slots=4):
        self.cells = np.zeros((num_slots, INFO_BYTES), np.uint8)
        self.numbers = np.zeros(num_slots, np.uint16)
        self.registry = SchemaRegistry()
        self.writer = InfoWriter(self.cells, self.numbers, 0, self.registry)
        self.schemas: list[Schema] = []

    def send(self, infos):
        """Write each slot's info; returns them as a parent would have them."""
        plain = []
        for slot, info in enumerate(infos):
            if not info:
                self.writer.clear(slot)
            elif not self.writer.write(slot, info):
                plain.append((slot, info))
        self.schemas += self.registry.take_fresh()
        groups: dict[Schema, list[int]] = {}
        for slot, number in enumerate(self.numbers[: len(infos)].tolist()):
            if number not in (NO_INFO, ON_CONTROL_PATH):
                groups.setdefault(self.schemas[number - 1], []).append(slot)
        packed = PackedInfos(
            tuple((schema, np.array(where), self.cells[where]) for schema, where in groups.items())
        )
        return packed, plain


def only(packed, plain):
    """The one info there is, by whichever way it came."""
    pairs = list(packed.each()) + plain
    assert len(pairs) == 1
    return pairs[0][1]


def same(left, right):
    """Equal in type, dtype, shape and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        left, right = np.asarray(left), np.asarray(right)
        return (left.dtype, left.shape, left.tobytes()) == (
            right.dtype,
            right.shape,
            right.tobytes(),
        )
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return left == right


def same_info(left, right):
    return list(left) == list(right) and all(same(left[key], right[key]) for key in left)


DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]


def arrays(shape):
    """Of any dtype; a NaN has many bit patterns, and passing through a C double may change it."""
    return st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(
            dtype, shape, elements={"allow_nan": False} if "f" in dtype else None
        )
    )


values = st.one_of(
    st.floats(allow_nan=False),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    arrays(()).map(lambda array: array[()]),
    arrays(hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)),
    st.just(np.zeros((0, 3), np.float32)),
)
infos = st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=5)


# ---- the two ways -------------------------------------------------------------------------------


@given(st.lists(infos, min_size=1, max_size=4), st.lists(infos, min_size=4, max_size=4))
def test_what_comes_back_is_what_was_given(first, second):
    """By whichever way it went, twice over the same cells."""
    channel = Channel()
    for batch in (first, second, first):
        packed, plain = channel.send(batch)
        found = {}
        for position, info in (*packed.each(), *plain):
            assert position not in found
            found[position] = info
        for position, info in enumerate(batch):
            assert same_info(found.get(position, {}), info)


def test_numbers_with_stable_keys_need_no_message():
    channel = Channel()
    info = {"a": 1, "b": 0.5, "c": True, "d": np.float32(2.5), "e": np.arange(3)}
    packed, plain = channel.send([info] * 4)
    assert not plain
    assert len(channel.schemas) == 1
    channel.send([{**info, "a": 7}] * 4)
    assert len(channel.schemas) == 1
    assert len(packed.groups) == 1


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        [1, 2],
        {"inner": 1},
        2**63,
        np.arange(100.0),
        np.array(["a"]),
        np.array([1, None], object),
        np.complex128(1j),
        np.datetime64("2020-01-01"),
        np.timedelta64(1, "s"),
        np.longdouble(1.5),
        np.arange(3, dtype=">i4"),
        Color.RED,
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_small_number_takes_the_control_path(value):
    channel = Channel()
    packed, plain = channel.send([{"a": 1, "odd": value}])
    assert packed.groups == ()
    ((position, info),) = plain
    assert position == 0
    assert info["odd"] is value


def test_a_key_that_is_no_text_takes_the_control_path():
    packed, plain = Channel().send([{1: 2}])
    assert (packed.groups, plain) == ((), [(0, {1: 2})])


def test_a_shape_or_type_that_changes_is_noticed():
    channel = Channel()
    batches = [
        {"a": np.zeros(2)},
        {"a": np.zeros(3)},
        {"a": np.zeros(2, np.float32)},
        {"a": np.zeros((2, 1))},
        {"a": np.float64(1)},
        {"a": 1.0},
        {"a": True},
        {"a": np.zeros(2)},
    ]
    for info in batches:
        assert same_info(only(*channel.send([info])), info)


def test_keys_in_another_order_are_another_info():
    channel = Channel()
    packed, plain = channel.send([{"a": 1, "b": 2}, {"b": 2, "a": 1}])
    assert not plain
    assert [list(info) for _, info in sorted(packed.each(), key=lambda pair: pair[0])] == [
        ["a", "b"],
        ["b", "a"],
    ]


def test_a_worker_whose_infos_never_settle_stops_registering():
    """Each schema costs a message, and memory on both sides."""
    channel = Channel()
    for number in range(500):
        info = {f"key {number}": number}
        assert only(*channel.send([info])) == info
    assert len(channel.schemas) < 100


def test_what_comes_back_is_a_copy():
    channel = Channel()
    packed, _ = channel.send([{"a": np.zeros(2)}])
    ((_, info),) = packed.each()
    info["a"][:] = 5
    packed, _ = channel.send([{"a": np.ones(2)}])
    ((_, info),) = packed.each()
    assert info["a"].tolist() == [1, 1]


# ---- Gymnasium's form ---------------------------------------------------------------------------


def vector(*infos):
    packed, plain = Channel(len(infos)).send(infos)
    by_fields = collate(len(infos), packed, plain)
    as_they_are = collate(
        len(infos), PackedInfos(), [(slot, info) for slot, info in enumerate(infos) if info]
    )
    assert_same_vector(by_fields, as_they_are)
    return by_fields


def assert_same_vector(left, right):
    assert left.keys() == right.keys()
    for key in left:
        if isinstance(left[key], dict):
            assert_same_vector(left[key], right[key])
        elif left[key].dtype == object:
            assert right[key].dtype == object
            for a, b in zip(left[key], right[key], strict=True):
                assert np.array_equal(a, b)
        else:
            assert left[key].dtype == right[key].dtype
            assert np.array_equal(left[key], right[key])


def test_keys_and_masks():
    found = vector({"a": 1}, {}, {"a": 3, "b": 0.5})
    assert found["a"].tolist() == [1, 0, 3]
    assert found["_a"].tolist() == [True, False, True]
    assert found["b"].tolist() == [0.0, 0.0, 0.5]
    assert found["_b"].tolist() == [False, False, True]
    assert found["_a"].dtype == np.bool_


@pytest.mark.parametrize("value", [7, 0.5, "text", {"x": 1}], ids=lambda one: type(one).__name__)
def test_a_mask_is_a_mask_whatever_environments_call_their_values(value):
    for info in ({"t": 1, "_t": value}, {"_t": value, "t": 1}):
        for found in (vector(info, info), vector(info, {}), vector({"t": 1}, {"_t": value})):
            assert found["_t"].dtype == np.bool_
            assert found["t"][found["_t"]].tolist() == [1] * int(found["_t"].sum())
            assert found["_t"][0]
    assert vector({"t": 1}, {"_t": value})["_t"].tolist() == [True, False]
    nested = vector({"n": {"_t": value, "t": 1}}, {})
    assert nested["n"]["_t"].tolist() == [True, False]


def test_ints_beside_floats_are_not_cut_off():
    """Gymnasium gives [1 0] here."""
    found = vector({"k": 1}, {"k": 0.5})
    assert found["k"].tolist() == [1.0, 0.5]


def test_a_large_int_beside_a_float_is_not_rounded():
    found = vector({"k": 2**60 + 1}, {"k": 0.25})
    assert [int(found["k"][0]), float(found["k"][1])] == [2**60 + 1, 0.25]


def test_arrays_are_stacked_where_they_are_alike_and_kept_where_not():
    found = vector({"k": np.zeros(2)}, {"k": np.ones(2)})
    assert found["k"].tolist() == [[0, 0], [1, 1]]
    found = vector({"k": np.zeros(2)}, {"k": np.ones(3)})
    assert found["k"].dtype == object
    assert [one.tolist() for one in found["k"]] == [[0, 0], [1, 1, 1]]


def test_nested_dicts_and_objects():
    found = vector(
        {"n": {"x": 1, "m": {"y": 2.5}}, "s": "text", "none": None},
        {"n": {"x": 2}, "list": [1]},
    )
    assert found["n"]["x"].tolist() == [1, 2]
    assert found["n"]["m"]["y"].tolist() == [2.5, 0.0]
    assert found["n"]["_m"].tolist() == [True, False]
    assert list(found["s"]) == ["text", None]
    assert list(found["list"]) == [None, [1]]
    assert found["_none"].tolist() == [True, False]


def test_a_dict_beside_a_number_is_kept():
    found = vector({"k": {"x": 1}}, {"k": 2})
    assert found["k"].dtype == object
    assert list(found["k"]) == [{"x": 1}, 2]


def test_final_observations_are_objects_whatever_they_are():
    found = collate(3, PackedInfos(), [(1, {"final_obs": np.zeros(2), "final_info": {"t": 5}})])
    assert found["final_obs"].dtype == object
    assert found["final_obs"][1].tolist() == [0, 0]
    assert found["_final_obs"].tolist() == [False, True, False]
    assert found["final_info"]["t"].tolist() == [0, 5, 0]
    assert found["final_info"]["_t"].tolist() == [False, True, False]


@given(st.lists(infos, min_size=1, max_size=4))
def test_no_value_is_lost_or_given_to_another(batch):
    """Whatever the form of a column, row and mask tell what each slot said."""
    packed, plain = Channel().send(batch)
    found = collate(len(batch), packed, plain)
    keys = {key for info in batch for key in info}
    if any(f"_{key}" in keys for key in keys):
        return  # Gymnasium's own form has no room for both
    assert found.keys() == keys | {f"_{key}" for key in keys}
    for key in keys:
        assert found[f"_{key}"].tolist() == [key in info for info in batch]
        for slot, info in enumerate(batch):
            if key in info:
                assert np.array_equal(found[key][slot], info[key])


@given(infos, st.integers(1, 5))
def test_infos_that_are_all_alike_collate_like_any_others(info, num):
    """The short way against the general one, which an empty dict or two groups make it take."""
    packed, plain = Channel(num).send([info] * num)
    if plain or not packed.groups:
        return
    ((schema, positions, cells),) = packed.groups
    cells[:, ::7] += np.arange(num, dtype=np.uint8)[:, None]  # the same keys, other values
    short = collate(num, packed, [])
    halves = [(schema, positions[part], cells[part]) for part in (slice(0, 1), slice(1, None))]
    for general in (
        collate(num, packed, [(0, {})]),
        collate(num, PackedInfos(tuple(halves)), []),
    ):
        assert list(short) == list(general)
        assert all(same(short[key], general[key]) for key in short)


@pytest.mark.parametrize("num", [1, 2, 5])
def test_vector_infos_share_no_memory(num):
    info = {"a": 1, "b": np.arange(3.0), "c": True, "d": np.float32(2.5)}
    packed, _ = Channel(num).send([info] * num)
    found = collate(num, packed, [])
    ((_, _, cells),) = packed.groups
    for key, one in found.items():
        assert not any(np.shares_memory(one, found[other]) for other in found if other != key)
        assert not np.shares_memory(one, cells)
        assert one.flags.writeable
        assert one.flags.aligned
    found["_a"][:] = False
    found["a"][:] = 7
    assert found["_b"].all()
    assert all(same_info(other, info) for _, other in packed.each())


@given(st.permutations(range(4)), st.sampled_from([4, 6]))
def test_infos_go_to_the_positions_they_name(order, num):
    """Alike and as many as there are slots, but in another order."""
    packed, _ = Channel().send([{"k": number} for number in range(4)])
    ((schema, _, cells),) = packed.groups
    found = collate(num, PackedInfos(((schema, np.array(order), cells),)), [])
    assert found["k"][list(order)].tolist() == [0, 1, 2, 3]
    assert found["_k"].tolist() == [slot < 4 for slot in range(num)]


@given(st.lists(infos, min_size=1, max_size=4))
def test_nothing_of_the_environment_s_is_changed(batch):
    before = [dict(info) for info in batch]
    packed, plain = Channel().send(batch)
    collate(len(batch), packed, plain)
    assert all(same_info(a, b) for a, b in zip(before, batch, strict=True))


class SaysOne(Counter):
    """Has an info of one number."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0], {"one": 1.5}

    def step(self, action):
        return *super().step(action)[:4], {"one": 2.5}


class SaysTwo(Counter):
    """Has infos of other numbers."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0], {"two": 7}

    def step(self, action):
        return *super().step(action)[:4], {"two": 8, "is_even": True}


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_environments_on_both_sides_of_a_native_one_keep_their_own_infos(backend):
    """One worker has them all, in several hosts."""
    env_fns: list[Any] = [SaysOne, lambda: VectorCounter((9,)), SaysTwo]
    with closing(Fleet(env_fns, backend=backend, num_workers=1)) as fleet:
        first = fleet.reset([ResetPlan(seed) for seed in range(3)]).each_info
        zeros = [facts.action_space.sample() for facts in fleet.facts]
        batch = zeros if fleet._batch_reader.is_mixed else np.array(zeros)
        assert [first[0], first[2]] == [{"one": 1.5}, {"two": 7}]
        second = fleet.step(batch).each_info
        assert [second[0], second[2]] == [{"one": 2.5}, {"two": 8, "is_even": True}]
