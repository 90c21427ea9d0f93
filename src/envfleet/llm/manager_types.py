"""What an `EnvStateManager` shows of its environments, in the form that rollout code reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict


@dataclass(slots=True)
class EnvStatus:
    """How far an episode has come."""

    truncated: bool = False
    """The episode ended without success."""
    terminated: bool = False
    """The episode ended."""
    num_actions: int = 0
    rewards: list[float] = field(default_factory=list)
    """One per turn."""
    seed: int | None = None


class EnvEntry(TypedDict):
    """One environment."""

    tag: str
    group_id: int
    env_id: int
    env: Any
    """The environment itself if it lives in this process, else an `EnvInWorker`."""
    config: Any
    status: EnvStatus
    max_actions_per_traj: int


class Cache(TypedDict):
    """One environment's rollout."""

    env_id: int
    history: list[dict[str, Any]]
    """One entry per turn, and a last one with the state that has not been answered yet."""
    group_id: int
    tag: str
    penalty: float
    metrics: NotRequired[dict[str, float]]
    correct_answer: NotRequired[Any]
    failure: NotRequired[dict[str, Any]]
    """Only if the environment failed: what it was doing, the error, and in which turn."""


@dataclass(frozen=True, slots=True)
class EnvInWorker:
    """Stands for an environment that lives in a worker; its state is in its cache."""

    config: Any
    where: str
