"""Law 1: for one seed every slot's stream is bit-equal everywhere, and equal to a plain loop."""

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.testing import (
    AnySpace,
    Counter,
    MixedInfo,
    NoisyStream,
    ReusingItsArray,
    TaskCounter,
    count_episodes,
    first_difference,
    fleet_driven,
    hand_driven,
)
from tests.conformance.matrix import BY_RAY, EVERY, FORK, MODES, PROCESSES, QUICK, SERIAL, THREAD
from tests.conformance.space_strategies import any_space

SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1, 1, (4,), np.float32),
    "image": spaces.Box(0, 255, (4, 8, 8), np.uint8),
    "scalar": spaces.Box(-np.inf, np.inf, (), np.float64),
    "discrete": spaces.Discrete(5, start=-2),
    "multi_discrete": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "text": spaces.Text(12, min_length=0, charset="aé中🚀"),
    "sequence": spaces.Sequence(spaces.Box(0, 1, (2,))),
    "stacked": spaces.Sequence(
        spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1, (2,))), stack=True
    ),
    "sequence_of_text": spaces.Sequence(spaces.Text(5)),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(4)),
    "one_of": spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1, (2,)), spaces.Text(6))),
}
SPACES["everything"] = spaces.Dict(
    {name: space for name, space in SPACES.items() if name != "everything"}
)
# beyond what a cell of shared memory holds, in some rows and not in others
SPACES["long_text"] = spaces.Text(25_000, min_length=0, charset="中🚀")
SPACES["long_sequence"] = spaces.Sequence(spaces.Box(0, 1, (2000,), np.float64))
SPACES["nested"] = spaces.Tuple(
    (
        spaces.Dict(a=spaces.Tuple((spaces.Text(5), spaces.Discrete(2))), b=SPACES["box"]),
        SPACES["sequence"],
    )
)


def assert_same(expected, got):
    difference = first_difference(expected, got)
    assert difference is None, str(difference)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_streams_do_not_depend_on_the_layout(backend, num_workers, mode):
    """Semantic 9: any number of workers, also uneven splits, over at least three episodes."""
    expected = hand_driven(NoisyStream, 5, 40, 7, mode)
    assert min(map(count_episodes, expected.slots)) >= 3
    got = fleet_driven(NoisyStream, 5, 40, 7, mode, backend=backend, num_workers=num_workers)
    assert_same(expected, got)


@pytest.mark.parametrize("where", PROCESSES)
def test_streams_do_not_depend_on_the_start_method(where):
    assert_same(
        hand_driven(NoisyStream, 5, 40, 7, "same_step"),
        fleet_driven(NoisyStream, 5, 40, 7, "same_step", **where),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("min_slots", [1, 2, 5])
@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_streams_do_not_depend_on_the_order_of_batches(where, min_slots, mode):
    assert_same(
        hand_driven(NoisyStream, 5, 40, 7, mode),
        fleet_driven(NoisyStream, 5, 40, 7, mode, min_slots=min_slots, **where),
    )


@pytest.mark.parametrize("where", [*EVERY, *BY_RAY])
def test_streams_of_registered_ids(where):
    assert_same(
        hand_driven("CartPole-v1", 3, 90, 0), fleet_driven("CartPole-v1", 3, 90, 0, **where)
    )


def test_streams_with_views():
    for mode in MODES:
        assert_same(
            hand_driven(NoisyStream, 3, 30, 0, mode),
            fleet_driven(NoisyStream, 3, 30, 0, mode, copy=False, **FORK),
        )


@pytest.mark.parametrize("env", [Counter, MixedInfo, TaskCounter, ReusingItsArray])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", QUICK)
def test_streams_of_probes(where, mode, env):
    assert_same(hand_driven(env, 3, 20, 5, mode), fleet_driven(env, 3, 20, 5, mode, **where))


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("where", QUICK)
def test_each_space_both_ways(where, name):
    """Semantic 6: values are decoded again in each step; actions arrive as they were sent."""
    env = functools.partial(AnySpace, SPACES[name], SPACES[name])
    for mode in ("next_step", "same_step"):
        assert_same(hand_driven(env, 3, 15, 1, mode), fleet_driven(env, 3, 15, 1, mode, **where))


@pytest.mark.parametrize("where", PROCESSES)
def test_each_space_under_each_start_method(where):
    env = functools.partial(AnySpace, SPACES["everything"], SPACES["nested"])
    assert_same(hand_driven(env, 3, 15, 1), fleet_driven(env, 3, 15, 1, **where))


LAYOUTS = st.tuples(st.integers(1, 5), st.integers(1, 5))


def check_any(space, action_space, layout, mode, min_slots, where):
    num_envs, num_workers = layout
    env = functools.partial(AnySpace, space, action_space)
    kwargs = {**where, "num_workers": min(num_workers, num_envs)}
    if where is SERIAL:
        del kwargs["num_workers"]
    if min_slots is not None:
        min_slots = min(min_slots, num_envs)
    assert_same(
        hand_driven(env, num_envs, 14, 3, mode),
        fleet_driven(env, num_envs, 14, 3, mode, min_slots=min_slots, **kwargs),
    )


@settings(max_examples=60)
@given(
    any_space(),
    any_space(),
    LAYOUTS,
    st.sampled_from(MODES),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([SERIAL, THREAD]),
)
def test_any_space_layout_and_mode(space, action_space, layout, mode, min_slots, where):
    check_any(space, action_space, layout, mode, min_slots, where)


@settings(max_examples=40)
@given(
    any_space(),
    any_space(),
    LAYOUTS,
    st.sampled_from(MODES),
    st.sampled_from([None, 1, 2]),
)
def test_any_space_layout_and_mode_in_processes(space, action_space, layout, mode, min_slots):
    check_any(space, action_space, layout, mode, min_slots, FORK)


def test_no_two_slots_share_a_stream():
    """Semantic 9: seeds are unique per slot."""
    streams = fleet_driven(NoisyStream, 6, 20, 0, **FORK)
    first = [tuple(slot[0].obs) for slot in streams.slots]
    assert len(set(first)) == 6


def test_a_slot_keeps_its_stream_in_a_larger_fleet():
    small = fleet_driven(NoisyStream, 2, 30, 0, **FORK)
    large = fleet_driven(NoisyStream, 5, 30, 0, **FORK)
    assert_same(small, type(large)(source="large", autoreset="next_step", slots=large.slots[:2]))
