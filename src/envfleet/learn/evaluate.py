"""Evaluation on an environment of its own, by fixed seeds, that leaves training as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from envfleet.learn.agent import Act

EVALUATION_SEED = 1_000_000
"""Far from the seeds of training's first resets."""

MAX_STEPS = 100_000
"""Longest an episode may take: an environment without a time limit would never end."""


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
    play: Callable[[], Act],
    env_fn: Callable[[], gymnasium.Env[Any, Any]],
    *,
    episodes: int,
    seed: int = EVALUATION_SEED,
    max_steps: int = MAX_STEPS,
) -> Evaluation:
    """Play episodes one after another; episode i is reset with `seed + i`.

    Args:
        play: Called once per episode, for how to act in it.
        env_fn: Makes the environment.
        episodes: How many.
        seed: Of the first one.
        max_steps: Longest an episode may take.
    """
    env = env_fn()
    returns = []
    try:
        for episode in range(episodes):
            obs, info = env.reset(seed=seed + episode)
            act, total = play(), 0.0
            for _ in range(max_steps):
                obs, reward, terminated, truncated, info = env.step(act(obs, info))
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
