"""What a checkpoint holds comes back as it was, and nothing in it can run."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envfleet.runs.plain_data import check_structure, decode, encode


def there_and_back(state):
    header, arrays, objects = encode(state)
    return decode(header, memoryview(b"".join(arrays)), objects=objects.__getitem__)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0)),
    lambda inner: st.lists(inner)
    | st.lists(inner).map(tuple)
    | st.dictionaries(st.text() | st.just("!") | st.integers(), inner),
    max_leaves=12,
)  # fmt: skip


def same(one, other):
    if isinstance(one, dict):
        assert type(other) is dict
        assert list(one) == list(other)
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        assert type(one) is type(other)
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        return one.tobytes() == other.tobytes()
    assert type(one) is type(other)
    return one == other or (math.isnan(one) and math.isnan(other))


@given(plain)
def test_plain_data_comes_back_and_needs_no_pickle(state):
    assert encode(state)[2] == []
    assert same(state, there_and_back(state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_come_back(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = there_and_back({"weights": tensor})["weights"]
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_scalars_and_records_of_numpy_come_back():
    record = np.zeros(2, [("obs", "<f4", (3,)), ("alive", "?")])
    record["obs"][1] = 7
    found = there_and_back({"scalar": np.float32(1.5), "record": record})
    assert (type(found["scalar"]), found["scalar"]) == (np.float32, 1.5)
    assert found["record"].dtype == record.dtype
    assert found["record"].tobytes() == record.tobytes()


def test_a_view_comes_back_as_what_it_shows():
    whole = np.arange(12).reshape(3, 4)
    assert there_and_back(whole[:, 1].T).tolist() == [1, 5, 9]
    tensor = torch.arange(12).reshape(3, 4)
    assert there_and_back(tensor.T)[1].tolist() == [1, 5, 9]


class Other:
    """Something that only a pickle can hold."""


def test_everything_else_is_an_object_in_its_place():
    one, two = Other(), np.array([Other()], object)
    header, arrays, objects = encode({"a": [one, 1], "b": two})
    assert objects[0] is one
    assert objects[1] is two
    data = memoryview(b"".join(arrays))
    found = decode(header, data, objects=lambda number: f"object {number}")
    assert found == {"a": ["object 0", 1], "b": "object 1"}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"tree": 1}',
        b'{"tree": {"!": "data", "at": 0}, "arrays": []}',
        b'{"tree": {"!": "data", "at": -1}, "arrays": [["array", "<f4", [1], 4]]}',
        b'{"tree": {"!": "code", "of": []}, "arrays": []}',
        b'{"tree": 1, "arrays": [["array", "|O", [1], 8]]}',
        b'{"tree": 1, "arrays": [["array", "<f4", [9], 4]]}',
        b'{"tree": 1, "arrays": [["array", "<f4", [1], 400]]}',
        b'{"tree": 1, "arrays": [["array", "<f4", [1], -4]]}',
        b'{"tree": 1, "arrays": [["tensor", "load", [1], 4]]}',
        b'{"tree": 1, "arrays": [["tensor", "float32", [9], 4]]}',
        b'{"tree": 1, "arrays": [["tensor", "float32", [-1, -1], 4]]}',
        b'{"tree": ' + b"[" * 100_000 + b"]" * 100_000 + b', "arrays": []}',
    ],
)
def test_what_was_not_encoded_here_is_an_error(header):
    with pytest.raises(Exception):  # noqa: B017, PT011 - any: the caller names the file
        decode(header, memoryview(bytes(4)), objects=lambda number: None)


EXPECTED = {
    "count": 3,
    "rate": 0.5,
    "is_on": True,
    "weights": torch.zeros(2, 3),
    "sums": np.zeros(4),
    "recent": [(0.0, 0)],
    "maybe": None,
}


def test_a_state_built_alike_passes():
    found = EXPECTED | {"count": 9, "rate": 1, "recent": [(1.0, 2)] * 3, "maybe": "anything"}
    check_structure(EXPECTED, found)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("count", "3"),
        ("count", 0.5),
        ("weights", None),
        ("count", True),
        ("is_on", 1),
        ("rate", [0.5]),
        ("weights", torch.zeros(3, 2)),
        ("weights", torch.zeros(2, 3, dtype=torch.float64)),
        ("weights", np.zeros((2, 3), np.float32)),
        ("sums", np.zeros(5)),
        ("sums", [0.0] * 4),
        ("recent", ((0.0, 0),)),
        ("recent", [(0.0,)]),
        ("recent", [(0.0, "0")]),
    ],
)
def test_the_first_place_that_differs_is_named(name, wrong):
    with pytest.raises(TypeError, match=rf"the state\['{name}'\]"):
        check_structure(EXPECTED, EXPECTED | {name: wrong})


def test_a_missing_and_an_unknown_field_are_named():
    less = {name: value for name, value in EXPECTED.items() if name != "sums"}
    with pytest.raises(TypeError, match="the state has"):
        check_structure(EXPECTED, less)
    with pytest.raises(TypeError, match="the state has"):
        check_structure(EXPECTED, EXPECTED | {"more": 1})
