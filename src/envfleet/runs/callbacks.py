"""What a run tells while it works and at its end, and who it tells: `RunCallback`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.observe.events import Event

__all__ = ["Evaluation", "EvaluationStopped", "Iteration", "RunCallback", "RunOutcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration did."""

    number: int
    """From 1."""
    of: int
    env_steps: int
    """Made by the run so far."""
    episodes: list[tuple[float, int]] = field(default_factory=list)
    """Return and length of those that ended in it."""
    mean_return: float | None = None
    """Of the last hundred episodes; None before the first one ended."""
    mean_length: float | None = None
    """Of the same episodes, in steps."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What the job measured itself: losses, for example."""
    env_steps_per_second: float = 0.0
    """Of this iteration."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What the time of this process went into so far."""
    incidents: int = 0
    """Failures of environments since this process began."""
    verdict: str = ""
    """What takes most of the time so far, and what to try; may be empty."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Returns of complete episodes."""

    returns: tuple[float, ...]
    lost: tuple[str, ...] = ()
    """Why other episodes have no return: their environments failed."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured besides, by name."""

    @property
    def mean(self) -> float:
        """The mean of the returns."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Their standard deviation."""
        with np.errstate(invalid="ignore"):  # infinite returns have none, and nan says so
            return float(np.std(self.returns))


class EvaluationStopped(Exception):
    """The run was asked to stop in the middle of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    run_dir: Path
    env_steps: int
    new_steps: int
    """Made by this process."""
    seconds: float
    best_return: float | None
    """The best mean of an evaluation."""
    last_evaluation: Evaluation | None
    failed_evaluations: int
    """Evaluations of this process that completed no episode."""
    incidents: int
    shares: dict[str, float]
    """The share of the time that each part took."""
    verdict: str
    """What took most of it, and what to try."""
    is_stopped: bool
    """Whether the callback ended it early."""
    report: Path
    """The report page."""

    @property
    def env_steps_per_second(self) -> float:
        """Over all of this process's time, evaluation and checkpoints included."""
        return self.new_steps / self.seconds if self.seconds else 0.0


class RunCallback:
    """Is told what happens in a run. Override what you need; the base class ignores everything."""

    def resumed(self, best: float | None) -> None:
        """The run goes on; its best evaluation so far had this mean. Called before `begun`."""

    def kept_by(self, methods: tuple[str, ...]) -> None:
        """How checkpoints keep the environments: own, mujoco, pickle, replay.

        Several if slots differ, none if they cannot be kept. Called before `begun`, and again at
        the checkpoint at which that changes; not at all in runs that have none to keep.
        """

    def begun(self, envs: Any, start_steps: int) -> None:
        """The environments are open; `start_steps` were made before this process."""

    def decided(self, event: Event) -> None:
        """The job has decided to do work elsewhere than before, such as without a node."""

    def iterated(self, iteration: Iteration) -> None:
        """An iteration is done."""

    def evaluating(self, env_steps: int) -> None:
        """An evaluation begins, which may take a while."""

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """An evaluation is done."""

    def should_stop(self) -> bool:
        """Asked after every iteration and before every step of an evaluation.

        True saves and ends the run. An evaluation that was cut off or left out is made when the
        run goes on.
        """
        return False
