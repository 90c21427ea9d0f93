"""What an RL² agent observes: the trial, and what it did and got in the step before.

The observation is that of the trial (with its done flag, if there is more than one episode per
task), then the previous action, then the previous reward. Discrete actions are one-hot. All of it
is 0 at the start of a trial, and goes on from one episode of a trial to the next.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import RecordConstructorArgs

from envfleet.engine.options import EnvFn
from envfleet.meta.trial import Obs, VariBadWrapper, make_env

__all__ = ["RL2Wrapper", "make_rl2_env"]


class RL2Wrapper(gymnasium.Wrapper[Obs, Any, Any, Any], RecordConstructorArgs):
    """Adds the previous action and reward to the observations of a trial."""

    env: VariBadWrapper

    def __init__(self, env: VariBadWrapper) -> None:
        """Wrap a trial."""
        RecordConstructorArgs.__init__(self)
        gymnasium.Wrapper.__init__(self, env)
        inner = env.observation_space
        assert isinstance(inner, spaces.Box)
        self._rows: npt.NDArray[np.float32] | None = None
        """One-hot rows of discrete actions."""
        if isinstance(env.action_space, spaces.Discrete):
            width = int(env.action_space.n)
            self._rows, self._start = np.eye(width, dtype=np.float32), int(env.action_space.start)
        else:
            width = int(np.prod(env.action_space.shape or ()))
        self._size, self._wide = inner.shape[0], inner.shape[0] + width + 1
        low = np.concatenate([inner.low, np.full(width, -1.0), [-np.inf]]).astype(np.float32)
        high = np.concatenate([inner.high, np.ones(width), [np.inf]]).astype(np.float32)
        self.observation_space = spaces.Box(low, high)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Start a trial, of the task in `options` if there is one."""
        obs, info = self.env.reset(seed=seed, options=options)
        wide = np.zeros(self._wide, np.float32)
        wide[: self._size] = obs
        return wide, info

    def step(self, action: Any) -> tuple[Obs, Any, bool, bool, dict[str, Any]]:
        """Step the trial."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        wide = np.empty(self._wide, np.float32)
        size = self._size
        wide[:size] = obs
        if self._rows is None:
            wide[size:-1] = np.ravel(action)
        else:
            wide[size:-1] = self._rows[int(action) - self._start]
        wide[-1] = reward
        return wide, reward, terminated, truncated, info


def make_rl2_env(
    env_id: str | EnvSpec | EnvFn, episodes_per_task: int, **kwargs: Any
) -> RL2Wrapper:
    """Make one trial as `make_env` does, as RL² observes it."""
    return RL2Wrapper(make_env(env_id, episodes_per_task, **kwargs))
