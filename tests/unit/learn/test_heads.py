"""Heads: against torch's own distributions; every action space of the fleet can be acted in."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical, Independent, Normal

from envfleet import errors
from envfleet.learn.heads import Choices, Gaussian, Switches, make_head

ROWS = 4096


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(head, said, seed=0):
    return head.sample(said, head.noise((len(said),), generator(seed)))


def test_choices_equal_torch_s_categorical():
    head, said = Choices([3, 2], is_scalar=False), torch.randn(ROWS, 5, generator=generator())
    actions = draw(head, said, 1)
    parts = [Categorical(logits=part) for part in said.split([3, 2], -1)]
    expected = sum(part.log_prob(actions[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(head.log_prob(said, actions), expected)
    torch.testing.assert_close(head.entropy(said), sum(part.entropy() for part in parts))
    assert head.mode(said)[:, 0].tolist() == said[:, :3].argmax(-1).tolist()


def test_draws_follow_their_probabilities():
    said = torch.tensor([[0.1, 0.6, 0.3]]).log().expand(200_000, 3)
    drawn = draw(Choices([3], is_scalar=True), said)
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.6, 0.3]), atol=0.01, rtol=0)


def test_noise_of_many_choices_takes_the_room_of_itself_only():
    """It was three times that: half a gigabyte for 2,048 rows of 20,000 choices."""
    head = Choices([1000], is_scalar=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        noise = head.noise((100,), generator())
    taken = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert sum(one for one in taken if one > 0) <= 1.1 * noise.nbytes
    drawn = torch.rand((100, 1000), generator=generator())
    assert torch.equal(noise, -torch.log(-torch.log(drawn.clamp_min(1e-20))))


def test_what_is_masked_is_never_drawn_and_leaves_entropy_finite():
    head = Choices([3], is_scalar=True)
    said = head.masked(torch.zeros(ROWS, 3), torch.tensor([[True, False, True]]))
    drawn = draw(head, said)
    assert set(drawn.tolist()) == {0, 2}
    torch.testing.assert_close(head.entropy(said), torch.full((ROWS,), np.log(2.0).item()))


def test_switches_equal_torch_s_bernoulli():
    head, said = Switches(3), torch.randn(ROWS, 3, generator=generator())
    actions = draw(head, said, 1)
    expected = Independent(Bernoulli(logits=said), 1)
    torch.testing.assert_close(head.log_prob(said, actions), expected.log_prob(actions.float()))
    torch.testing.assert_close(head.entropy(said), expected.entropy())


def test_a_gaussian_equals_torch_s_normal():
    head, said = Gaussian((2,), -0.5), torch.randn(ROWS, 2, generator=generator())
    actions = draw(head, said, 1)
    expected = Independent(Normal(said, torch.full((2,), -0.5).exp()), 1)
    torch.testing.assert_close(head.log_prob(said, actions), expected.log_prob(actions))
    torch.testing.assert_close(head.entropy(said), expected.entropy())
    assert (actions - said).std().item() == pytest.approx(np.exp(-0.5), rel=0.03)


SPACES = [
    spaces.Discrete(3),
    spaces.MultiDiscrete([2, 4]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2, 2), np.float32),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_actions_lie_in_their_space(space):
    head = make_head(space, 0.0)
    said = torch.randn(16, head.size, generator=generator())
    for actions in (draw(head, said), head.mode(said)):
        assert actions.shape == (16, *head.shape)
        assert actions.dtype == head.dtype
        for action in actions.detach().numpy():
            fitting = np.clip(action, -1, 1) if isinstance(space, spaces.Box) else action
            assert space.contains(np.asarray(fitting, space.dtype))


@pytest.mark.parametrize("of_entropy", [0.0, 0.3])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_closed_form_of_the_gradient_is_what_autograd_finds(space, of_entropy):
    head = make_head(space, -0.4)
    said = torch.randn(32, head.size, generator=generator()).requires_grad_()
    actions, weights = draw(head, said).detach(), torch.randn(32, generator=generator(1))
    loss = (weights * head.log_prob(said, actions)).sum() + of_entropy * head.entropy(said).sum()
    expected = torch.autograd.grad(loss, [said, *head.parameters()])
    with torch.no_grad():
        pull, own = head.pull(said, actions, weights, of_entropy)
    for found, right in zip((pull, *own), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


def test_masks_are_for_choices():
    with pytest.raises(errors.ConfigError, match="Discrete and MultiDiscrete actions only"):
        Switches(2).masked(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))


def test_other_action_spaces_are_refused_by_name():
    with pytest.raises(errors.ConfigError, match="not in Text"):
        make_head(spaces.Text(5), 0.0)
