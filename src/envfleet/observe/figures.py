"""What a training run measures: each figure's name, its curve elsewhere, and its meaning. Pure.

A figure has one name in ``metrics.jsonl``. In TensorBoard and Weights & Biases it is the curve that
users of Stable-Baselines3 know it by, so that runs of both lie in one picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FIGURES", "SECONDS", "Figure", "curves", "figure"]

Figures = Mapping[str, Any]
"""Figures by name; None where there is nothing to tell yet."""

SECONDS = "seconds/"
"""Begins the names of figures that say where the time went; the part's name follows."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity."""

    name: str
    curve: str
    """What TensorBoard and Weights & Biases call it."""
    title: str
    meaning: str
    is_negated: bool = False
    """The curve shows its negative."""


FIGURES: tuple[Figure, ...] = (
    Figure(
        "mean_return",
        "rollout/ep_rew_mean",
        "mean return",
        "mean return of the last 100 episodes",
    ),
    Figure(
        "mean_length",
        "rollout/ep_len_mean",
        "episode length",
        "mean length of the last 100 episodes, in steps",
    ),
    Figure(
        "episodes",
        "rollout/episodes",
        "episodes",
        "episodes that ended in this iteration",
    ),
    Figure(
        "staleness",
        "rollout/staleness",
        "staleness",
        "updates since the policy that collected, mean of all environments",
    ),
    Figure(
        "staleness_max",
        "rollout/staleness_max",
        "highest staleness",
        "updates since the oldest policy that collected",
    ),
    Figure(
        "importance_weight",
        "rollout/importance_weight",
        "importance weight",
        "how much rows of older policies count, on average; 1: as much as others",
    ),
    Figure(
        "value_loss",
        "train/value_loss",
        "value loss",
        "mean squared error of the values against the returns",
    ),
    Figure(
        "policy_loss",
        "train/policy_gradient_loss",
        "policy loss",
        "the clipped objective, to be minimised; its size says little",
    ),
    Figure(
        "entropy",
        "train/entropy_loss",
        "entropy",
        "how undecided the policy is; falls as it learns",
        is_negated=True,
    ),
    Figure(
        "approx_kl",
        "train/approx_kl",
        "KL divergence",
        "how far one iteration moved the policy; above 0.05 it is moving fast",
    ),
    Figure(
        "clip_fraction",
        "train/clip_fraction",
        "clip fraction",
        "share of rows whose probability changed by more than the clip range",
    ),
    Figure(
        "explained_variance",
        "train/explained_variance",
        "explained variance",
        "1: values predict returns exactly; 0 or less: no better than a constant",
    ),
    Figure(
        "learning_rate",
        "train/learning_rate",
        "learning rate",
        "of this iteration",
    ),
    Figure(
        "epochs",
        "train/epochs",
        "epochs",
        "how many were done before `target_kl` stopped them",
    ),
    Figure(
        "env_steps_per_second",
        "time/fps",
        "steps per second",
        "environment steps per second of this iteration: rollout and update",
    ),
    Figure(
        "iteration",
        "time/iterations",
        "iteration",
        "its number, from 1",
    ),
    Figure(
        "seconds",
        "time/seconds",
        "seconds",
        "time since the line before",
    ),
    Figure(
        "evaluation_mean",
        "eval/mean_reward",
        "evaluation",
        "mean return of the evaluation's episodes",
    ),
    Figure(
        "evaluation_std",
        "eval/std_reward",
        "spread of the evaluation",
        "standard deviation of the evaluation's returns",
    ),
)

_OF_GAMES = ("win_rate_", "draw_rate_", "games_")
"""Begin the names of figures of an evaluation that plays games."""

_BY_NAME = {one.name: one for one in FIGURES}


def figure(name: str) -> Figure:
    """What is known of a figure; one that is not in the list is the learner's own."""
    if name.startswith(SECONDS):
        part = name.removeprefix(SECONDS)
        curve = f"time/seconds_{part.replace(' ', '_')}"
        return Figure(name, curve, part, f"seconds of it that were {part}")
    title = name.replace("_", " ")
    if "/" in name:
        return Figure(name, name, title, title)  # a learner that has names of its own for curves
    where = "eval" if name.startswith(_OF_GAMES) else "train"
    return _BY_NAME.get(name) or Figure(name, f"{where}/{name}", title, title)


def curves(figures: Figures) -> dict[str, float]:
    """The points to draw: numbers only, under the names of their curves."""
    points = {}
    for name, value in figures.items():
        if isinstance(value, int | float) and math.isfinite(value):
            known = figure(name)
            points[known.curve] = -value if known.is_negated else value
    return points
