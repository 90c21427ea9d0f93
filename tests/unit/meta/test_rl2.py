"""RL²: what it observes, against a loop by hand."""

from typing import Any

import numpy as np
import pytest

from envfleet.meta import make_env
from envfleet.meta.rl2_env import make_rl2_env


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
