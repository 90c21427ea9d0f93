"""Acting in C draws what PyTorch draws, and refuses what does not fit."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import envfleet
from envfleet.learn.fast import acting
from envfleet.learn.fast.acting import QuickActor
from envfleet.learn.networks import ActorCritic
from envfleet.learn.options import PPOOptions
from envfleet.learn.ppo import PPOTrainer

compiled = pytest.mark.skipif(acting._act is None, reason="there is no quick actor without C")


def policy_for(obs_shape, action_space, hidden, activation):
    torch.manual_seed(len(hidden) + obs_shape[0])
    return ActorCritic(
        spaces.Box(-1, 1, obs_shape),
        action_space,
        hidden=hidden,
        activation=activation,
        log_std=-0.5,
        is_orthogonal=False,
        memory=None,
        memory_size=8,
    )


@compiled
@given(
    obs_shape=st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple),
    action_space=st.sampled_from(
        [
            spaces.Discrete(2),
            spaces.Discrete(7, start=3),
            spaces.Box(-1, 1, (1,)),
            spaces.Box(-2, 2, (2, 3)),
        ]
    ),
    hidden=st.lists(st.integers(1, 40), max_size=3),
    activation=st.sampled_from(["tanh", "relu"]),
    slots=st.integers(1, 19),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1e6]),
)
@settings(max_examples=200, deadline=None)
@torch.inference_mode()
def test_it_draws_what_pytorch_draws(obs_shape, action_space, hidden, activation, slots, scale):
    policy = policy_for(obs_shape, action_space, hidden, activation)
    assert QuickActor.can_be(policy)
    head, times = policy.head, 2
    noise = head.noise((times, slots), torch.Generator().manual_seed(0))
    obs = np.random.default_rng(0).normal(scale=scale, size=(times + 1, slots, *obs_shape))
    obs = obs.astype(np.float32)
    actions = torch.zeros((times, slots, *head.shape), dtype=head.dtype)
    middle = slots // 2
    quick = QuickActor(policy, obs, noise, actions, [slice(0, middle), slice(middle, slots)])
    for step in range(times):
        for part in range(2):
            quick.act(step, part)
    for step in range(times):
        said, _ = policy.respond(
            (torch.from_numpy(obs[step]),), torch.zeros((slots, 0)), allowed=None
        )
        if head.dtype is torch.float32:
            expected = head.sample(said, noise[step])
            assert torch.allclose(actions[step], expected, rtol=1e-4, atol=1e-5 * max(1, scale))
        else:  # the best, or as good as it
            worth = said + noise[step]
            chosen = worth.gather(1, actions[step][:, None])[:, 0]
            assert torch.all(worth.max(1).values - chosen <= 1e-5 * max(1, scale))


@compiled
@torch.inference_mode()
def test_what_is_no_number_stays_none():
    policy = policy_for((1,), spaces.Box(-1, 1, (1,)), (4,), "tanh")
    obs = np.array([[[np.nan], [np.inf], [-np.inf], [0.0]]], np.float32)
    actions = torch.zeros((1, 4, 1))
    QuickActor(policy, obs, torch.zeros((1, 4, 1)), actions).act(0)
    assert torch.isfinite(actions[0, :, 0]).tolist() == [False, True, True, True]
    expected = policy.respond((torch.from_numpy(obs[0]),), torch.zeros((4, 0)), allowed=None)[0]
    assert torch.allclose(actions[0], expected, equal_nan=True, atol=1e-5)


NUMBERS, CHOICE = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)


@compiled
@pytest.mark.parametrize(
    ("space", "actions", "memory"),
    [
        pytest.param(NUMBERS, CHOICE, "lstm", id="memory"),
        pytest.param(NUMBERS, spaces.MultiDiscrete([2, 3]), None, id="several choices"),
        pytest.param(NUMBERS, spaces.MultiBinary(3), None, id="switches"),
        pytest.param(spaces.Discrete(5), CHOICE, None, id="choices to observe"),
        pytest.param(spaces.Dict(a=NUMBERS, b=CHOICE), CHOICE, None, id="several leaves"),
    ],
)
def test_what_it_leaves_to_pytorch(space, actions, memory):
    policy = ActorCritic(
        space,
        actions,
        hidden=(4,),
        activation="tanh",
        log_std=0.0,
        is_orthogonal=False,
        memory=memory,
        memory_size=4,
    )
    assert not QuickActor.can_be(policy)


@compiled
@pytest.mark.parametrize(
    "change",
    [
        {"obs": np.zeros((3, 5), np.float32)},
        {"obs": np.zeros((2, 4), np.float32)},
        {"obs": np.zeros((3, 4))},
        {"obs": np.zeros((4, 3), np.float32).T},
        {"noise": np.zeros((3, 3), np.float32)},
        {"noise": np.zeros((2, 2), np.float32)},
        {"actions": np.zeros(3, np.int32)},
        {"actions": np.zeros(4, np.int64)},
        {"actions": np.zeros((3, 2), np.float32)},
        {"deviations": np.zeros(2, np.float32)},
        {"deviations": 1.0},
        {"layers": ()},
        {"layers": (np.zeros((2, 4), np.float32), np.zeros(3, np.float32))},
        {"layers": (np.zeros((2, 4)), np.zeros(2, np.float32))},
        {"layers": (1, 2)},
        {"layers": (np.zeros((2, 4), np.float32), np.zeros(2, np.float32), np.zeros(1))},
        {"layers": [np.zeros((2, 4), np.float32), np.zeros(2, np.float32)]},
    ],
)
def test_what_does_not_fit_is_refused(change):
    given: dict[str, Any] = {
        "layers": (np.ones((2, 4), np.float32), np.zeros(2, np.float32)),
        "is_tanh": True,
        "obs": np.zeros((3, 4), np.float32),
        "noise": np.array([[0, 1], [1, 0], [0, 1]], np.float32),
        "deviations": None,
        "actions": np.zeros(3, np.int64),
        "bounds": None,
    }
    assert acting._act is not None
    acting._act(*given.values())
    assert given["actions"].tolist() == [1, 0, 1]
    with pytest.raises((TypeError, ValueError)):
        acting._act(*{**given, **change}.values())


@compiled
@pytest.mark.parametrize(
    "bounds",
    [
        (np.zeros(1, np.float32), np.ones(2, np.float32), np.zeros((3, 2), np.float32)),
        (np.zeros(2, np.float32), np.ones(3, np.float32), np.zeros((3, 2), np.float32)),
        (np.zeros(2), np.ones(2, np.float32), np.zeros((3, 2), np.float32)),
        (np.zeros(2, np.float32), np.ones(2, np.float32), np.zeros((2, 2), np.float32)),
        (np.zeros(2, np.float32), np.ones(2, np.float32), np.zeros((3, 2))),
        (np.zeros(2, np.float32), np.ones(2, np.float32)),
        (0.0, 1.0, np.zeros((3, 2), np.float32)),
        1.0,
    ],
)
def test_bounds_that_do_not_fit_are_refused(bounds):
    layers = (np.ones((2, 4), np.float32), np.zeros(2, np.float32))
    obs, noise = np.zeros((3, 4), np.float32), np.zeros((3, 2), np.float32)
    deviations, actions = np.ones(2, np.float32), np.zeros((3, 2), np.float32)
    act: Any = acting._act
    act(layers, True, obs, noise, deviations, actions, None)
    with pytest.raises((TypeError, ValueError)):
        act(layers, True, obs, noise, deviations, actions, bounds)
    with pytest.raises(ValueError, match="only for numbers"):  # and not for choices
        act(layers, True, obs, noise, None, np.zeros(3, np.int64), bounds)


@compiled
@pytest.mark.parametrize("slots", [1, 8, 11])
@torch.inference_mode()
def test_what_environments_get_lies_within_the_bounds(slots):
    low = np.array([[-0.5, -np.inf], [0, 0]], np.float32)
    space = spaces.Box(low, np.array([[0.5, 0.1], [np.inf, 0]], np.float32))
    policy = policy_for((3,), space, [5], "tanh")
    noise = policy.head.noise((2, slots), torch.Generator().manual_seed(0)) * 3
    noise[1, 0] = float("nan")
    obs = np.random.default_rng(0).normal(size=(3, slots, 3)).astype(np.float32)
    actions = torch.zeros((2, slots, *policy.head.shape))
    parts = slice(0, slots // 2), slice(slots // 2, slots)
    quick = QuickActor(policy, obs, noise, actions, parts, (space.low, space.high))
    for step in range(2):
        for number, part in enumerate(parts):
            fitted = quick.act(step, number)
            expected = np.minimum(np.maximum(actions[step, part].numpy(), space.low), space.high)
            np.testing.assert_array_equal(fitted, expected, strict=True)


@compiled
def test_bounds_of_other_numbers_are_left_to_the_caller():
    space = spaces.Box(-1, 1, (2,), np.float64)
    policy = policy_for((3,), space, [5], "tanh")
    arrays = np.zeros((2, 4, 3), np.float32), torch.zeros((1, 4, 2)), torch.zeros((1, 4, 2))
    assert QuickActor(policy, *arrays, bounds=(space.low, space.high)).act(0) is None


@compiled
def test_actions_that_cannot_be_written_are_refused():
    layers = (np.ones((2, 4), np.float32), np.zeros(2, np.float32))
    obs, noise, actions = (
        np.zeros((3, 4), np.float32),
        np.zeros((3, 2), np.float32),
        np.zeros(3, int),
    )
    actions.flags.writeable = False
    assert acting._act is not None
    with pytest.raises(ValueError, match="fit"):
        acting._act(layers, True, obs, noise, None, actions, None)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_is_the_same_with_and_without(env):
    """But for last digits, which decide nothing in a few iterations."""

    def trained():
        with envfleet.make_vec(env, 3, autoreset="same_step", backend="serial") as envs:
            trainer = PPOTrainer(envs, PPOOptions(n_steps=16, batch_size=48, n_epochs=2), seed=1)
            rollout = trainer.collect()
            trainer.learn(rollout)
            return rollout.actions, trainer.policy.state_dict()

    actions, weights = trained()
    with mock.patch.object(acting, "_act", None):
        same_actions, same_weights = trained()
    np.testing.assert_allclose(actions, same_actions, rtol=1e-4, atol=1e-5)
    for name, weight in weights.items():
        assert torch.allclose(weight, same_weights[name], atol=1e-4), name


@compiled
def test_halves_are_the_whole():
    """Every row is worked out on its own, whichever rows are beside it."""

    def trained(overlap):
        options = PPOOptions(n_steps=16, batch_size=40, n_epochs=2, overlap=overlap)
        with envfleet.make_vec("CartPole-v1", 5, autoreset="same_step", backend="serial") as envs:
            trainer = PPOTrainer(envs, options, seed=1)
            trainer.train(2 * 16 * 5)
            return trainer.policy.state_dict()

    whole, halves = trained(False), trained(True)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
