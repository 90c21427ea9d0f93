"""What a run tells whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass, field

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.learn.accounting import Setup, verdict_so_far
from envfleet.learn.evaluate import Evaluation
from envfleet.learn.ppo import Learned


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration did."""

    number: int
    """From 1."""
    of: int
    env_steps: int
    episodes: list[tuple[float, int]]
    """Return and length of those that ended."""
    mean_return: float | None
    """Of the last hundred episodes; None before the first one ended."""
    learned: Learned
    seconds: dict[str, float]
    """Where the time of this process went so far."""
    mean_length: float | None = None
    """Of the same episodes, in steps."""
    env_steps_per_second: float = 0.0
    """Of this iteration: its rollout and its update."""
    incidents: int = 0
    """Failures of the fleet since this process began."""
    setup: Setup = field(default_factory=Setup)

    @property
    def verdict(self) -> str:
        """What takes most of the time so far, and what to do about it; may be empty."""
        return verdict_so_far(self.seconds, self.setup)


class Watcher:
    """Is told what happens in a run; the base class does not care."""

    def resumed(self, best: float | None) -> None:
        """It goes on with a run whose best evaluation had this mean; told before `begun`."""

    def kept_by(self, methods: tuple[str, ...]) -> None:
        """How checkpoints keep the environments: own, mujoco, pickle, replay; told before `begun`.

        Several if slots differ, none if they cannot be kept.
        """

    def begun(self, envs: FleetVectorEnv, start_steps: int) -> None:
        """The environments are there; `start_steps` have been made before."""

    def iterated(self, iteration: Iteration) -> None:
        """A rollout and an update are done."""

    def evaluating(self, env_steps: int) -> None:
        """The policy is being looked at, which may take a while."""

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """The policy has been looked at."""

    def should_stop(self) -> bool:
        """Asked after every iteration and before every step of an evaluation.

        True saves and ends the run; an evaluation that was cut off, or left out, is made up for
        when the run goes on.
        """
        return False
