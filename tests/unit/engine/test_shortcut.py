"""Going past wrappers does what going through them does."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

import envfleet
from envfleet.engine import host, rows, rows_python
from envfleet.engine.shortcut import shortest_step

LENGTH = 7


@pytest.fixture(params=["rows", "rows_python"], autouse=True)
def form(request, monkeypatch):
    """In C and in Python."""
    chosen = {"rows": rows, "rows_python": rows_python}[request.param]
    monkeypatch.setattr(host, "step_rows", chosen.step_rows)


def made(**options: Any) -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=LENGTH, **options)


def steps(env, count):
    for _ in range(count):
        env.step(0)


def test_the_way_is_short_as_soon_as_nothing_is_left_to_do():
    env = made()
    way = shortest_step(env)
    assert way.layer is env.env, "nothing was reset: OrderEnforcing has to say so"
    assert (way.limit, way.is_shortest) == (env, False)
    env.reset(seed=0)
    assert not shortest_step(env).is_shortest, "nothing was checked yet"
    steps(env, 2)
    assert shortest_step(env) == (env.unwrapped, env, True)


def test_without_wrappers_there_is_no_shorter_way():
    bare = made().unwrapped
    assert shortest_step(bare) == (bare, None, True)


class Twice(TimeLimit):
    def step(self, action):
        super().step(action)
        return super().step(action)


class Silent(gymnasium.Wrapper):
    pass


@pytest.mark.parametrize("around", [lambda env: Twice(env, 99), Silent])
def test_a_wrapper_that_is_not_known_is_gone_through(around):
    env = around(made())
    env.reset(seed=0)
    steps(env, 2)
    assert shortest_step(env) == (env, None, True)


def test_a_second_time_limit_is_gone_through():
    inner = made()
    env = TimeLimit(inner, 5)
    env.reset(seed=0)
    steps(env, 2)
    assert shortest_step(env) == (inner, env, True)


def test_a_step_of_its_own_is_gone_through():
    env = made()
    env.reset(seed=0)
    steps(env, 2)
    env.env.step = lambda action: "mine"
    assert shortest_step(env).layer is env.env


@pytest.mark.parametrize("kind", [TimeLimit, OrderEnforcing, PassiveEnvChecker])
def test_another_version_of_a_wrapper_is_gone_through(kind, monkeypatch):
    def step(self, action):
        return self.env.step(self.something_new(action))

    env = made()
    env.reset(seed=0)
    steps(env, 2)
    monkeypatch.setattr(kind, "step", step)
    assert shortest_step(env).layer is not env.unwrapped


def by_hand(seed, actions):
    """What one environment does, driven by hand as Gymnasium's next_step autoreset would."""
    env, rows_ = made(), []
    env.reset(seed=seed)
    has_ended = False
    for action in actions:
        if has_ended:
            (obs, _), reward, terminated, truncated = env.reset(), 0.0, False, False
        else:
            obs, reward, terminated, truncated, _ = env.step(action)
        has_ended = terminated or truncated
        rows_.append((obs.tolist(), float(reward), terminated, truncated))
    return rows_


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_streams_are_those_of_a_hand_driven_loop(backend):
    actions = np.random.default_rng(3).integers(0, 2, (40, 4))
    with envfleet.make_vec(made, 4, num_workers=2, backend=backend) as envs:
        envs.reset(seed=5)
        seen = [envs.step(row)[:4] for row in actions]
    for slot in range(4):
        mine = [
            (obs[slot].tolist(), float(reward[slot]), bool(ends[slot]), bool(cuts[slot]))
            for obs, reward, ends, cuts in seen
        ]
        assert mine == by_hand(5 + slot, actions[:, slot])


def test_steps_are_counted_where_everybody_looks_for_them():
    with envfleet.make_vec(lambda: made(), 2, backend="serial") as envs:
        envs.reset(seed=0)
        zeros = np.zeros(2, np.int64)
        for _ in range(5):
            envs.step(zeros)
        assert envs.get_attr("_elapsed_steps") == (5, 5)
        envs.set_attr("_max_episode_steps", [6, 7])
        assert envs.step(zeros)[3].tolist() == [True, False]
        later = envs.snapshot()
        assert envs.step(zeros)[3].tolist() == [False, True]
        envs.restore(later)
        assert envs.get_attr("_elapsed_steps") == (6, 6)
        assert envs.step(zeros)[3].tolist() == [False, True]


def test_a_count_that_cannot_be_counted_is_the_environments_failure():
    with envfleet.make_vec(lambda: made(), 1, backend="serial") as envs:
        envs.reset(seed=0)
        for _ in range(4):
            envs.step(np.zeros(1, np.int64))
        envs.set_attr("_elapsed_steps", [None])
        with pytest.raises(envfleet.errors.EnvFailed, match="unsupported operand"):
            envs.step(np.zeros(1, np.int64))


class Phases(gymnasium.Env):
    """Changes its own step, by itself or when asked to."""

    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == 4:
            self.begin_second()
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def begin_second(self):
        vars(self)["step"] = lambda action: (np.zeros(1, np.float32), 2.0, False, False, {})


@pytest.mark.parametrize("is_asked", [True, False])
def test_an_environment_may_change_its_step(is_asked):
    zero = np.zeros(1, np.int64)
    with envfleet.make_vec(lambda: TimeLimit(Phases(), 99), 1, backend="serial") as envs:
        envs.reset(seed=0)
        earned = [float(envs.step(zero)[1][0]) for _ in range(3)]
        if is_asked:
            envs.call("begin_second")
        earned += [float(envs.step(zero)[1][0]) for _ in range(2)]
    assert earned == ([1, 1, 1, 2, 2] if is_asked else [1, 1, 1, 1, 2])
