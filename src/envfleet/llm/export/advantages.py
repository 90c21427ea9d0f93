"""How much better a trajectory did than others of its group. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from envfleet.errors import ConfigError
from envfleet.llm.trajectories import Trajectory

Normalisation = Literal["identity", "mean", "mean_std"]
Scores = npt.NDArray[np.float64]
_SMALLEST_SPREAD = 1e-6


def advantages_of(
    trajectories: Sequence[Trajectory], method: Normalisation = "mean_std"
) -> list[float | None]:
    """The advantage of each trajectory; None for one that is masked or not over yet.

    Args:
        trajectories: With all the members of their groups.
        method: "identity" takes total rewards as they are, "mean" subtracts the
            mean of the group, "mean_std" also divides by its standard deviation (of a sample, as
            most trainers do). A group without any spread has advantages of 0.
    """
    if method not in get_args(Normalisation):
        raise ConfigError(
            f"advantages are one of {', '.join(get_args(Normalisation))}, not {method!r}"
        )
    groups: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(trajectories):
        if is_trained_on(one):
            groups[one.group_id].append(place)
    found: list[float | None] = [None] * len(trajectories)
    for places in groups.values():
        scores = np.array([trajectories[place].total_reward for place in places])
        for place, value in zip(places, _normalised(scores, method), strict=True):
            found[place] = float(value)
    return found


def is_trained_on(trajectory: Trajectory) -> bool:
    """Whether it is over, has an answer in it, and was not masked."""
    return trajectory.is_done and not trajectory.is_masked and bool(trajectory.turns)


def _normalised(scores: Scores, method: Normalisation) -> Scores:
    if method == "identity":
        return scores
    around_zero: Scores = scores - scores.mean()
    if method == "mean":
        return around_zero
    spread = float(scores.std(ddof=1)) if len(scores) > 1 else 0.0
    if spread < _SMALLEST_SPREAD:
        return np.zeros_like(scores)
    around_zero /= spread + _SMALLEST_SPREAD
    return around_zero
