"""CartPole without its velocities: what an observation lacks has to be remembered.

gymnasium.make("benchmarks.partial:CartPoleNoVel-v1")
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

SHOWN = [0, 2]
"""Where the cart is, and how the pole leans."""

Array = npt.NDArray[np.float32]


class OnlyPlaces(gymnasium.ObservationWrapper[Array, Any, Array]):
    """Hides how fast things move."""

    def __init__(self, env: gymnasium.Env[Array, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        self.observation_space = spaces.Box(space.low[SHOWN], space.high[SHOWN])

    def observation(self, observation: Array) -> Array:
        """Places and angles."""
        return observation[SHOWN]


def cartpole_without_velocities(**kwargs: Any) -> gymnasium.Env[Array, Any]:
    """Gymnasium's CartPole, partly hidden."""
    return OnlyPlaces(CartPoleEnv(**kwargs))


gymnasium.register(
    "CartPoleNoVel-v1",
    f"{__name__}:{cartpole_without_velocities.__name__}",
    max_episode_steps=500,
)
