"""Observations of many steps, written where they are wanted by the workers that make them."""

import functools
import os
import signal
import time

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.engine.memory import Data, PagePlan, group_spaces
from envfleet.errors import ConfigError, FleetClosed
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
                with np.errstate(over="ignore"):
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
    assert by_page > STEPS // 2


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


class Lingering(gymnasium.Env):
    """Observes and earns how many steps it made; action 1 takes a while, action 2 kills."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.count = 0.0
        return np.zeros(1), {}

    def step(self, action):
        if action == 1:
            time.sleep(0.3)
        elif action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        return np.array([self.count]), self.count, False, False, {}


def test_a_step_that_comes_to_the_lane_later_has_no_page():
    first, second, zeros = np.arange(2), np.arange(2, 4), np.zeros(2, np.int64)
    with opened(Lingering) as envs:
        fleet = envs.fleet
        envs.reset(seed=0)
        fleet.send(zeros, first, page=1)
        fleet.recv()
        fleet.send(zeros[:1], [2])  # a part of a worker's slots goes by the books
        fleet.send(zeros + 1, first, page=2)  # and so does this
        fleet.recv(slots=[2])
        fleet.send(zeros, second)  # until here, where all is plain again
        batch = fleet.recv(slots=first)
        assert batch.obs.ravel().tolist() == batch.rewards.tolist() == [2, 2]


def test_the_successor_of_a_worker_writes_no_page():
    zero = np.zeros(1, np.int64)
    with opened(Lingering, num_envs=2, on_failure="restart") as envs:
        fleet = envs.fleet
        envs.reset(seed=0)
        fleet.pages[:] = -7
        fleet.step(np.zeros(2, np.int64))
        fleet.send(zero + 2, [0], page=2)
        fleet.send(zero, [1], page=2)
        for _ in range(50):
            fleet.recv(slots=[1])
            fleet.send(zero, [1], page=3)
        batch = fleet.recv(slots=[0])
        assert (batch.obs.tolist(), batch.truncated.tolist()) == ([[1]], [True])


class Parts(gymnasium.Env):
    """Observations that are more than one array."""

    observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(3)})
    action_space = gymnasium.spaces.Discrete(2)


@pytest.mark.parametrize("page", [-1, STEPS + 2, 99, 2.0, None, "1", True])
def test_a_page_that_is_not_there_is_refused(page):
    with opened("CartPole-v1") as envs:
        envs.reset(seed=0)
        with pytest.raises(ConfigError, match=f"there is no page {page!r}: this fleet has 1 to 13"):
            envs.fleet.step(np.zeros(4, np.int64), page=page)
        envs.step(np.zeros(4, np.int64))
        assert len(envs.fleet._episodes.action_log.log_of(0).actions) == 1


def test_numbers_of_pages_may_be_numpys():
    with opened("CartPole-v1") as envs:
        envs.reset(seed=0)
        batches = [envs.fleet.step(np.zeros(4, np.int64), page=page) for page in np.arange(1, 4)]
        assert [batch.page for batch in batches] == [1, 2, 3]


def test_a_closed_fleet_has_no_pages():
    envs = opened("CartPole-v1", backend="serial")
    envs.close()
    with pytest.raises(FleetClosed):
        _ = envs.fleet.pages


def test_observations_without_numbers_have_pages_too():
    class Empty(Lingering):
        observation_space = gymnasium.spaces.Box(-1, 1, (0,), np.float64)

    with opened(Empty, backend="serial") as envs:
        assert envs.fleet.pages.shape == (STEPS + 1, 4, 0)


class Growing(Lingering):
    """Observes numbers that no float32 holds exactly, and then one that it cannot hold at all."""

    def step(self, action):
        super().step(action)
        seen = 1e300 if self.count == STEPS else self.count / 3
        return np.array([seen]), 0.0, False, False, {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_floats_are_kept_as_the_type_that_was_asked_for(backend):
    pages, _ = observed(Growing, backend, rollout_floats="float32")
    expected = without_pages(Growing)
    assert pages.dtype == np.float32
    with np.errstate(over="ignore"):
        assert np.array_equal(pages, expected.astype(np.float32))
    assert np.isinf(pages[-1]).all()
    assert not np.array_equal(pages[:-1], expected[:-1])


@pytest.mark.parametrize("name", ["float16", "float64"])
def test_pages_have_room_for_their_own_type(name):
    pages, _ = observed("CartPole-v1", "process", rollout_floats=name)
    assert pages.dtype == name
    assert np.array_equal(pages, without_pages("CartPole-v1").astype(name))


def test_what_is_no_float_is_kept_as_it_comes():
    with opened(Counter, backend="serial", rollout_floats="float32") as envs:
        assert envs.single_observation_space.dtype.kind != "f"
        assert envs.fleet.pages.dtype == envs.single_observation_space.dtype


@pytest.mark.parametrize("name", ["int8", "single", np.float32, 4])
def test_a_type_that_pages_cannot_have_is_refused(name):
    with pytest.raises(
        ConfigError, match="rollout_floats must be one of 'float16', 'float32', 'float64'"
    ):
        envfleet.make_vec("CartPole-v1", 2, rollout_steps=4, rollout_floats=name)


def test_parts_have_no_pages():
    space_groups = group_spaces([(Parts.observation_space, Parts.action_space)] * 4)
    assert Data.measure(space_groups, PagePlan(10**6)) == Data.measure(space_groups), (
        "and no room for them"
    )
    with opened(Parts, backend="serial") as envs:
        assert envs.fleet.pages is None
        with pytest.raises(ConfigError, match="there is no page 1: this fleet has none"):
            envs.fleet.send(np.zeros(4, np.int64), page=1)


@pytest.mark.parametrize("steps", [-1, 1.5, "3", True])
def test_a_number_of_steps_is_a_whole_one(steps):
    with pytest.raises(ConfigError, match="rollout_steps must be a whole number, 0 or more"):
        envfleet.make_vec("CartPole-v1", 2, rollout_steps=steps)
