"""RL²: what it observes, against a loop by hand."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envfleet.errors import ConfigError
from envfleet.learn.agent import Agent
from envfleet.learn.options import PPOOptions
from envfleet.meta import load_config, make_env, train
from envfleet.meta.rl2 import PPOActor
from envfleet.meta.rl2_env import make_rl2_env
from tests.unit.meta.test_runs import RL2


@pytest.mark.parametrize("name", ["PointRobot-v0", "GridNavi-v0"])
def test_observations_are_the_trial_s_with_the_previous_action_and_reward(name):
    args: Any = {"num_eval_tasks": 3, "max_episode_steps": 4}
    wide, plain = make_rl2_env(name, 2, **args), make_env(name, 2, **args)
    options = {"task": 1}
    obs, _ = wide.reset(seed=5, options=options)
    first, _ = plain.reset(seed=5, options=options)
    size, is_discrete = len(first), name == "GridNavi-v0"
    width = 5 if is_discrete else 2
    assert np.array_equal(obs, [*first, *[0.0] * width, 0.0])
    plain.action_space.seed(0)
    for step in range(8):
        action = plain.action_space.sample()
        obs, reward, terminated, truncated, _ = wide.step(action)
        found, same_reward, *ends, _ = plain.step(action)
        shown = np.eye(5)[action] if is_discrete else action
        assert reward == same_reward
        assert [terminated, truncated] == ends == [False, step == 7]
        assert np.array_equal(obs, np.array([*found, *shown, reward], np.float32))
        assert obs[wide.get_wrapper_attr("flag_at")] == float(step in (3, 7))
        assert obs in wide.observation_space
    assert size == wide.get_wrapper_attr("flag_at") + 1


def test_a_reset_without_a_task_draws_another_one():
    env: Any = make_rl2_env("PointRobot-v0", 2, num_eval_tasks=3)
    goals: set[tuple[float, ...]] = set()
    for _ in range(5):
        env.reset(seed=0 if not goals else None)
        goals.add(tuple(env.unwrapped.task))
    assert len(goals) == 5


@pytest.fixture
def registered_here():
    name = "OnlyHere-v0"
    gymnasium.register(name, "tests.faults.meta_envs:Slow", max_episode_steps=10)
    yield name
    del gymnasium.registry[name]


@pytest.mark.parametrize("how", ["by function", "by an id that workers do not know"])
def test_learns_in_any_environment_that_can_be_named(how, registered_here, tmp_path):
    name = registered_here if "id" in how else "tests.faults.meta_envs:Slow"
    changes = [
        f"env.env_name={name}", "env.num_eval_tasks=1", "env.num_parallel_workers=2",
        "train.num_iters=1", "train.num_rollouts_per_iter=2", "eval.max_eval_tasks=1",
        "policy.n_steps=20", "policy.batch_size=20", "eval.log_tensorboard=false",
    ]  # fmt: skip
    outcome = train(load_config(None, [*RL2, *changes]), tmp_path)
    assert outcome.env_steps == 40
    assert outcome.last_evaluation is not None
    assert outcome.last_evaluation.figures["metrics/total_steps_eval"] == 20


def test_an_environment_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean GridNavi-v0"):
        train(load_config(None, [*RL2, "env.env_name=GridNav-v0"]), tmp_path)


def test_the_memory_of_single_rows_can_begin_anew_after_acting():
    space = spaces.Box(-1, 1, (3,))
    options = PPOOptions(memory="lstm", memory_size=4)
    agent = Agent(space, spaces.Discrete(2), options, torch.device("cpu"), 0)
    actor = PPOActor(agent)
    _, state = actor.act(actor.initial_state(3), np.ones((3, 3), np.float32), None, True)
    assert state.states.any(1).all()
    state.reset([0, 2])
    assert state.states.any(1).tolist() == [False, True, False]


def test_drawn_actions_follow_from_the_noise():
    options = PPOOptions(memory="lstm", memory_size=4)
    for space in (spaces.Discrete(5), spaces.Box(-1, 1, (2,))):
        agent = Agent(spaces.Box(-1, 1, (3,)), space, options, torch.device("cpu"), 0)
        actor, obs = PPOActor(agent), np.ones((64, 3), np.float32)
        noise = actor.noise(np.random.default_rng(0), 64)
        first, again = (actor.act(actor.initial_state(64), obs, noise, False)[0] for _ in range(2))
        best, _ = actor.act(actor.initial_state(64), obs, noise, True)
        assert np.array_equal(first, again)
        assert len(np.unique(first, axis=0)) > 1
        assert len(np.unique(best, axis=0)) == 1
