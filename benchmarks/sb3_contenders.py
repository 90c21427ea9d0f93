"""Vector environments for Stable-Baselines3, stepped alone and under its PPO.

All processes are forked, also where a library would not: slices compare stepping, not starting.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from benchmarks.contenders import Stepped
from benchmarks.workload import Workload, timed
from envfleet.cli.measure import Slice

STEPS = 2048
"""Environment steps between two updates, however many environments there are."""


def fleet_vec_env(work: Workload) -> Stepped:
    """envfleet's `FleetVecEnv`, which decides by itself what runs where."""

    def build() -> Any:
        from envfleet.adapters.sb3 import FleetVecEnv

        return _begun(FleetVecEnv(work.env_fns, start_method="fork"), work)

    return Stepped("auto", "envfleet for SB3, auto", work, build)


def fleet_subproc(work: Workload) -> Stepped:
    """envfleet's `SubprocVecEnv`, in the place of SB3's."""

    def build() -> Any:
        from envfleet.adapters.sb3 import SubprocVecEnv

        return _begun(SubprocVecEnv(work.env_fns, start_method="fork"), work)

    return Stepped("subproc", "envfleet for SB3, SubprocVecEnv", work, build)


def sb3_dummy(work: Workload) -> Stepped:
    """SB3's DummyVecEnv: one environment after another in this process."""

    def build() -> Any:
        from stable_baselines3.common.vec_env import DummyVecEnv

        return _begun(DummyVecEnv(work.env_fns), work)

    return Stepped("sb3-dummy", "SB3 DummyVecEnv", work, build)


def _begun(envs: Any, work: Workload) -> Any:
    envs.seed(work.seed)
    envs.reset()
    return envs


class Learning:
    """SB3's PPO on the vector environment of another contender, with one thread."""

    def __init__(self, stepped: Stepped, work: Workload) -> None:
        self.key, self.label = stepped.key, f"SB3 PPO on {stepped.label}"
        self._stepped, self._work = stepped, work

    def open(self) -> None:
        """Start the environments and build the networks."""
        import torch
        from stable_baselines3 import PPO
        from stable_baselines3.common.logger import Logger

        torch.set_num_threads(1)
        self._stepped.open()
        self._model = PPO(
            "MlpPolicy",
            self._stepped.envs,
            n_steps=STEPS // self._work.num_envs,
            batch_size=256,
            n_epochs=4,
            seed=self._work.seed,
            device="cpu",
        )
        self._model.set_logger(Logger(None, []))  # otherwise `learn` would open one each time

    def run(self, seconds: float) -> Slice:
        """Collect and learn."""
        return timed(self._iterate, seconds)

    def _iterate(self) -> int:
        self._model.learn(STEPS, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]
        return STEPS

    def close(self) -> None:
        """Close the environments."""
        self._stepped.close()


GRID_WORLD: dict[str, Any] = {
    "size": 7,
    "agents": [{"name": "alpha", "fov_size": 5}],
    "target_config": {"movement_speed": 1, "box_cells": 3},
    "enable_obstacles": True,
    "num_obstacles": 3,
}
"""The settings of `examples/custom_env_main.py`."""


def grid_world() -> gymnasium.Env[Any, Any]:
    """The grid world as one environment, one step of all its agents at a time."""
    from envfleet.multiagent import FlattenMultiAgentWrapper, GridWorldEnvMultiAgent

    return FlattenMultiAgentWrapper(GridWorldEnvMultiAgent(**GRID_WORLD))
