"""The ids of the meta-RL environments, and classic environments of which a part is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv

_ROOM = "envfleet.meta"
# id without its version: entry point, time limit, keyword arguments
ENVIRONMENTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "PointRobot": ("navigation:PointEnv", 60, {"rules": "PointRobot"}),
    "PointRobotSparse": (
        "navigation:SparsePointEnv",
        60,
        {"rules": "PointRobotSparse", "goal_radius": 0.2},
    ),
    "Wind": (
        "navigation:SparsePointEnv",
        75,
        {"rules": "Wind", "goal_radius": 0.03, "task_seed": 1337},
    ),
    "GridNavi": ("navigation:GridNavi", 15, {}),
    "HalfCheetahVel": ("locomotion:HalfCheetahVel", 200, {}),
    "HalfCheetahDir": ("locomotion:HalfCheetahDir", 200, {}),
    "CheetahDir": ("locomotion:HalfCheetahDir", 200, {}),
    "AntDir": ("locomotion:AntDir", 200, {}),
    "AntGoal": ("locomotion:AntGoal", 200, {}),
    "HumanoidDir": ("locomotion:HumanoidDir", 200, {}),
    "Walker2DRandParams": ("locomotion:Walker2DRandParams", 200, {}),
    "HopperRandParams": ("locomotion:HopperRandParams", 200, {}),
    "Pendulum-P": ("registered:partly_seen_pendulum", 200, {"seen": (0, 1)}),
    "Pendulum-V": ("registered:partly_seen_pendulum", 200, {"seen": (2,)}),
    "CartPole-P": ("registered:partly_seen_cart_pole", 200, {"seen": (0, 2)}),
    "CartPole-V": ("registered:partly_seen_cart_pole", 200, {"seen": (1, 3)}),
}


def register_all() -> None:
    """Make the ids known to Gymnasium; called once, when the package is imported."""
    for name, (entry_point, limit, kwargs) in ENVIRONMENTS.items():
        gymnasium.register(
            f"{name}-v0", f"{_ROOM}.{entry_point}", max_episode_steps=limit, kwargs=kwargs
        )


class PartlySeen(gymnasium.ObservationWrapper[npt.NDArray[Any], Any, npt.NDArray[Any]]):
    """Shows some numbers of the observation only."""

    def __init__(self, env: gymnasium.Env[npt.NDArray[Any], Any], seen: Sequence[int]) -> None:
        """`seen` are the places of these numbers."""
        super().__init__(env)
        self._seen = list(seen)
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        low, high = space.low[self._seen], space.high[self._seen]
        self.observation_space = spaces.Box(low, high, dtype=np.float32)

    def observation(self, observation: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The numbers that are seen."""
        return observation[self._seen]


def partly_seen_pendulum(seen: Sequence[int], **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Gymnasium's pendulum, of which the angle or the velocity is seen."""
    return PartlySeen(PendulumEnv(**kwargs), seen)


def partly_seen_cart_pole(seen: Sequence[int], **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Gymnasium's pole on a cart, of which positions or velocities are seen."""
    return PartlySeen(CartPoleEnv(**kwargs), seen)
