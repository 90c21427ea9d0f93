"""CartPole without velocities in its observations, so a policy needs a memory.

gymnasium.make("benchmarks.cartpole_no_velocity:CartPoleNoVel-v1")
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

SHOWN = [0, 2]
"""Indices of the cart's position and the pole's angle."""

Array = npt.NDArray[np.float32]


class HideVelocities(gymnasium.ObservationWrapper[Array, Any, Array]):
    """Removes the velocities from the observation."""

    def __init__(self, env: gymnasium.Env[Array, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        self.observation_space = spaces.Box(space.low[SHOWN], space.high[SHOWN])

    def observation(self, observation: Array) -> Array:
        """The position and the angle."""
        return observation[SHOWN]


def cartpole_without_velocities(**kwargs: Any) -> gymnasium.Env[Array, Any]:
    """Gymnasium's CartPole without velocities."""
    return HideVelocities(CartPoleEnv(**kwargs))


gymnasium.register(
    "CartPoleNoVel-v1",
    f"{__name__}:{cartpole_without_velocities.__name__}",
    max_episode_steps=500,
)
