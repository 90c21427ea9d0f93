"""Rewards of several objectives: their sum is the reward, and the parts are a field of the info."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envfleet import errors
from envfleet.testing import first_difference, fleet_driven, hand_driven
from tests.conformance.matrix import QUICK, opened


class TwoObjectives(gymnasium.Env[Any, Any]):
    """As the environments of MO-Gymnasium: a reward with two parts, and a space that says so."""

    observation_space = spaces.Box(0, 9, (1,))
    action_space = spaces.Discrete(2)
    reward_space: Any = spaces.Box(-9, 9, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        reward = np.array([self.t, -0.5 * action], np.float32)
        return np.full(1, self.t, np.float32), reward, self.t == 3, False, {"t": self.t}


class Undeclared(TwoObjectives):
    """The same by mistake."""

    reward_space = None


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("where", QUICK)
def test_the_parts_are_a_field_of_every_step(where, mode):
    expected = hand_driven(TwoObjectives, 3, 10, 0, mode)
    assert first_difference(expected, fleet_driven(TwoObjectives, 3, 10, 0, mode, **where)) is None
    with opened(TwoObjectives, 3, autoreset=mode, **where) as envs:
        envs.reset(seed=0)
        _, rewards, _, _, infos = envs.step(np.array([0, 1, 1]))
    assert rewards.tolist() == [1.0, 0.5, 0.5]
    assert infos["vector_reward"].tolist() == [[1.0, 0.0], [1.0, -0.5], [1.0, -0.5]]


def test_without_a_space_for_them_they_are_refused():
    with opened(Undeclared, 1, backend="serial") as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed, match="reward must be one number"):
            envs.step(np.zeros(1, np.int64))
