"""If an environment returns something malformed, the error names its slot."""

import numpy as np
import pytest

import envfleet
from envfleet.testing import Counter
from tests.conformance.matrix import QUICK


class Malformed(Counter):
    """Its third step, or its second reset, returns something malformed."""

    def __init__(self, at, what):
        super().__init__(length=None)
        self.at, self.what, self.resets = at, what, 0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if self.at == "step" and self.t == 3:
            reward = self.what.get("reward", reward)
            terminated = self.what.get("terminated", terminated)
            info = self.what.get("info", info)
        return obs, reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        obs, info = super().reset(seed=seed, options=options)
        if self.at == "reset" and self.resets == 2:
            info = self.what.get("info", info)
        return obs, info


WRONG = [
    pytest.param("step", {"info": [1, 2]}, id="a list as info"),
    pytest.param("step", {"info": "hello"}, id="a text as info"),
    pytest.param("step", {"terminated": np.array([True, False])}, id="two flags"),
    pytest.param("step", {"reward": None}, id="no reward"),
    pytest.param("step", {"reward": "much"}, id="a text as reward"),
]


@pytest.mark.parametrize(("at", "what"), WRONG)
@pytest.mark.parametrize("where", QUICK)
def test_a_malformed_step_is_its_own_slots_fault(where, at, what):
    env_fns = [lambda: Counter(length=None)] * 4
    env_fns[1] = lambda: Malformed(at, what)
    where = {**where, "num_workers": 1 + ("num_here" in where)}
    with envfleet.make_vec(env_fns, **where) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(4, int))
        envs.step(np.zeros(4, int))
        with pytest.raises(envfleet.errors.EnvFailed) as caught:
            envs.step(np.zeros(4, int))
        assert caught.value.slot == 1
        envs.reset(options={"reset_mask": np.array([False, True, False, False])})
        assert envs.step(np.zeros(4, int))[0][:, 0].tolist() == [4, 1, 4, 4]


@pytest.mark.parametrize("where", QUICK)
def test_a_malformed_reset_is_its_own_slots_fault(where):
    env_fns = [lambda: Counter(length=None)] * 3
    env_fns[1] = lambda: Malformed("reset", {"info": [1]})
    where = {**where, "num_workers": 1 + ("num_here" in where)}
    with envfleet.make_vec(env_fns, **where) as envs:
        envs.reset(seed=0)
        with pytest.raises(envfleet.errors.EnvFailed) as caught:
            envs.reset(seed=0)
        assert caught.value.slot == 1
        envs.send(np.zeros(2, int), [0, 2])
        assert envs.recv().obs[:, 0].tolist() == [1, 1]
