"""Heads: against torch's own distributions; every action space of the fleet can be acted in."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical, Independent, Normal

from envfleet import errors
from envfleet.learn.networks import ActorCritic, Choices, Gaussian, Switches, make_head

ROWS = 4096


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_choices_equal_torch_s_categorical():
    head, said = Choices([3, 2], is_scalar=False), torch.randn(ROWS, 5, generator=generator())
    actions = head.sample(said, generator(1))
    parts = [Categorical(logits=part) for part in said.split([3, 2], -1)]
    expected = sum(part.log_prob(actions[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(head.log_prob(said, actions), expected)
    torch.testing.assert_close(head.entropy(said), sum(part.entropy() for part in parts))
    assert head.mode(said)[:, 0].tolist() == said[:, :3].argmax(-1).tolist()


def test_draws_follow_their_probabilities():
    said = torch.tensor([[0.1, 0.6, 0.3]]).log().expand(200_000, 3)
    drawn = Choices([3], is_scalar=True).sample(said, generator())
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.6, 0.3]), atol=0.01, rtol=0)


def test_what_is_masked_is_never_drawn_and_leaves_entropy_finite():
    said = torch.tensor([[0.0, -torch.inf, 0.0]]).expand(ROWS, 3)
    head = Choices([3], is_scalar=True)
    drawn = head.sample(said, generator())
    assert set(drawn.tolist()) == {0, 2}
    torch.testing.assert_close(head.entropy(said), torch.full((ROWS,), np.log(2.0).item()))


def test_switches_equal_torch_s_bernoulli():
    head, said = Switches(3), torch.randn(ROWS, 3, generator=generator())
    actions = head.sample(said, generator(1))
    expected = Independent(Bernoulli(logits=said), 1)
    torch.testing.assert_close(head.log_prob(said, actions), expected.log_prob(actions.float()))
    torch.testing.assert_close(head.entropy(said), expected.entropy())


def test_a_gaussian_equals_torch_s_normal():
    head, said = Gaussian((2,), -0.5), torch.randn(ROWS, 2, generator=generator())
    actions = head.sample(said, generator(1))
    expected = Independent(Normal(said, torch.full((2,), -0.5).exp()), 1)
    torch.testing.assert_close(head.log_prob(said, actions), expected.log_prob(actions))
    torch.testing.assert_close(head.entropy(said), expected.entropy())
    assert (actions - said).std().item() == pytest.approx(np.exp(-0.5), rel=0.03)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 4]),
        spaces.MultiBinary(3),
        spaces.Box(-1, 1, (2, 2), np.float32),
    ],
    ids=str,
)
def test_actions_lie_in_their_space(space):
    policy = ActorCritic(spaces.Box(-1, 1, (4,), np.float32), space)
    obs = torch.randn(16, 4, generator=generator())
    with torch.no_grad():
        actions, log_probs, values = policy.act(obs, generator())
        judged, entropies, again = policy.judge(obs, actions)
        decided = policy.decide(obs)
    assert len(actions) == len(log_probs) == len(values) == len(entropies) == 16
    torch.testing.assert_close(log_probs, judged)
    torch.testing.assert_close(values, again)
    for action in (*actions.numpy(), *decided.numpy()):
        fitting = np.clip(action, -1, 1) if isinstance(space, spaces.Box) else action
        assert space.contains(np.asarray(fitting, space.dtype))


def test_other_action_spaces_are_refused_by_name():
    with pytest.raises(errors.ConfigError, match="not in Text"):
        make_head(spaces.Text(5), 0.0)
