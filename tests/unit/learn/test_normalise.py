"""Running statistics: against numpy on everything at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.learn.normalise import Moments, ObservationNormaliser, RewardScaler


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_moments_of_parts_are_those_of_the_whole(sizes, seed):
    draw = np.random.default_rng(seed)
    parts = [draw.normal(3.0, 2.0, (size, 2)) for size in sizes]
    moments = Moments((2,))
    for part in parts:
        moments.update(part)
    whole = np.concatenate(parts)
    assert moments.count == len(whole)
    if len(whole):
        np.testing.assert_allclose(moments.mean, whole.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(moments.var, whole.var(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(1, 3), (16, 17), (5,), (4, 2, 3), (3000, 2)])
def test_moments_of_one_batch_are_numpy_s_bit_for_bit(shape, dtype):
    batch = (np.random.default_rng(1).normal(size=shape) * 50).astype(dtype)
    moments = Moments(shape[1:])
    moments.update(batch)
    assert np.array_equal(moments.mean, batch.mean(0, np.float64))
    assert np.array_equal(moments.var, batch.var(0, np.float64))


def test_observations_are_normalised_and_cut_off():
    normalise = ObservationNormaliser((1,), clip=2.0)
    normalise.update(np.array([[0.0], [2.0]]))
    found = normalise(np.array([[1.0], [2.0], [100.0]]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[:, 0], [0.0, 1.0, 2.0], atol=1e-6)


def test_looking_does_not_change_the_statistics():
    normalise = ObservationNormaliser((1,))
    normalise.update(np.array([[0.0], [2.0]]))
    before = normalise.state()
    normalise(np.array([[50.0]]))
    assert normalise.state()["mean"] == before["mean"]


def test_rewards_are_scaled_by_the_deviation_of_returns():
    scale = RewardScaler(1, gamma=0.5)
    rewards, returns, running = [1.0, 2.0, -1.0, 4.0], [], 0.0
    for reward in rewards:
        running = running * 0.5 + reward
        returns.append(running)
        found = scale(np.array([reward]), np.array([False]), np.array([True]))
    assert found[0] == pytest.approx(4.0 / np.std(returns), rel=1e-5)


def test_a_return_begins_anew_after_an_end_and_a_lost_row_teaches_nothing():
    scale = RewardScaler(1, gamma=1.0)
    yes, no = np.array([True]), np.array([False])
    scale(np.array([1.0]), yes, yes)
    scale(np.array([3.0]), no, yes)
    assert scale.moments.mean == 2.0
    scale(np.array([0.0]), yes, no)
    assert scale.moments.count == 2


def test_a_checkpoint_goes_on_bit_for_bit():
    draw = np.random.default_rng(0)
    first, second = RewardScaler(3, 0.9), RewardScaler(3, 0.9)
    for _ in range(5):
        first(draw.normal(size=3), draw.random(3) < 0.3, np.ones(3, bool))
    second.load(first.state())
    for _ in range(5):
        row = draw.normal(size=3), draw.random(3) < 0.3, np.ones(3, bool)
        assert first(*row).tobytes() == second(*row).tobytes()
