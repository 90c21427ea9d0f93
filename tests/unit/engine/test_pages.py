"""Observations of many steps, written where they are wanted by the workers that make them."""

import functools

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.errors import ConfigError
from envfleet.testing import Counter, Crashing

BACKENDS = ["serial", "thread", "process"]
STEPS = 12


def opened(env, num_envs=4, backend="process", **options):
    return envfleet.make_vec(
        env, num_envs, num_workers=2, backend=backend, rollout_steps=STEPS, **options
    )


def observed(env, backend, **options):
    """What each step brought, by the page where there is one, and how often there was."""
    with opened(env, backend=backend, **options) as envs:
        envs.reset(seed=0)
        pages = envs.fleet.pages
        by_page = 0
        for page in range(1, STEPS + 1):
            batch = envs.fleet.step(np.zeros(4, np.int64), page=page)
            if batch.page:
                assert batch.page == page
                by_page += 1
            else:
                pages[page - 1] = batch.obs
        return pages[:STEPS].copy(), by_page


def without_pages(env, **options):
    with envfleet.make_vec(env, 4, backend="serial", **options) as envs:
        envs.reset(seed=0)
        return np.stack([envs.step(np.zeros(4, np.int64))[0] for _ in range(STEPS)])


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("env", ["CartPole-v1", Counter])
def test_pages_hold_what_a_step_returns(env, backend, mode):
    pages, by_page = observed(env, backend, autoreset=mode)
    assert np.array_equal(pages, without_pages(env, autoreset=mode))
    assert by_page == 0 if backend == "thread" else by_page > STEPS // 2


def test_an_environment_that_dies_leaves_no_hole():
    crashing = functools.partial(Crashing, mode="kill", nth=5)
    pages, by_page = observed(crashing, "process", on_failure="restart")
    assert 0 < by_page < STEPS
    assert np.isfinite(pages).all()


def test_halves_may_be_on_different_pages():
    halves = np.split(np.arange(4), 2)
    with opened("CartPole-v1") as envs:
        envs.reset(seed=0)
        zeros = np.zeros(4, np.int64)
        envs.step(zeros)
        for page, half in enumerate(halves, 1):
            envs.fleet.send(zeros[half], half, page=page)
        batch = envs.recv()
        assert batch.page == 0
        for page, half in enumerate(halves, 1):
            assert np.array_equal(envs.fleet.pages[page - 1, half], batch.obs[half])


class Parts(gymnasium.Env):
    """Observations that are more than one array."""

    observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(3)})
    action_space = gymnasium.spaces.Discrete(2)


@pytest.mark.parametrize("page", [-1, STEPS + 2, 99])
def test_a_page_that_is_not_there_is_refused(page):
    with opened("CartPole-v1", backend="serial") as envs:
        envs.reset(seed=0)
        with pytest.raises(ConfigError, match=f"there is no page {page}: this fleet has 1 to 13"):
            envs.fleet.step(np.zeros(4, np.int64), page=page)
        envs.step(np.zeros(4, np.int64))


def test_parts_have_no_pages():
    with opened(Parts, backend="serial") as envs:
        assert envs.fleet.pages is None
        with pytest.raises(ConfigError, match="there is no page 1: this fleet has none"):
            envs.fleet.send(np.zeros(4, np.int64), page=1)


@pytest.mark.parametrize("steps", [-1, 1.5, "3", True])
def test_a_number_of_steps_is_a_whole_one(steps):
    with pytest.raises(ConfigError, match="rollout_steps must be a whole number from 0 on"):
        envfleet.make_vec("CartPole-v1", 2, rollout_steps=steps)
