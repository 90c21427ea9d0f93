"""The trial wrapper against loops that are driven by hand."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envfleet import meta
from envfleet.errors import ConfigError, ResetNeeded
from envfleet.meta import VariBadWrapper

make: Any = gymnasium.make
"""Untyped: the tests look inside the environments."""
make_env: Any = meta.make_env


class Counter(gymnasium.Env):
    """Counts its steps; its task is how many steps an episode has. Subclasses take the task."""

    observation_space = spaces.Box(-1, 100, (1,), np.float64)
    action_space = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))
    _max_episode_steps: int | None = 9

    def __init__(self):
        self.length, self.resets, self.actions = 3, [], []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append((seed, options))
        self.count = 0
        return np.zeros(1), {}

    def step(self, action):
        self.count += 1
        self.actions.append(action)
        return np.full(1, float(self.count)), 0.5, self.count >= self.length, False, {"own": 1}


class WithResetTask(Counter):
    def reset_task(self, task):
        self.length = 3 if task is None else task
        self.reset()


class WithSetTask(Counter):
    def set_task(self, task):
        self.length = task


class WithOption(Counter):
    def reset(self, *, seed=None, options=None):
        self.length = (options or {}).get("task", 3)
        return super().reset(seed=seed, options=options)


def by_hand(env, task, episodes, actions, *, oracle, seed):
    """The rows of a trial of one of our environments, by its own interface."""
    low, high = env.action_space.low, env.action_space.high
    vector = lambda: env.unwrapped.get_current_task() if oracle else []  # noqa: E731

    def shown(state, flag):
        flags = [flag] if episodes > 1 else []
        return np.array([*state, *vector(), *flags], np.float32)

    state, _ = env.reset(seed=seed, options={"task": task})
    rows, actions = [shown(state, 0)], iter(actions)
    for episode in range(episodes):
        done = False
        while not done:
            unit = np.clip(next(actions), -1, 1)
            state, reward, terminated, truncated, _ = env.step(low + (unit + 1) / 2 * (high - low))
            done = terminated or truncated
            is_last = done and episode == episodes - 1
            row = [shown(state, float(done)), reward, terminated and is_last, truncated and is_last]
            start = None
            if done and not is_last:
                start = shown(env.reset()[0], 0)
            rows.append((*row, done, start))
    return rows


@pytest.mark.parametrize("oracle", [False, True])
@pytest.mark.parametrize("episodes", [1, 3])
@pytest.mark.parametrize(
    ("name", "task"), [("PointRobot-v0", 2), ("Wind-v0", None), ("AntDir-v0", 1)]
)
def test_equals_a_loop_driven_by_hand(name, task, episodes, oracle):
    rng = np.random.default_rng(0)
    kwargs = {"num_train_tasks": 3, "num_eval_tasks": 2, "max_episode_steps": 20}
    env = make_env(name, episodes, oracle=oracle, **kwargs)
    actions = rng.uniform(-1.2, 1.2, (100, *env.action_space.shape)).astype(np.float32)
    raw = make(name, **kwargs)
    first, *expected = by_hand(raw, task, episodes, actions, oracle=oracle, seed=7)
    obs, _ = env.reset(seed=7, task=task)
    assert env.observation_space.contains(obs)
    assert (obs == first).all()
    assert env.horizon_bamdp == episodes * 20
    for row, action in zip(expected, actions, strict=False):
        obs, reward, terminated, truncated, info = env.step(action)
        assert obs.dtype == np.float32
        assert np.allclose(obs, row[0], atol=1e-5)
        assert reward == pytest.approx(row[1], abs=1e-5)
        assert (terminated, truncated, info["done_mdp"]) == row[2:5]
        assert ("start_state" in info) == (row[5] is not None)
        if row[5] is not None:
            assert (info["start_state"] == row[5]).all()
            assert not env.done_mdp
        assert ("is_goal_state" in info) == (name == "Wind-v0")
    assert terminated or truncated
    assert env.step_count_bamdp == len(expected)
    assert env.episode_count == episodes
    with pytest.raises(ResetNeeded, match="no trial is running"):
        env.step(action)


@pytest.mark.parametrize("env_class", [WithResetTask, WithSetTask, WithOption])
@pytest.mark.parametrize("by_option", [False, True])
def test_any_way_to_take_a_task_works(env_class, by_option):
    env: Any = VariBadWrapper(env_class(), 2)
    if by_option:
        obs, _ = env.reset(seed=1, options={"task": 2})
    else:
        obs, _ = env.reset(seed=1, task=2)
    assert obs.tolist() == [0, 0]
    flags = []
    for _ in range(4):
        obs, _, terminated, truncated, info = env.step(np.zeros(2))
        flags.append((*obs.tolist(), terminated, truncated, info["done_mdp"], info["own"]))
    assert flags == [
        (1, 0, False, False, False, 1),
        (2, 1, False, False, True, 1),
        (1, 0, False, False, False, 1),
        (2, 1, True, False, True, 1),
    ]
    assert env.unwrapped.resets[0][0] == 1
    assert [seed for seed, _ in env.unwrapped.resets[1:]] == [None] * (
        len(env.unwrapped.resets) - 1
    )


@pytest.mark.parametrize("env_class", [WithResetTask, WithSetTask, WithOption])
def test_without_a_task_one_of_the_environment_s_own_list_is_drawn(env_class):
    drawn: list[list[int]] = []
    for _ in range(2):
        inner = env_class()
        inner.train_tasks, inner.eval_tasks = [4, 5, 6], [7, 8]
        env: Any = VariBadWrapper(inner, 1)
        drawn.append([])
        for seed in (3, *[None] * 19):
            env.reset(seed=seed)
            drawn[-1].append(inner.length)
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {4, 5, 6}


def test_the_goal_is_told_by_an_info_and_ends_nothing():
    env = make_env("GridNavi-v0", 1)
    env.reset(task=[0, 2])
    told = [env.step(action)[2:] for action in (1, 1, 0, 1)]
    assert [info["is_goal_state"] for *_, info in told] == [False, True, True, False]
    assert not any(terminated or truncated for terminated, truncated, _ in told)


def test_other_options_reach_every_episode():
    env: Any = VariBadWrapper(WithOption(), 2)
    env.reset(options={"task": 1, "light": "dim"})
    env.step(np.zeros(2))
    assert [options for _, options in env.unwrapped.resets] == [{"task": 1, "light": "dim"}] * 2


def test_an_environment_without_tasks_has_trials_too():
    env = make_env("CartPole-P-v0", 2)
    obs, _ = env.reset(seed=0)
    assert obs.shape == (3,)
    assert env.action_space == spaces.Discrete(2)
    assert env.horizon_bamdp == 400
    env.step(1)


class TestActions:
    def test_are_from_minus_one_to_one(self):
        env: Any = VariBadWrapper(WithOption(), 1)
        assert env.action_space == spaces.Box(-1, 1, (2,), np.float32)
        env.reset(task=9)
        for action in ([-1, -1], [0, 0], [1, 1], [-9, 9]):
            env.step(np.array(action, np.float32))
        assert np.allclose(env.unwrapped.actions, [[-2, 0], [0, 5], [2, 10], [-2, 10]])

    def test_random_ones_use_the_whole_range(self):
        env = make_env("PointRobot-v0", 1, seed=0)
        env.reset(task=0)
        moves, before = [], env.unwrapped.state
        for _ in range(50):
            env.step(env.action_space.sample())
            moves.append(env.unwrapped.state - before)
            before = env.unwrapped.state
        assert np.abs(moves).max() > 0.09

    def test_without_bounds_are_refused(self):
        inner = WithOption()
        inner.action_space = spaces.Box(-np.inf, np.inf, (1,))
        with pytest.raises(ConfigError, match="has no bounds"):
            VariBadWrapper(inner, 1)


class TestSeeds:
    def test_of_make_env_is_that_of_the_first_trial(self):
        env, other = make_env("PointRobot-v0", 2, seed=5), make_env("PointRobot-v0", 2)
        assert (env.reset()[0] == other.reset(seed=5)[0]).all()
        assert (env.unwrapped.task == other.unwrapped.task).all()
        assert (env.reset()[0] == other.reset()[0]).all()  # and both go on
        assert (env.unwrapped.task == other.unwrapped.task).all()

    def test_do_not_change_the_tasks(self):
        kwargs = {"num_train_tasks": 4, "num_eval_tasks": 4}
        train = make_env("HalfCheetahVel-v0", 1, seed=0, oracle=True, **kwargs)
        evaluate = make_env("HalfCheetahVel-v0", 1, seed=1, oracle=True, **kwargs)
        for task in range(8):
            assert train.reset(task=task)[0][-1] == evaluate.reset(task=task)[0][-1]

    def test_without_a_task_one_of_the_training_tasks_is_drawn(self):
        env = make_env("PointRobot-v0", 1, seed=0, num_train_tasks=2, num_eval_tasks=30)
        train = {tuple(env.unwrapped.tasks[number]) for number in (0, 1)}
        seen = set()
        for _ in range(20):
            env.reset()
            seen.add(tuple(env.unwrapped.task))
        assert seen == train


class TestRefusals:
    def test_oracle_without_a_task_vector(self):
        with pytest.raises(ConfigError, match="has no method get_current_task"):
            make_env("CartPole-P-v0", 2, oracle=True)

    @pytest.mark.parametrize("env", ["CartPole-P-v0", "PointRobot-v0", WithOption])
    @pytest.mark.parametrize("name", ["num_train_task", "n_tasks"])
    def test_arguments_that_the_environment_does_not_take(self, env, name):
        with pytest.raises(ConfigError, match=f"the environment takes no {name}; leave it out"):
            make_env(env, 2, **{name: 3})

    def test_no_time_limit(self):
        inner = WithOption()
        inner._max_episode_steps = None
        with pytest.raises(ConfigError, match="has no time limit"):
            VariBadWrapper(inner, 1)
        limited = VariBadWrapper(gymnasium.wrappers.TimeLimit(inner, 4), 3)
        assert limited.horizon_bamdp == 12

    @pytest.mark.parametrize("episodes", [0, -1, 1.5, None])
    def test_no_episodes(self, episodes):
        with pytest.raises(ConfigError, match="episodes_per_task"):
            make_env("PointRobot-v0", episodes)

    def test_a_step_before_the_first_reset(self):
        with pytest.raises(ResetNeeded):
            make_env("PointRobot-v0", 1).step(np.zeros(2))
