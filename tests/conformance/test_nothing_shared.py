"""What passes between a caller and an environment is a copy, on every backend."""

import numpy as np
import pytest

from envfleet.testing import Counter
from tests.conformance.matrix import QUICK, opened

ZERO = np.zeros(2, np.int64)


class OneInfoForLife(Counter):
    """Reports in one dict, whose parts it changes in place."""

    def __init__(self):
        super().__init__(length=3)
        self.info = {
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
