"""How well an actor does on tasks: the return of each episode of a trial, one trial per task.

Trial i of an evaluation has a seed of its own, so its return is the same whether trials are played
one after another or side by side, and evaluating changes nothing in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from envfleet.errors import NoSuchAttribute
from envfleet.meta.collect import Actor, PlayedTrial, Seconds, TrialPlan, play_many, play_one
from envfleet.meta.parallel import ParallelEnvManager

__all__ = ["TrialResults", "evaluation_plans", "figures_of", "goal_finder", "play"]

_OF_EVALUATION = 1 << 32
"""Keeps the draws of evaluations apart from those of training."""


@dataclass(frozen=True, slots=True, eq=False)
class TrialResults:
    """What an evaluation found; the first axis is the task."""

    tasks: Sequence[Any]
    returns: npt.NDArray[np.float64]
    """Of each episode, [task, episode]."""
    successes: npt.NDArray[np.bool_]
    """Whether the goal was reached, in any episode."""
    total_steps: npt.NDArray[np.int64]
    trials: Sequence[PlayedTrial]

    @classmethod
    def of(cls, trials: Sequence[PlayedTrial], flag_at: int | None, episodes: int) -> TrialResults:
        """Of trials that were played."""
        return cls(
            [trial.task for trial in trials],
            np.stack([trial.episode_returns(flag_at, episodes) for trial in trials]),
            np.array([trial.is_success for trial in trials]),
            np.array([len(trial) for trial in trials]),
            trials,
        )


def evaluation_plans(
    tasks: Sequence[Any],
    seed: int,
    noise: Callable[[np.random.Generator], npt.NDArray[Any]] | None = None,
) -> list[TrialPlan]:
    """One trial per task; `noise` draws what the actions are drawn by, None takes the best ones."""
    plans = []
    for number, task in enumerate(tasks):
        rng = np.random.default_rng([seed, _OF_EVALUATION + number])
        env_seed = int(rng.integers(1 << 31))
        plans.append(TrialPlan(number, task, env_seed, None if noise is None else noise(rng)))
    return plans


@runtime_checkable
class TrialPlayer(Protocol):
    """Plays trials elsewhere than in the environments of this process's fleets."""

    def play(
        self, actor: Any, plans: Sequence[TrialPlan], *, deterministic: bool, seconds: Seconds
    ) -> list[PlayedTrial]:
        """Play trials; the rollouts in the plans' order."""


def play(
    actor: Actor,
    plans: Sequence[TrialPlan],
    env: Any,
    *,
    deterministic: bool,
    seconds: Seconds,
) -> list[PlayedTrial]:
    """Play trials on nodes, on a manager side by side, or in one environment one by one."""
    if isinstance(env, TrialPlayer):
        return env.play(actor, plans, deterministic=deterministic, seconds=seconds)
    if isinstance(env, ParallelEnvManager):
        return play_many(env, actor, plans, deterministic=deterministic, seconds=seconds)
    with seconds.accounted(None):
        return [
            play_one(env, actor, plan, deterministic=deterministic, seconds=seconds)
            for plan in plans
        ]


def goal_finder(manager: ParallelEnvManager) -> Callable[[Any], Sequence[float]] | None:
    """From a task's number to its goal in the plane; None if observations are no places there."""
    try:
        manager.fleet.call("goal_of", [0], slots=[0])
    except NoSuchAttribute:
        return None
    return lambda task: [float(x) for x in manager.fleet.call("goal_of", [task], slots=[0])[0]]


def figures_of(found: TrialResults, split: str, suffix: str = "") -> dict[str, float]:
    """What is logged of it; `split` is train or eval, `suffix` is _sto for drawn actions."""
    means = found.returns.mean(0)
    episodes = {
        f"metrics/return_{split}_episode_{number}{suffix}": float(mean)
        for number, mean in enumerate(means, start=1)
    }
    return episodes | {
        f"metrics/return_{split}_total{suffix}": float(means.sum()),
        f"metrics/success_rate_{split}{suffix}": float(found.successes.mean()),
        f"metrics/total_steps_{split}{suffix}": float(found.total_steps.mean()),
    }
