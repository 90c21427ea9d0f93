"""copy=True returns arrays that stay; copy=False returns views until the slot's next send."""

import functools

import numpy as np
import pytest

from envfleet.testing import (
    Counter,
    NoisyStream,
    Slow,
    first_difference,
    fleet_driven,
    hand_driven,
)
from tests.conformance.matrix import MODES, QUICK, opened

ZERO = np.zeros(3, dtype=np.int64)


@pytest.mark.parametrize("where", QUICK)
def test_7_returned_arrays_are_never_overwritten(where):
    """Semantic 7; Tianshou's issue 1281 is what happens otherwise."""
    kept = []
    with opened(Counter, 3, **where) as envs:
        kept.append(envs.reset(seed=0)[0])
        kept += [envs.step(ZERO) for _ in range(4)]
    assert kept[0][:, 0].tolist() == [0, 0, 0]
    for t, (obs, rewards, _, _, _) in enumerate(kept[1:], start=1):
        assert obs[:, 0].tolist() == [t, t, t]
        assert rewards.tolist() == [t, t, t]


@pytest.mark.parametrize("where", QUICK)
def test_7_the_caller_may_write_into_what_it_got(where):
    with opened(Counter, 3, **where) as envs:
        obs, _ = envs.reset(seed=0)
        obs[:] = 77
        obs, rewards, terminated, truncated, _ = envs.step(ZERO)
        obs[:], rewards[:], terminated[:], truncated[:] = 77, 77, True, True
        obs, rewards, terminated, truncated, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [2, 2, 2]
    assert rewards.tolist() == [2.0, 2.0, 2.0]
    assert not (terminated | truncated).any()


@pytest.mark.parametrize("where", QUICK)
def test_7_views_are_right_until_the_next_send(where):
    with opened(Counter, 3, copy=False, **where) as envs:
        obs, _ = envs.reset(seed=0)
        for t in range(1, 5):
            assert obs[:, 0].tolist() == [t - 1] * 3
            obs, _, _, _, _ = envs.step(ZERO)
            assert obs[:, 0].tolist() == [t] * 3


@pytest.mark.parametrize("where", QUICK)
def test_7_views_share_memory_and_cost_no_copy(where):
    with opened(Counter, 3, copy=False, **where) as envs:
        first, _ = envs.reset(seed=0)
        second, _, _, _, _ = envs.step(ZERO)
        assert np.shares_memory(first, second)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", QUICK)
def test_7_views_carry_the_same_streams(where, mode):
    expected = hand_driven(NoisyStream, 3, 25, 0, mode)
    got = fleet_driven(NoisyStream, 3, 25, 0, mode, copy=False, **where)
    assert first_difference(expected, got) is None


@pytest.mark.parametrize("where", QUICK)
def test_7_in_debug_a_view_kept_too_long_shows_junk(where, monkeypatch):
    monkeypatch.setenv("ENVFLEET_DEBUG", "1")
    with opened(functools.partial(Slow, step_s=0.2), 3, copy=False, **where) as envs:
        obs, _ = envs.reset(seed=0)
        envs.send(ZERO)
        assert not (obs[:, 0] == 0).any()
        assert not (obs[:, 0] == 1).any()
        assert envs.recv().obs[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", QUICK)
def test_7_a_view_that_outlives_the_fleet_can_still_be_read(where):
    """Its content is undefined, but reading it must not crash."""
    with opened(Counter, 3, copy=False, **where) as envs:
        obs, _ = envs.reset(seed=0)
    assert obs.shape == (3, 1)
    assert obs.sum() is not None
