"""Stretches: every row once, in its episode, behind the state it really had."""

import numpy as np
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from envfleet.learn.networks import ActorCritic
from envfleet.learn.sequences import stretches


def drawn_ends(times, slots, seed):
    return np.random.default_rng(seed).random((times, slots)) < 0.3


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_every_row_of_the_chosen_slots_stands_in_it_once(times, slots, seed):
    ended = drawn_ends(times, slots, seed)
    chosen = np.random.default_rng(seed).permutation(slots)[: max(1, slots // 2)]
    cut = stretches(ended, chosen)
    expected = {time * slots + slot for time in range(times) for slot in chosen.tolist()}
    assert sorted(cut.order.tolist()) == sorted(expected)
    for group in cut.groups:
        for column in range(len(group.slots)):
            rows = group.rows[group.is_there[:, column], column]
            times_of, slots_of = np.divmod(rows, slots)
            assert set(slots_of.tolist()) == {group.slots[column]}
            assert (np.diff(times_of) == 1).all()
            assert not ended[times_of[:-1], slots_of[:-1]].any()
            assert group.goes_on[column] == (times_of[0] == 0)


@given(st.integers(1, 200), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_no_more_than_half_of_the_cells_are_padding(times, slots, seed):
    """Slots whose episodes take one step beside some whose episodes never end."""
    rng = np.random.default_rng(seed)
    ended = rng.random((times, slots)) < rng.choice([0, 0.02, 0.5, 1], slots)
    groups = stretches(ended).groups
    assert sum(group.rows.size for group in groups) <= 2 * ended.size
    assert sum(len(group.rows) for group in groups) <= 2 * max(len(group.rows) for group in groups)


def test_one_long_episode_does_not_make_all_others_as_long():
    ended = np.ones((512, 8), np.bool_)
    ended[::2] = False
    ended[:, 0] = False
    assert [group.rows.shape for group in stretches(ended).groups] == [(512, 1), (2, 7 * 256)]


def test_episodes_of_like_lengths_are_gone_through_together():
    ended = np.zeros((64, 4), np.bool_)
    ended[[15, 40], [0, 1]] = True
    (group,) = stretches(ended).groups
    assert group.slots.tolist() == [0, 0, 1, 1, 2, 3]


KINDS = st.sampled_from(["lstm", "gru"])


@given(st.integers(1, 20), st.integers(1, 4), KINDS, st.integers(0, 2**32 - 1))
def test_unrolling_a_rollout_gives_what_stepping_gave(times, slots, kind, seed):
    """One step after another, with the state emptied at ends, as it is collected."""
    torch.manual_seed(seed % 1000)
    space = spaces.Box(-1, 1, (3,), np.float32)
    policy = ActorCritic(space, spaces.Discrete(2), memory=kind, memory_size=4)
    ended = drawn_ends(times, slots, seed)
    obs = torch.randn(times, slots, 3)
    first = states = torch.randn(slots, policy.state_size)
    stepped = []
    with torch.no_grad():
        for time in range(times):
            features, states = policy.features((obs[time],), states)
            stepped.append(torch.cat(features, -1))
            states = states * torch.from_numpy(~ended[time])[:, None]
        cut = stretches(ended)
        unrolled = torch.cat(policy.unroll((obs.reshape(-1, 3)[cut.order],), cut, first), -1)
    expected = torch.cat(stepped)[cut.order]
    torch.testing.assert_close(unrolled, expected, rtol=1e-4, atol=1e-5)
