"""Evaluation: a hand-driven loop, and the same numbers side by side."""

import functools
import os
import signal
import threading
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envfleet import errors
from envfleet.learn.evaluate import EVALUATION_SEED, evaluate
from tests.gates import PATIENCE_S

cartpole = functools.partial(gymnasium.make, "CartPole-v1")


def leaning():
    """Pushes to where the pole leans, and every seventh time to the other side."""
    steps = 0

    def act(obs, info):
        nonlocal steps
        steps += 1
        return int((obs[2] > 0) ^ (steps % 7 == 0))

    return act


@functools.cache
def by_hand(episodes):
    env, returns = cartpole(), []
    for episode in range(episodes):
        obs, info = env.reset(seed=EVALUATION_SEED + episode)
        act, total, is_over = leaning(), 0.0, False
        while not is_over:
            obs, reward, terminated, truncated, info = env.step(act(obs, info))
            total, is_over = total + float(reward), terminated or truncated
        returns.append(total)
    return tuple(returns)


@pytest.mark.parametrize("n_envs", [1, 2, 3, 20])
def test_the_returns_are_those_of_a_loop_by_hand(n_envs):
    found = evaluate(leaning, cartpole, episodes=7, n_envs=n_envs)
    assert found.returns == by_hand(7)
    assert len(set(found.returns)) > 1
    assert (found.mean, found.std) == (np.mean(by_hand(7)), np.std(by_hand(7)))


class ExitsOnce(gymnasium.Wrapper):
    """Ends its process as scripts do, in the first episode."""

    def reset(self, *, seed=None, options=None):
        self.is_first = seed == EVALUATION_SEED
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.is_first:
            raise SystemExit("bye")
        return super().step(action)


def test_an_environment_that_exits_costs_its_episode_in_this_process_too():
    found = evaluate(leaning, lambda: ExitsOnce(cartpole()), episodes=3)
    assert found.returns == by_hand(3)[1:]
    (lost,) = found.lost
    assert "SystemExit: bye" in lost


class Guess(gymnasium.Env):
    """Tells the right answer in its info only, and acts in a Dict."""

    observation_space = spaces.Dict({"time": spaces.Discrete(9)})
    action_space = spaces.Dict({"guess": spaces.Discrete(50), "by": spaces.Box(0, 1, (1,))})

    def _told(self):
        self.right = int(self.np_random.integers(50))
        return {"time": np.int64(self.t)}, {"right": self.right}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._told()

    def step(self, action):
        reward = float(action["guess"] == self.right) * float(action["by"][0])
        self.t += 1
        obs, info = self._told()
        return obs, reward, False, self.t == 5, info


@pytest.mark.parametrize("n_envs", [1, 3])
def test_infos_and_other_spaces_reach_the_player(n_envs):
    def play():
        return lambda obs, info: {"guess": info["right"], "by": np.array([0.5], np.float32)}

    found = evaluate(play, Guess, episodes=4, n_envs=n_envs)
    assert found.returns == (2.5,) * 4


@pytest.mark.parametrize("n_envs", [1, 2])
def test_an_episode_without_an_end_is_cut_off(n_envs):
    endless = functools.partial(gymnasium.make, "Pendulum-v1", max_episode_steps=-1)
    still = np.zeros(1, np.float32)
    with pytest.warns(RuntimeWarning, match="cut off after 7 steps; give the environment"):
        found = evaluate(
            lambda: lambda obs, info: still, endless, episodes=2, max_steps=7, n_envs=n_envs
        )
    assert len(found.returns) == 2


@pytest.mark.parametrize("wrong", [{"episodes": 0}, {"episodes": 1, "n_envs": 0}])
def test_nothing_to_play(wrong):
    with pytest.raises(errors.ConfigError, match="needs an episode and an environment"):
        evaluate(leaning, cartpole, **wrong)


class ByArray(gymnasium.Env):
    """Pays by arrays of one number."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), np.array([0.5]), self.steps == 4, False, {}


def test_a_reward_may_be_an_array_of_one_number():
    assert evaluate(lambda: lambda obs, info: 0, ByArray, episodes=2).returns == (2.0, 2.0)


def test_one_at_a_time_in_a_worker_gives_the_same_returns():
    assert evaluate(leaning, cartpole, episodes=3, in_worker=True).returns == by_hand(3)


class ClosesWhenTold(ByArray):
    told = threading.Event()

    def close(self):
        self.told.wait(PATIENCE_S)


def test_an_environment_that_does_not_close_holds_nothing_up():
    with pytest.warns(RuntimeWarning, match="has not closed within 3 s; it is left"):
        evaluate(lambda: lambda obs, info: 0, ClosesWhenTold, episodes=1)
    ClosesWhenTold.told.set()


class TakesItsProcessAlong(ByArray):
    def step(self, action):
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_environment_in_a_worker_cannot_take_this_process_along():
    with pytest.raises(errors.WorkerDied):
        evaluate(lambda: lambda obs, info: 0, TakesItsProcessAlong, episodes=1, in_worker=True)


class Hangs(ByArray):
    def step(self, action):
        time.sleep(1000)


def test_an_environment_in_a_worker_is_given_up_in_time():
    with pytest.raises(errors.DeadlineExceeded):
        evaluate(lambda: lambda obs, info: 0, Hangs, episodes=1, in_worker=True, step_timeout_s=0.2)


class Stumbles(ByArray):
    """Fails in the episodes of some seeds, by a mode of its own."""

    def __init__(self, seeds, mode="raise"):
        self.seeds, self.mode = seeds, mode

    def reset(self, *, seed=None, options=None):
        self.is_fatal = seed - EVALUATION_SEED in self.seeds
        if self.is_fatal and self.mode == "reset":
            raise ValueError("no such place")
        return super().reset(seed=seed)

    def step(self, action):
        if self.is_fatal and self.steps == 2:
            if self.mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("stumbled")
        obs, _, _, _, info = super().step(action)
        return obs, float(self.np_random.integers(100)), self.steps == 4, False, info


def played(seeds=(), mode="raise", **how):
    env_fn = functools.partial(Stumbles, seeds, mode)
    return evaluate(lambda: lambda obs, info: 0, env_fn, episodes=6, **how)


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("raise", {}),
        ("reset", {}),
        ("raise", {"n_envs": 3}),
        ("reset", {"n_envs": 3}),
        ("kill", {"in_worker": True}),
        ("kill", {"n_envs": 4, "in_worker": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("seeds", [(0,), (2, 3), (5,)], ids=str)
def test_an_episode_whose_environment_fails_is_lost_alone(seeds, mode, how):
    whole, found = played(), played(seeds, mode, **how)
    kept = [value for number, value in enumerate(whole.returns) if number not in seeds]
    assert found.returns == tuple(kept)
    assert len(found.lost) == len(seeds)
    why = "WorkerDied" if mode == "kill" else "no such place" if mode == "reset" else "stumbled"
    assert all(why in lost for lost in found.lost)


def test_the_last_failure_is_raised_when_nothing_is_left():
    with pytest.raises(ValueError, match="stumbled"):
        played(range(6))
    with pytest.raises(errors.EnvFailed, match="stumbled"):
        played(range(6), n_envs=2)


def test_a_player_s_own_error_is_not_the_environment_s():
    def play():
        def act(obs, info):
            raise KeyError("mine")

        return act

    closed = []

    class Closing(ByArray):
        def close(self):
            closed.append(True)

    with pytest.raises(KeyError, match="mine"):
        evaluate(play, Closing, episodes=2)
    assert closed == [True]
