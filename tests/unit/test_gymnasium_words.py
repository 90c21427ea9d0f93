"""make_vec takes what gymnasium.make_vec takes, or answers with the right word."""

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RescaleObservation, TimeLimit

import envfleet
from envfleet import errors
from envfleet.testing import Counter
from tests.conformance.matrix import FORK, opened

SERIAL = {"backend": "serial"}


def test_keywords_and_wrappers_reach_the_environments_as_with_gymnasium():
    limit = functools.partial(TimeLimit, max_episode_steps=2)
    scale = functools.partial(RescaleObservation, min_obs=np.float32(0), max_obs=np.float32(1))
    given: dict[str, Any] = {
        "wrappers": [limit, scale],
        "render_mode": "rgb_array",
        "goal_velocity": 0.01,
    }
    theirs: Any = gymnasium.make_vec("MountainCarContinuous-v0", 3, "sync", **given)
    with opened("MountainCarContinuous-v0", 3, vectorization_mode="sync", **given) as ours:
        assert "backend='serial' was asked for" in ours.plan
        for envs in (theirs, ours):
            assert envs.get_attr("goal_velocity") == (0.01,) * 3
            assert envs.render_mode == "rgb_array"
        assert theirs.reset(seed=0)[0].tolist() == ours.reset(seed=0)[0].tolist()
        for _ in range(5):
            actions = np.ones((3, 1), np.float32)
            one, other = theirs.step(actions), ours.step(actions)
            for column in range(4):
                assert one[column].tolist() == other[column].tolist()
    theirs.close()


def test_a_time_limit_is_a_keyword_too():
    with opened("CartPole-v1", 2, max_episode_steps=1, **SERIAL) as envs:
        envs.reset(seed=0)
        assert envs.step(np.zeros(2, np.int64))[3].all()


def test_wrappers_go_around_functions_in_workers():
    wrappers = [functools.partial(TimeLimit, max_episode_steps=1)]
    with opened([Counter, Counter], wrappers=wrappers, **FORK) as envs:
        envs.reset(seed=0)
        assert envs.step(np.zeros(2, np.int64))[3].all()


def test_gymnasium_s_words_are_ours():
    words = {"context": "fork", "autoreset_mode": "SameStep", "copy": False, "shared_memory": True}
    with opened("CartPole-v1", 2, vectorization_mode="async", vector_kwargs=words) as envs:
        assert "worker process" in envs.plan
        assert envs.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.SAME_STEP
    mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    with opened("CartPole-v1", 2, vectorization_mode=mode, max_episode_steps=7, **SERIAL) as envs:
        assert envs.get_attr("max_episode_steps") == (7, 7)
        assert envs.fleet.facts[0].native


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vectorization_mode": "ray"}, "must be one of"),
        ({"vectorization_mode": "async", "backend": "serial"}, "means backend='process' here"),
        ({"vector_kwargs": {"worker": print}}, "workers run the fleet's own loop"),
        ({"vector_kwargs": {"shared_memory": False}}, "always travel in shared memory"),
        ({"vector_kwargs": {"context": "spawn"}, "start_method": "fork"}, "leave one of them out"),
        ({"vector_kwargs": {"gravity": 1}}, "give an environment's arguments to make_vec itself"),
        ({"backnd": "serial"}, "did you mean 'backend'"),
        ({"step_timeout": 3}, "did you mean 'step_timeout_s'"),
        ({"gravity": 1, "env_kwargs": {"gravity": 1}}, "'gravity' was given twice"),
        ({"wrappers": TimeLimit}, "wrappers must be a sequence"),
        ({"wrappers": [TimeLimit], "vectorization_mode": "vector_entry_point"}, "natively"),
    ],
)
def test_words_without_a_counterpart_are_answered(given, said):
    with pytest.raises(errors.ConfigError, match=said):
        envfleet.make_vec("CartPole-v1", 2, **given)
