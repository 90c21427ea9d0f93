"""Steps that make a batch only if there is news bring what all other steps bring."""

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.engine import rows, rows_python
from envfleet.errors import ConfigError, EnvFailed
from envfleet.testing import Counter, Crashing
from tests.conformance.matrix import EVERY

STEPS = 60
Played = list[dict[str, Any]]


def played(
    env: Any, *, plainly: bool, on_pages: bool = False, **options: Any
) -> tuple[Played, int]:
    """All that is told of each step, and how often there was no batch."""
    num_plain, told = 0, []
    pages: dict[str, Any] = {"rollout_steps": 4} if on_pages else {}
    with envfleet.make_vec(env, 4, **options, **pages) as envs:
        fleet: Any = envs.fleet
        envs.reset(seed=0)
        chance = np.random.default_rng(0)
        for number in range(STEPS):
            actions = chance.integers(0, 2, 4)
            page = 1 + number % 4 if on_pages else 0
            rewards = np.full(4, np.nan)
            if plainly:
                batch = fleet.step_plainly(actions, rewards, page=page)
            else:
                batch = fleet.step(actions, page=page)
            if batch is None:
                num_plain += 1
                obs = fleet.pages[page - 1] if on_pages else fleet.shared_obs
                ends = np.zeros((2, 4), bool)
                told.append({"obs": obs.copy(), "rewards": rewards, "ends": ends})
            else:
                ends = np.stack([batch.terminated, batch.truncated])
                told.append({"obs": batch.obs.copy(), "rewards": batch.rewards, "ends": ends})
                told[-1]["incidents"] = len(batch.incidents)
    return told, num_plain


def assert_equal(one: Played, other: Played) -> None:
    for mine, theirs in zip(one, other, strict=True):
        for name in ("obs", "rewards", "ends"):
            np.testing.assert_array_equal(mine[name], theirs[name])
        assert mine.get("incidents", 0) == theirs.get("incidents", 0)


@pytest.mark.parametrize("on_pages", [False, True])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("where", EVERY)
def test_they_bring_what_steps_bring(where, mode, on_pages):
    options = {**where, "autoreset": mode, "on_pages": on_pages}
    told, num_plain = played("CartPole-v1", plainly=True, **options)
    assert_equal(told, played("CartPole-v1", plainly=False, **options)[0])
    assert num_plain > STEPS // 3
    assert num_plain < STEPS, "ends are news"


class Chatty(Counter):
    """Has an info that is no number, in some steps."""

    def step(self, action):
        obs, *result, info = super().step(action)
        return (obs, *result, info | {"said": "words"} if obs % 5 == 3 else info)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_what_comes_by_the_control_path_is_news(backend):
    told, num_plain = played(Chatty, plainly=True, backend=backend, num_workers=1)
    assert_equal(told, played(Chatty, plainly=False, backend=backend, num_workers=1)[0])
    assert num_plain < STEPS / 2
    assert num_plain


@pytest.mark.parametrize("how", ["kill", "exception"])
def test_losses_are_news(how):
    env = functools.partial(Crashing, mode=how, nth=7)
    options: dict[str, Any] = {
        "backend": "process",
        "num_workers": 2,
        "on_failure": "restart",
        "max_restarts": 99,
    }
    told, num_plain = played(env, plainly=True, **options)
    assert_equal(told, played(env, plainly=False, **options)[0])
    assert any(one.get("incidents") for one in told)
    assert num_plain


def test_an_error_leaves_nothing_under_way():
    env = functools.partial(Crashing, mode="exception", nth=3)
    with envfleet.make_vec(env, 4, backend="process", num_workers=2) as envs:
        envs.reset(seed=0)
        zeros, rewards = np.zeros(4, np.int64), np.zeros(4)
        for _ in range(2):
            envs.fleet.step_plainly(zeros, rewards)
        with pytest.raises(EnvFailed):
            envs.fleet.step_plainly(zeros, rewards)
        envs.reset(seed=1)
        batch = envs.fleet.step_plainly(zeros, rewards)
        assert (rewards if batch is None else batch.rewards).tolist() == [1.0] * 4


def test_views_of_what_is_seen_are_offered_where_it_is_one_array():
    class Both(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(3))
        action_space = gymnasium.spaces.Discrete(2)

    with envfleet.make_vec(Both, 2, backend="serial") as envs:
        assert envs.fleet.shared_obs is None
    with envfleet.make_vec("CartPole-v1", 2, backend="serial") as envs:
        obs, _ = envs.reset(seed=0)
        shared = envs.fleet.shared_obs
        assert shared is not None
        assert np.array_equal(shared, obs)
        with pytest.raises(ConfigError, match="there is no page 3"):
            envs.fleet.step_plainly(np.zeros(2, np.int64), np.zeros(2), page=3)


@pytest.mark.parametrize("form", [rows, rows_python])
def test_rewards_are_taken_unless_a_row_is_special(form):
    rewards, flags, out = np.array([1.5, -2.0]), np.zeros((3, 2), np.bool_), np.zeros(2)
    assert form.take_rewards(rewards, flags, out) is True
    assert out.tolist() == [1.5, -2.0]
    for position in np.ndindex(3, 2):
        flags[:], out[:] = False, 7.0
        flags[position] = True
        assert form.take_rewards(rewards, flags, out) is False
        assert out.tolist() == [7.0, 7.0]


@pytest.mark.skipif(not rows.IS_COMPILED, reason="Python needs no such care")
@pytest.mark.parametrize(
    "change",
    [
        {"rewards": np.zeros(3)},
        {"rewards": np.zeros((2, 1))},
        {"rewards": np.zeros(2, np.float32)},
        {"flags": np.zeros((3, 1), np.bool_)},
        {"flags": np.zeros(6, np.bool_)},
        {"out": np.zeros(3)},
        {"out": np.zeros(1)},
        {"out": np.zeros(4)[::2]},
        {"out": [0.0, 0.0]},
    ],
)
def test_what_does_not_fit_is_refused(change):
    given: dict[str, Any] = {
        "rewards": np.zeros(2),
        "flags": np.zeros((3, 2), np.bool_),
        "out": np.zeros(2),
    }
    take: Any = rows.take_rewards
    take(*given.values())
    with pytest.raises((TypeError, ValueError)):
        take(*(given | change).values())
