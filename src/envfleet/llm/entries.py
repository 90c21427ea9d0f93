"""What a manager knows of its environments, in the form that rollout code reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict


@dataclass(slots=True)
class EnvStatus:
    """How far an episode has come."""

    truncated: bool = False
    """Ended without success."""
    terminated: bool = False
    """Ended."""
    num_actions: int = 0
    rewards: list[float] = field(default_factory=list)
    """One per turn."""
    seed: int | None = None


class Entry(TypedDict):
    """One environment."""

    tag: str
    group_id: int
    env_id: int
    env: Any
    """The environment itself where it lives in this process, else an `Elsewhere`."""
    config: Any
    status: EnvStatus
    max_actions_per_traj: int


class Cache(TypedDict):
    """One environment's rollout."""

    env_id: int
    history: list[dict[str, Any]]
    """One entry per turn, and a last one with the state that nobody has answered yet."""
    group_id: int
    tag: str
    penalty: float
    metrics: NotRequired[dict[str, float]]
    correct_answer: NotRequired[Any]
    failure: NotRequired[dict[str, Any]]
    """Only if the environment failed: what it was doing, the error, and in which turn."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands for an environment that lives in a worker; what it shows is in its cache."""

    config: Any
    where: str
