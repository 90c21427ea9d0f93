"""The comparison of streams finds every difference, and only differences."""

import dataclasses
import functools
import random

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envfleet.testing import (
    AnySpace,
    Counter,
    GlobalRandom,
    IgnoresSeed,
    NoisyStream,
    ReusingItsArray,
    SharesState,
    count_episodes,
    first_difference,
    hand_driven,
    uses_global_random,
    vector_driven,
)
from envfleet.testing.values import canonical, digest, info_row, unbatch, value_difference
from tests.conformance.matrix import MODES


def changed(streams, slot, event, **fields):
    events = list(streams.slots[slot])
    events[event] = dataclasses.replace(events[event], **fields)
    slots = list(streams.slots)
    slots[slot] = tuple(events)
    return dataclasses.replace(streams, slots=tuple(slots), source="the changed run")


def difference_of(expected, got):
    difference = first_difference(expected, got)
    assert difference is not None
    return difference


def accusation_of(env):
    found = uses_global_random(env, 10)
    assert found is not None
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_run_equals_itself(mode):
    streams = hand_driven(NoisyStream, 2, 30, 0, mode)
    assert first_difference(streams, hand_driven(NoisyStream, 2, 30, 0, mode)) is None


def test_the_three_modes_see_the_same_events():
    by_mode = [hand_driven(NoisyStream, 2, 60, 3, mode) for mode in MODES]
    short = min(len(slot) for streams in by_mode for slot in streams.slots)
    for slot in range(2):
        seen = [
            [(event.kind, event.obs.tolist(), event.reward) for event in streams.slots[slot]]
            for streams in by_mode
        ]
        assert seen[0][:short] == seen[1][:short] == seen[2][:short]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"obs": np.array([9])}, "obs[0]"),
        ({"obs": np.array([3], dtype=np.int32)}, "obs.dtype"),
        ({"obs": np.array([3, 3])}, "obs.shape"),
        ({"reward": -0.0}, "reward"),
        ({"truncated": True}, "truncated"),
        ({"terminated": True}, "terminated"),
        ({"info": {"extra": 1}}, "info['extra']"),
    ],
)
def test_the_first_difference_is_named(fields, field):
    expected = hand_driven(Counter, 3, 12)
    got = changed(changed(expected, 0, 7, obs=np.array([99])), 1, 3, **fields)
    difference = difference_of(expected, got)
    assert (difference.slot, difference.step, difference.field) == (1, 3, field)
    assert "slot 1, step 3" in str(difference)
    assert field in str(difference)
    assert "the changed run" in str(difference)
    assert str(difference).endswith(".")


def test_a_negative_zero_is_another_number():
    assert value_difference(np.array([0.0]), np.array([-0.0])) is not None


def test_nan_equals_nan():
    assert value_difference(np.array([np.nan, 1]), np.array([np.nan, 1])) is None
    assert value_difference({"a": float("nan")}, {"a": float("nan")}, same_types=False) is None


def test_a_final_observation_is_called_so():
    expected = hand_driven(Counter, 1, 5, autoreset="same_step")
    got = changed(expected, 0, 5, obs=np.array([0]))
    assert difference_of(expected, got).field == "final_obs[0]"


def test_a_stream_that_stops_early_is_named():
    expected = hand_driven(Counter, 2, 6)
    got = dataclasses.replace(expected, slots=(expected.slots[0], expected.slots[1][:4]))
    difference = difference_of(expected, got)
    assert (difference.slot, difference.step, difference.field) == (1, 4, "events")


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (1, 1.0, True),
        (True, 1, True),
        (2**60 + 1, float(2**60), False),
        (np.float32(0.1), 0.1, False),
        (np.array([1, 2]), np.array([1.0, 2.0]), True),
        ([1, "a"], [1, "a"], True),
        ("a", "b", False),
        (None, None, True),
        (None, 0, False),
        ({"a": {"b": 1}}, {"a": {"b": 1}}, True),
        ({"a": {"b": 1}}, {"a": {}}, False),
    ],
)
def test_infos_are_compared_by_value(expected, got, same):
    assert (value_difference(expected, got, same_types=False) is None) is same


