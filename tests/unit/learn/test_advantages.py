"""Advantages: against a loop over one slot's rows, written from the definition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from envfleet.learn.advantages import advantages, explained_variance, successor_values


def by_definition(rewards, values, successors, ended, valid, weights, *, gamma, gae_lambda):
    """Sum over all later rows of the episode, row by row; the weights make it V-trace."""
    estimates = np.zeros(len(rewards))
    for start in range(len(rewards)):
        weight = 1.0
        for time in range(start, len(rewards)):
            weight *= weights[time]
            if valid[time]:
                surprise = rewards[time] + gamma * successors[time] - values[time]
                estimates[start] += weight * surprise
            if ended[time]:
                break
            weight *= gamma * gae_lambda
    return estimates


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_every_slot_is_the_sum_of_its_definition(times, slots, gamma, gae_lambda, seed):
    draw = np.random.default_rng(seed)
    rewards, values, successors = draw.normal(size=(3, times, slots)).astype(np.float32)
    valid = draw.random((times, slots)) < 0.8
    ended = ~valid | (draw.random((times, slots)) < 0.3)
    rows = (rewards, values, successors, ended, valid)
    found = advantages(*rows, gamma=gamma, gae_lambda=gae_lambda)
    drawn = draw.random((times, slots)).astype(np.float32)
    for weights in (np.ones_like(drawn), drawn):
        weighted = advantages(*rows, gamma=gamma, gae_lambda=gae_lambda, weights=weights)
        assert weighted.dtype == found.dtype == np.float32
        for slot in range(slots):
            columns = [row[:, slot] for row in (*rows, weights)]
            expected = by_definition(*columns, gamma=gamma, gae_lambda=gae_lambda)
            np.testing.assert_allclose(weighted[:, slot], expected, rtol=1e-4, atol=1e-4)
        if weights is not drawn:
            np.testing.assert_array_equal(weighted, found)


def test_successors_are_the_next_row_nothing_or_what_was_cut_off():
    values = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    terminated = np.array([[False], [True], [False], [False]])
    truncated = np.array([[False], [False], [True], [False]])
    finals = np.array([[70.0], [71.0], [72.0], [73.0]], np.float32)
    last = np.array([9.0], np.float32)
    found = successor_values(values, last, terminated, truncated, finals)
    assert found[:, 0].tolist() == [2.0, 0.0, 72.0, 9.0]


def test_an_end_that_is_both_is_a_termination():
    """Nothing comes after a terminal state, even if it is reached at the time limit."""
    one = np.ones((1, 1), np.float32)
    both = np.array([[True]])
    assert successor_values(one, one[0], both, both, one * 5).item() == 0.0


def test_explained_variance():
    observed = np.array([1.0, 2.0, 3.0], np.float32)
    assert explained_variance(observed, observed) == 1.0
    assert explained_variance(np.full(3, 2.0, np.float32), observed) == 0.0
    assert np.isnan(explained_variance(observed, np.ones(3, np.float32)))
