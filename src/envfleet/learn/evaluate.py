"""Evaluation on an environment of its own, by fixed seeds, that leaves training as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

EVALUATION_SEED = 1_000_000
"""Far from the seeds of training's first resets."""

MAX_STEPS = 100_000
"""Longest an episode may take: an environment without a time limit would never end."""

Act = Callable[[npt.NDArray[Any]], Any]
"""From one observation to one action."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Returns of whole episodes."""

    returns: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Their standard deviation."""
        return float(np.std(self.returns))


def evaluate(
    act: Act,
    env_fn: Callable[[], gymnasium.Env[Any, Any]],
    *,
    episodes: int,
    seed: int = EVALUATION_SEED,
    max_steps: int = MAX_STEPS,
) -> Evaluation:
    """Play episodes one after another; episode i is reset with `seed + i`."""
    env = env_fn()
    returns = []
    try:
        for episode in range(episodes):
            obs, _ = env.reset(seed=seed + episode)
            total = 0.0
            for _ in range(max_steps):
                obs, reward, terminated, truncated, _ = env.step(act(obs))
                total += float(reward)
                if terminated or truncated:
                    break
            else:
                warnings.warn(
                    f"an evaluation episode was cut off after {max_steps} steps; give the "
                    "environment a time limit",
                    RuntimeWarning,
                    stacklevel=2,
                )
            returns.append(total)
    finally:
        env.close()
    return Evaluation(tuple(returns))
