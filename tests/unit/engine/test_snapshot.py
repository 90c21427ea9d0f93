"""What is kept of an environment, and how two observations are held against each other."""

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import pytest

from envfleet.engine.snapshot import are_alike

NAN = float("nan")


@pytest.mark.parametrize(
    "value",
    [
        np.array([1.0, NAN]),
        np.float32(NAN),
        NAN,
        3,
        "text",
        None,
        {"a": np.zeros(2), "b": (1, [np.ones(1)])},
        np.array([[1], "x"], object).tolist(),
    ],
)
def test_an_observation_is_like_itself(value):
    assert are_alike(value, value)
    assert are_alike(value, deepcopy(value))


def test_bytes_between_the_fields_of_records_do_not_count():
    inner = np.dtype([("mask", "i1"), ("place", "f8")], align=True)
    outer = np.dtype([("flag", "?"), ("agents", inner, (2,))], align=True)
    one = np.zeros(3, outer)
    other = np.frombuffer(bytearray([7]) * one.nbytes, outer)  # a copy would leave them undefined
    for part in (other["agents"]["mask"], other["agents"]["place"], other["flag"]):
        part[...] = 0
    assert one.tobytes() != other.tobytes()
    assert are_alike(one, other)
    assert are_alike(one[0], other[0])
    other["agents"]["mask"][0, 1] = 1
    assert not are_alike(one[0], other[0])


@dataclass
class Uncertain:
    array: np.ndarray


def test_what_cannot_be_compared_is_not_held_against_anybody():
    assert are_alike([object()], [object()])
    assert are_alike(Uncertain(np.zeros(2)), Uncertain(np.zeros(2)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.array([1.0]), np.array([1.0 + 2**-52])),
        (1, 1.0),
        (NAN, 0.0),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        ((1, 2), (1,)),
        ([np.zeros(1)], [np.ones(1)]),
    ],
)
def test_other_observations_are_not_alike(one, other):
    assert not are_alike(one, other)
