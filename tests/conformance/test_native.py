"""Natively vectorised environments inside workers: one instance fills several slots."""

import functools
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import envfleet
from envfleet import errors
from envfleet.testing import Counter, VectorCounter, first_difference, vector_driven
from tests.conformance.matrix import EVERY, FORK, QUICK, opened


def counter_of(count, mode=AutoresetMode.NEXT_STEP):
    return VectorCounter(tuple(range(3, 3 + count)), mode)


@pytest.mark.parametrize("where", EVERY)
def test_a_worker_gets_its_share_of_one_native_env(where):
    with opened(envfleet.native(counter_of), 4, **where) as envs:
        assert envs.num_envs == 4
        assert envs.single_observation_space.shape == (1,)
        obs, _ = envs.reset(seed=0)
        assert obs[:, 0].tolist() == [0, 0, 0, 0]
        for t in range(1, 4):
            obs, rewards, terminated, _, _ = envs.step(np.zeros(4, np.int64))
            assert obs[:, 0].tolist() == [t] * 4
            assert rewards.tolist() == [t] * 4
        assert terminated[0]


@pytest.mark.parametrize("where", QUICK)
def test_next_step_rows_of_a_native_env_are_marked(where):
    with opened(envfleet.native(counter_of), 4, **where) as envs:
        envs.reset(seed=0)
        valid = []
        for _ in range(8):
            envs.send(np.zeros(4, np.int64))
            batch = envs.recv()
            valid.append(bool(batch.valid[batch.slots.tolist().index(0)]))
    assert valid == [True, True, True, False, True, True, True, False]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("where", QUICK)
def test_a_native_env_in_workers_gives_the_streams_it_gives_alone(where, mode):
    name = mode.name.lower()
    share = functools.partial(counter_of, mode=mode)
    with opened(envfleet.native(share), 4, autoreset=name, **where) as envs:
        sizes = [hi - lo for lo, hi in envs.fleet.bounds]
        got = vector_driven(envs, 20, 0, name)
    slots: list[Any] = []
    for size in sizes:
        slots += vector_driven(share(size), 20, 0, name).slots
    expected = type(got)(source="the vector itself", autoreset=name, slots=tuple(slots))
    difference = first_difference(expected, got)
    assert difference is None, str(difference)


@pytest.mark.parametrize("where", QUICK)
def test_cartpole_with_its_vector_entry_point(where):
    with opened(envfleet.native("CartPole-v1"), 8, **where) as envs:
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (8, 4)
        for _ in range(50):
            obs, rewards, _, _, _ = envs.step(np.ones(8, np.int64))
        assert np.isfinite(obs).all()
        assert rewards.dtype == np.float64


def test_cartpole_native_in_one_worker_equals_gymnasium():
    alone = gymnasium.make_vec("CartPole-v1", 6, vectorization_mode="vector_entry_point")
    expected = vector_driven(alone, 60, 5)
    alone.close()
    with opened(envfleet.native("CartPole-v1"), 6, backend="process", num_workers=1) as envs:
        got = vector_driven(envs, 60, 5)
    difference = first_difference(expected, got)
    assert difference is None, str(difference)


@pytest.mark.parametrize("where", QUICK)
@pytest.mark.parametrize(
    ("env", "ended"),
    [
        (functools.partial(counter_of, 2), [True, False, True, False]),
        (functools.partial(counter_of, 1), [True] * 4),
        (envfleet.native(lambda _: counter_of(2)), [True, False, True, False]),
    ],
    ids=["a function", "a function for one", "native of a fixed size"],
)
def test_a_vector_is_built_as_often_as_it_takes_to_fill_the_slots(env, ended, where):
    if "num_here" in where:
        where = {**where, "num_here": 2}
    with opened(env, 4, **where) as envs:
        assert envs.num_envs == 4
        envs.reset(seed=0)
        for _ in range(3):
            obs, _, terminated, _, _ = envs.step(np.zeros(4, np.int64))
    assert obs[:, 0].tolist() == [3, 3, 3, 3]
    assert terminated.tolist() == ended


@pytest.mark.parametrize("where", [pytest.param(FORK, id="fork")])
def test_envpool_s_environments_live_in_worker_processes(where):
    def build(count):
        import envpool

        warnings.simplefilter("ignore")  # Gymnasium's, about the bounds of its spaces
        return envpool.make_gymnasium("CartPole-v1", num_envs=count)

    with opened(envfleet.native(build), 4, **where) as envs:
        envs.reset(seed=0)
        obs, rewards, *_, infos = envs.step(np.ones(4, np.int64))
    assert obs.shape == (4, 4)
    assert rewards.tolist() == [1.0] * 4
    assert infos["elapsed_step"].tolist() == [1] * 4


def test_a_plain_env_is_no_native_one():
    def plain(count) -> Any:
        return Counter()

    with pytest.raises(errors.EnvfleetError, match=r"[Vv]ector"):
        envfleet.make_vec(envfleet.native(plain), 2, backend="serial")
