"""The caller and an environment exchange copies, on every backend."""

from typing import Any

import numpy as np
import pytest

from envfleet.errors import EnvFailed
from envfleet.testing import Counter
from tests.conformance.matrix import QUICK, opened

ZERO = np.zeros(2, np.int64)


class OneInfoForLife(Counter):
    """Always returns the same info dict and changes it in place."""

    def __init__(self):
        super().__init__(length=3)
        self.info: dict[str, Any] = {
            "array": np.zeros(2),
            "long": np.zeros(300),
            "list": [0],
            "deep": {"array": np.zeros(2), "number": 0},
        }

    def report(self):
        info = self.info
        info["array"][:] = info["long"][:] = info["deep"]["array"][:] = self.t
        info["list"][0] = info["deep"]["number"] = self.t
        return info

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, self.report()

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self.report()


def assert_tells(info, t):
    assert info["array"].tolist() == [t] * 2
    assert info["long"].tolist() == [t] * 300
    assert info["list"] == [t]
    assert info["deep"]["array"].tolist() == [t] * 2
    assert info["deep"]["number"] == t


@pytest.mark.parametrize("where", QUICK)
def test_the_final_info_is_taken_over_before_the_reset(where):
    with opened(OneInfoForLife, 2, autoreset="same_step", **where) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.send(ZERO)
            batch = envs.recv()
    assert batch.terminated.all()
    for info in batch.each_info:
        assert_tells(info["final_info"], 3)
        assert_tells(info, 0)


@pytest.mark.parametrize("where", QUICK)
def test_what_an_info_told_is_not_changed_by_later_steps(where):
    with opened(OneInfoForLife, 2, **where) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        first = envs.recv()
        told = first.each_info
        envs.send(ZERO)
        envs.recv()
    for info in (*told, *first.each_info):
        assert_tells(info, 1)
    assert first.infos["list"].tolist() == [[1], [1]]


class ChangesWhatItIsGiven(Counter):
    """Removes items from its options and arguments, at any depth."""

    def __init__(self):
        super().__init__(length=2)
        self.config = {}

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs, info | {"tasks": self.use(options["deep"]["tasks"]) if options else -1}

    def use(self, tasks):
        tasks.pop()
        return len(tasks)


@pytest.mark.parametrize("where", QUICK)
def test_slots_do_not_share_options(where):
    options = {"deep": {"tasks": [1, 2, 3]}}
    with opened(ChangesWhatItIsGiven, 3, **where) as envs:
        _, info = envs.reset(seed=0, options=options)
        _, again = envs.reset(seed=0, options=[options] * 3)
    assert info["tasks"].tolist() == again["tasks"].tolist() == [2, 2, 2]
    assert options == {"deep": {"tasks": [1, 2, 3]}}


@pytest.mark.parametrize("where", QUICK)
def test_a_queued_plan_is_not_changed_by_its_caller(where):
    options = {"deep": {"tasks": [1, 2, 3]}}
    with opened(ChangesWhatItIsGiven, 3, **where) as envs:
        envs.reset(seed=0)
        envs.queue_reset(options=options)
        options["deep"]["tasks"].append(4)
        for _ in range(3):
            info = envs.step(np.zeros(3, np.int64))[4]
    assert info["tasks"].tolist() == [2, 2, 2]
    assert options == {"deep": {"tasks": [1, 2, 3, 4]}}


@pytest.mark.parametrize("where", QUICK)
def test_a_replay_knows_the_options_as_they_were(where):
    """The record of an episode's start is a copy too."""
    options = {"deep": {"tasks": [1, 2, 3]}}
    with opened(Failing, 2, **where) as envs:
        envs.reset(seed=0, options=options)
        options["deep"]["tasks"].clear()
        with pytest.raises(EnvFailed):
            envs.step(ZERO)
        assert envs.incidents[0].options == {"deep": {"tasks": [1, 2, 3]}}


class Failing(ChangesWhatItIsGiven):
    def step(self, action):
        raise ValueError


@pytest.mark.parametrize("where", QUICK)
def test_slots_do_not_share_arguments(where):
    tasks = [1, 2, 3]
    with opened(ChangesWhatItIsGiven, 3, **where) as envs:
        envs.reset(seed=0)
        assert envs.call("use", tasks) == (2, 2, 2)
        assert envs.call("use", tasks=tasks) == (2, 2, 2)
    assert tasks == [1, 2, 3]


@pytest.mark.parametrize("where", QUICK)
def test_slots_do_not_share_attributes_that_are_set(where):
    config = {"deep": [1]}
    with opened(ChangesWhatItIsGiven, 3, **where) as envs:
        envs.reset(seed=0)
        envs.set_attr("config", config)
        config["deep"].append(2)
        assert envs.get_attr("config") == ({"deep": [1]},) * 3
        if where["backend"] != "process":
            one, two, three = (found["deep"] for found in envs.get_attr("config"))
            assert one is not two
            assert two is not three
