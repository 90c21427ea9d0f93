"""Are two rollouts with a model the same? Everything but times counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from envfleet.llm.inference.types import GenerationTimes
from envfleet.llm.trajectories import Trajectory, TurnTimes
from envfleet.testing.values import digest, value_difference


def without_times(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as plain data, with all times at zero."""
    timeless = [
        replace(
            turn, times=TurnTimes(), generation=replace(turn.generation, times=GenerationTimes())
        )
        for turn in trajectory.turns
    ]
    return asdict(replace(trajectory, turns=timeless))


def rollout_digest(trajectories: Iterable[Trajectory]) -> str:
    """A checksum that is the same for equal rollouts, in every process."""
    return f"{digest([without_times(one) for one in trajectories]):08x}"


def trajectory_difference(expected: Sequence[Trajectory], got: Sequence[Trajectory]) -> str | None:
    """A sentence on the first difference between two rollouts; None if they are equal."""
    if len(expected) != len(got):
        return f"one rollout has {len(expected)} trajectories and the other {len(got)}"
    for left, right in zip(expected, got, strict=True):
        found = value_difference(without_times(left), without_times(right))
        if found is not None:
            return (
                f"environment {left.env_id} ({left.tag}): {found.path} is {found.expected!r:.80} "
                f"in one rollout and {found.got!r:.80} in the other"
            )
    return None
