"""Replayed windows against the rollouts they were cut from."""

import numpy as np
import pytest

from envfleet.errors import CheckpointError, ConfigError
from envfleet.meta.buffers import FILE_NAME, ReplayBuffer, Rollout

OBS_DIM, ACTION_DIM = 2, 3


def rollout(number, length):
    """Every value names its rollout and its step."""
    steps = np.arange(length + 1, dtype=np.float32)
    obs = np.stack([np.full(length + 1, number), steps], 1)
    actions = np.stack([np.full(length, number), steps[:-1], np.ones(length)], 1)
    return Rollout(obs, actions, 1000 * number + steps[:-1], np.arange(length) == length - 1)


def filled(lengths, **options):
    buffer = ReplayBuffer(options.pop("max_steps", 100), OBS_DIM, ACTION_DIM, **options)
    for number, length in enumerate(lengths):
        buffer.add_rollout(rollout(number, length))
    return buffer


def rng(seed=0):
    return np.random.default_rng(seed)


def places(windows):
    """Number of the rollout and of its first step, of each window."""
    return list(
        zip(windows.obs[0, :, 0].astype(int), windows.obs[0, :, 1].astype(int), strict=True)
    )


@pytest.mark.parametrize("max_steps", [100, 23], ids=["roomy", "wrapped"])
@pytest.mark.parametrize("window", [1, 4, 50])
def test_windows_are_stretches_of_one_rollout_and_masked_after_its_end(window, max_steps):
    lengths = [5, 9, 3, 7, 4, 6]
    windows = filled(lengths, window=window, max_steps=max_steps).sample(300, rng())
    kept = range(6) if max_steps == 100 else range(2, 6)
    assert {number for number, _ in places(windows)} == set(kept)
    for column, (number, start) in enumerate(places(windows)):
        whole = rollout(number, lengths[number])
        count = min(window, len(whole) - start)
        assert windows.mask[:, column].tolist() == [1] * count + [0] * (len(windows.mask) - count)
        stretch = slice(start, start + count)
        np.testing.assert_array_equal(
            windows.obs[: count + 1, column], whole.obs[start : start + count + 1]
        )
        np.testing.assert_array_equal(windows.actions[:count, column], whole.actions[stretch])
        np.testing.assert_array_equal(windows.rewards[:count, column], whole.rewards[stretch])
        np.testing.assert_array_equal(windows.terms[:count, column], whole.terms[stretch])
    assert np.isfinite(windows.obs).all()
    assert {array.dtype for array in (windows.obs, windows.actions, windows.mask)} == {
        np.dtype(np.float32)
    }


def test_windows_start_only_where_they_fit_or_at_the_first_step():
    windows = filled([10, 3], window=4).sample(2000, rng())
    starts = {number: {at for n, at in places(windows) if n == number} for number in (0, 1)}
    assert starts == {0: set(range(7)), 1: {0}}


@pytest.mark.parametrize(("baseline", "share"), [(0.0, 7 / 8), (6.0, 13 / 20), (1e6, 0.5)])
def test_the_baseline_makes_rollouts_of_all_lengths_as_likely(baseline, share):
    windows = filled([10, 3], window=4, weight_baseline=baseline).sample(20_000, rng())
    found = np.mean([number == 0 for number, _ in places(windows)])
    assert found == pytest.approx(share, abs=0.015)  # four deviations


def test_single_steps_are_as_likely_as_each_other():
    windows = filled([2, 8]).sample(20_000, rng())
    assert windows.obs.shape == (2, 20_000, OBS_DIM)
    counts = np.unique(places(windows), axis=0, return_counts=True)[1]
    np.testing.assert_allclose(counts / 20_000, 0.1, atol=0.01)


def test_steps_that_are_masked_everywhere_are_left_out():
    assert filled([3, 5], window=50).sample(64, rng()).mask.shape == (5, 64)


def test_discrete_actions_are_kept_as_their_numbers():
    buffer = ReplayBuffer(10, OBS_DIM, window=3)
    buffer.add_rollout(
        Rollout(np.zeros((4, OBS_DIM)), np.array([4, 0, 2]), np.zeros(3), np.zeros(3))
    )
    assert buffer.sample(1, rng()).actions[:, 0].tolist() == [[4], [0], [2]]


def test_the_oldest_rollouts_make_room():
    buffer = filled([40, 40, 20, 30], max_steps=100)
    assert (len(buffer), buffer.num_steps, buffer.num_added) == (3, 90, 4)


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_loaded_goes_on_like_what_was_saved(tmp_path, times):
    """Also after rollouts were dropped, and after some that were never written."""
    one = ReplayBuffer(30, OBS_DIM, ACTION_DIM, window=4)
    for number in range(7 * times):
        one.add_rollout(rollout(number, 3 + number % 6))
        if number % 5 == 0:
            state = one.save(tmp_path)
    state = one.save(tmp_path)
    other = ReplayBuffer(30, OBS_DIM, ACTION_DIM, window=4)
    other.load(tmp_path, state)
    for buffer in (one, other):
        for number in range(2):
            buffer.add_rollout(rollout(100 + number, 7))
    assert len(one) == len(other)
    for mine, yours in zip(
        _arrays(one.sample(50, rng())), _arrays(other.sample(50, rng())), strict=True
    ):
        np.testing.assert_array_equal(mine, yours)
    again = ReplayBuffer(30, OBS_DIM, ACTION_DIM, window=4)
    again.load(tmp_path, other.save(tmp_path))
    assert again.num_added == one.num_added


def _arrays(windows):
    return windows.obs, windows.actions, windows.rewards, windows.terms, windows.mask


def test_saving_writes_only_what_is_new(tmp_path):
    buffer, path = filled([10] * 8), tmp_path / FILE_NAME
    buffer.save(tmp_path)
    before = path.read_bytes()
    buffer.save(tmp_path)
    assert path.read_bytes() == before
    buffer.add_rollout(rollout(9, 10))
    buffer.save(tmp_path)
    assert len(path.read_bytes()) * 8 == len(before) * 9
    assert path.read_bytes().startswith(before)


def test_a_damaged_file_is_an_error(tmp_path):
    state = filled([10]).save(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        filled([]).load(tmp_path, state)


def test_a_buffer_of_another_shape_cannot_be_loaded(tmp_path):
    state = filled([10]).save(tmp_path)
    for buffer in (
        ReplayBuffer(100, OBS_DIM + 1, ACTION_DIM),
        ReplayBuffer(9, OBS_DIM, ACTION_DIM),
    ):
        with pytest.raises(CheckpointError, match="another shape, or more than fit"):
            buffer.load(tmp_path, state)


def test_rollouts_that_do_not_fit_are_errors():
    buffer = filled([], max_steps=5)
    with pytest.raises(ConfigError, match="6 steps does not fit into a buffer of 5; raise"):
        buffer.add_rollout(rollout(0, 6))
    short = rollout(0, 3)
    with pytest.raises(ConfigError, match=r"has obs \(4, 2\), got \(3, 2\)"):
        buffer.add_rollout(Rollout(short.obs[1:], short.actions, short.rewards, short.terms))
    with pytest.raises(ConfigError, match="nothing to sample"):
        buffer.sample(1, rng())
