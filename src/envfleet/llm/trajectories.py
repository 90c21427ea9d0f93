"""What a rollout with a language model records: trajectories, turn by turn.

Law: a turn is written once, when it is over, and never changes. Everything else about a trajectory
can be worked out from its turns, its start and its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from envfleet.llm.inference.types import Generation, Message

FailureReason = Literal["engine", "timeout", "parse", "env", "budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """Where the time of one turn went, in seconds; those of the model are in its `Generation`."""

    start_s: float = 0.0
    """When the request was made, counted from the start of the rollout."""
    env_s: float = 0.0
    """In the environment."""
    transport_s: float = 0.0
    """Between the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTurn:
    """One turn: what the environment showed, what the model answered, what came of it."""

    number: int
    """From 0."""
    state: str
    """What the environment showed before the answer; an image is a mark."""
    images: tuple[str, ...] = ()
    """Files of the images, relative to the folder of the run."""
    actions_left: int
    new_messages: tuple[Message, ...]
    """What this turn added to the conversation before the answer."""
    prefill: str = ""
    generation: Generation
    llm_response: str
    """The answer as it was parsed and kept in the conversation."""
    actions: tuple[Any, ...]
    """Those that were carried out."""
    reward: float
    penalty: float = 0.0
    is_valid: bool = True
    """Whether the answer named actions, and only known ones."""
    info: dict[str, Any] = field(default_factory=dict)
    times: TurnTimes = field(default_factory=TurnTimes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFailure:
    """Why a trajectory ended before its time."""

    reason: FailureReason
    error: str


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One episode of one environment, played by the model."""

    env_id: int
    group_id: int
    tag: str
    seed: int
    attempt: int = 0
    """From 0; one more each time a failed trajectory was tried again."""
    turns: list[TrajectoryTurn] = field(default_factory=list)
    final_state: str | None = None
    """What the environment showed in the end; None while it goes on."""
    is_done: bool = False
    """Whether it is over: the episode ended, its turns or actions are used up, or it failed."""
    is_success: bool = False
    failure: TrajectoryFailure | None = None
    is_masked: bool = False
    """Whether it is to be left out of training, by the policy for failures."""
    metrics: dict[str, float] = field(default_factory=dict)
    extra_rewards: dict[str, float] = field(default_factory=dict)
    """What the user's own reward functions gave, by their names."""

    @property
    def reward(self) -> float:
        """The rewards of all turns together, without penalties."""
        return sum(turn.reward for turn in self.turns)

    @property
    def penalty(self) -> float:
        """The penalties of all turns together."""
        return sum(turn.penalty for turn in self.turns)

    @property
    def total_reward(self) -> float:
        """Rewards, penalties and extra rewards together: what training maximises."""
        return self.reward + self.penalty + sum(self.extra_rewards.values())