def test_info_row_follows_the_masks():
    infos = {
        "a": np.array([1, 0]),
        "_a": np.array([True, False]),
        "inner": {"b": np.array([0, 2]), "_b": np.array([False, True])},
        "_inner": np.array([True, True]),
    }
    assert value_difference(info_row(infos, 0), {"a": 1, "inner": {}}, same_types=False) is None
    assert value_difference(info_row(infos, 1), {"inner": {"b": 2}}, same_types=False) is None


def test_canonical_values_are_copies():
    space = spaces.Dict(a=spaces.Box(0, 9, (2,)), b=spaces.Sequence(spaces.Box(0, 9, (1,))))
    a, b = np.ones(2, np.float32), np.ones(1, np.float32)
    kept = canonical(space, {"a": a, "b": (b,)})
    a[:], b[:] = 5, 5
    assert kept["a"].tolist() == [1, 1]
    assert kept["b"][0].tolist() == [1]


def test_a_digest_depends_on_every_part():
    space = spaces.Dict(a=spaces.Text(4), b=spaces.Tuple((spaces.Discrete(4), spaces.Box(0, 1))))
    space.seed(0)
    values = [canonical(space, space.sample()) for _ in range(50)]
    assert len({digest(value) for value in values}) == 50
    assert digest(values[0]) == digest(values[0])


def test_unbatch_does_not_cast():
    assert unbatch(spaces.Box(0, 1, (2,), np.float32), np.zeros((3, 2)), 1).dtype == np.float64


# ---------------------------------------------------------------------- against Gymnasium itself


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    "env",
    [
        Counter,
        NoisyStream,
        functools.partial(AnySpace, spaces.Dict(a=spaces.Text(4), b=spaces.MultiBinary(3))),
        functools.partial(gymnasium.make, "CartPole-v1"),
    ],
    ids=["Counter", "NoisyStream", "AnySpace", "CartPole"],
)
def test_gymnasium_sync_agrees_with_the_hand_driven_loop(env, mode):
    envs = SyncVectorEnv([env] * 2, autoreset_mode=mode)
    expected = hand_driven(env, 2, 60, 0, mode)
    difference = first_difference(expected, vector_driven(envs, 60, 0, mode))
    envs.close()
    assert difference is None, str(difference)


def test_gymnasium_sync_loses_the_last_observation_of_a_reused_array():
    """[V] The kit must find this defect."""
    envs = SyncVectorEnv([ReusingItsArray] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    expected = hand_driven(ReusingItsArray, 2, 12, 0, "same_step")
    difference = difference_of(expected, vector_driven(envs, 12, 0, "same_step"))
    envs.close()
    assert (difference.slot, difference.step, difference.field) == (0, 5, "final_obs[0]")
    assert difference.expected == 5


# ---------------------------------------------------------------------- global random state


@pytest.mark.parametrize("reseeds", [False, True])
@pytest.mark.parametrize(("source", "name"), [("numpy", "np.random"), ("python", "random.*")])
def test_use_of_global_random_state_is_found(source, name, reseeds):
    found = accusation_of(functools.partial(GlobalRandom, source, reseeds))
    assert name in found
    assert "reset" in found


class DrawsInStepOnly(Counter):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward + np.random.random(), terminated, truncated, info


class DrawsInConstructor(Counter):
    def __init__(self):
        super().__init__()
        random.random()


class CopiesTheState(Counter):
    """Draws nothing, but depends on the global state."""

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"luck": int(np.random.get_state(legacy=False)["state"]["key"][5])}


@pytest.mark.parametrize(
    ("env", "where"),
    [
        (DrawsInStepOnly, "step, first seen at step 1"),
        (DrawsInConstructor, "constructor"),
        (CopiesTheState, "info['luck']"),
    ],
)
def test_the_place_of_the_draw_is_named(env, where):
    assert where in accusation_of(env)


@pytest.mark.parametrize("env", [Counter, NoisyStream, IgnoresSeed, SharesState, "CartPole-v1"])
def test_who_leaves_global_random_state_alone_is_not_accused(env):
    assert uses_global_random(env, 20) is None


def test_the_global_random_states_are_left_as_they_were():
    np.random.seed(5)
    random.seed(5)
    before = np.random.get_state(), random.getstate()
    uses_global_random(GlobalRandom, 10)
    assert value_difference(before, (np.random.get_state(), random.getstate())) is None


def test_episodes_are_counted():
    assert [count_episodes(slot) for slot in hand_driven(Counter, 2, 12).slots] == [2, 2]
