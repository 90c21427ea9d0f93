"""The closed form of PPO's gradient: what autograd finds, for every head and option."""

import dataclasses
from copy import deepcopy

import numpy as np
import pytest
import torch
from gymnasium import spaces

from envfleet.learn.fast.gradients import closed_form
from envfleet.learn.fast.optimiser import FlatAdam
from envfleet.learn.loss import LossWeights, TrainingRows, by_autograd
from envfleet.learn.networks import ActorCritic, Features

OBSERVED = spaces.Box(-1, 1, (5,), np.float32)
ACTIONS = [
    spaces.Discrete(3),
    spaces.MultiDiscrete([2, 4]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2,), np.float32),
]


def rows_of(policy, count, *, has_masks=False):
    """Rows that a policy somewhat different from this one might have collected."""
    draw = torch.Generator().manual_seed(0)
    leaves = (torch.randn(count, 5, generator=draw),)
    allowed = None
    if has_masks:
        allowed = torch.rand((count, policy.head.size), generator=draw) < 0.7
        allowed[:, 0] = allowed[:, -1] = True  # of each part one
    with torch.no_grad():
        said, values = policy.judge(Features(leaves[0], leaves[0]), allowed)
        actions = policy.head.sample(said, policy.head.noise((count,), draw))
        log_probs = policy.head.log_prob(said, actions)
    blur = torch.randn((4, count), generator=draw)
    return TrainingRows(
        leaves, actions, allowed, log_probs + 0.3 * blur[0], values + blur[1], blur[2], blur[3]
    )


@pytest.mark.parametrize("action_space", ACTIONS, ids=str)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("clips_values", [False, True])
@pytest.mark.parametrize("entropy", [0.0, 0.05])
@pytest.mark.parametrize("count", [1, 64])
def test_both_ways_find_the_same(action_space, activation, clips_values, entropy, count):
    torch.manual_seed(1)
    policy = ActorCritic(OBSERVED, action_space, hidden=(16, 8), activation=activation)
    weights = LossWeights(clip=0.2, value=0.5, entropy=entropy, clips_values=clips_values)
    assert_same(policy, rows_of(policy, count), weights)


def test_masked_choices_too():
    policy = ActorCritic(OBSERVED, spaces.MultiDiscrete([3, 2]), hidden=(8,))
    weights = LossWeights(clip=0.2, value=0.5, entropy=0.1, clips_values=False)
    assert_same(policy, rows_of(policy, 64, has_masks=True), weights)


def assert_same(policy, rows, weights):
    parameters = list(policy.parameters())
    expected = by_autograd(policy, parameters, Features(*rows.leaves * 2), rows, weights)
    found = closed_form(policy, rows, weights)
    assert len(found.gradients) == len(expected.gradients) == len(parameters)
    assert len(rows) == 1 or any(one.abs().max() > 1e-3 for one in expected.gradients)
    for mine, right in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(mine.view_as(right), right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        found.figures(policy, weights.clip), expected.figures(policy, weights.clip)
    )


@pytest.mark.parametrize(("direction", "pulls"), [(1.0, False), (-1.0, True)])
def test_rows_that_have_moved_far_enough_for_their_good_pull_nowhere(direction, pulls):
    policy = ActorCritic(OBSERVED, spaces.Discrete(2), hidden=())
    rows = rows_of(policy, 8)
    with torch.no_grad():
        now = policy.head.log_prob(policy.judge(Features(*rows.leaves * 2), None)[0], rows.actions)
    gain = rows.advantages - rows.advantages.mean()
    moved = dataclasses.replace(rows, log_probs=now - direction * gain.sign())
    weights = LossWeights(clip=0.2, value=0.0, entropy=0.0, clips_values=False)
    found = closed_form(policy, moved, weights)
    assert any(gradient.abs().max() > 0 for gradient in found.gradients) == pulls


class TestFlatAdam:
    def test_it_does_what_torch_s_own_does(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)]
        mine, theirs = torch.nn.Sequential(*layers), torch.nn.Sequential(*deepcopy(layers))
        flat = FlatAdam(mine)
        adam = torch.optim.Adam(theirs.parameters(), lr=0.01, eps=1e-5)
        for _ in range(20):
            gradients = [10 * torch.randn_like(one) for one in theirs.parameters()]
            for one, gradient in zip(theirs.parameters(), gradients, strict=True):
                one.grad = gradient.clone()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            adam.step()
            flat.step(gradients, rate=0.01, max_norm=0.5)
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    def test_its_state_is_all_it_goes_on_from(self):
        torch.manual_seed(0)
        network = torch.nn.Linear(3, 2)
        adam = FlatAdam(network)
        gradients = [[torch.randn_like(one) for one in network.parameters()] for _ in range(6)]
        for some in gradients[:3]:
            adam.step(some, rate=0.1, max_norm=1.0)
        kept, weights = adam.state(), {k: v.clone() for k, v in network.state_dict().items()}
        for some in gradients[3:]:
            adam.step(some, rate=0.1, max_norm=1.0)
        expected = network.weight.detach().clone()
        again = torch.nn.Linear(3, 2)
        successor = FlatAdam(again)
        again.load_state_dict(weights)
        successor.load(kept)
        for some in gradients[3:]:
            successor.step(some, rate=0.1, max_norm=1.0)
        assert torch.equal(again.weight, expected)
