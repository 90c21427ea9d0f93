"""Ratings from the results of games, as pure maths.

Elo's model: a player rated d points higher is expected to score 1 / (1 + 10 ** (-d / 400)) of a
game, where a win counts 1 and a draw 1/2. The ratings are those under which the results are most
likely (Bradley and Terry's model, fitted by Newton's method). One drawn game is added to every pair
that met: without it, a player who won all games would be rated infinitely high.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_PER_UNIT = 400 / math.log(10)
"""Elo points of one unit of the logistic model."""
_LONGEST_STEP = 1.0
"""Newton's steps are cut to this: far from the solution they overshoot."""
_PRECISE = 1e-10
_MOST_STEPS = 1_000
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Ratings:
    """Elo points of players, and how sure they are."""

    points: tuple[float, ...]
    errors: tuple[float, ...]
    """Half of the interval that holds the true difference to the reference in 95 of 100 cases."""


def elo(scores: Floats, *, reference: int | None = None, added_draws: float = 1.0) -> Ratings:
    """Rate players by what they scored against each other.

    Args:
        scores: [player, opponent]: wins plus half of the draws.
        reference: The player that is rated 0; None makes the mean 0.
        added_draws: Drawn games that are added to every pair that met.
    """
    met = scores + scores.T > 0
    won = scores + 0.5 * added_draws * met
    games = won + won.T
    strength = np.zeros(len(scores))
    for _ in range(_MOST_STEPS):
        expected = 1 / (1 + np.exp(strength[None] - strength[:, None]))
        pull = (won - games * expected).sum(1)
        spread = _elo_spread(games * expected * (1 - expected))
        step = np.linalg.pinv(spread, hermitian=True) @ pull
        longest = float(np.abs(step).max(initial=0.0))
        strength += step * min(1.0, _LONGEST_STEP / max(longest, _PRECISE))
        if longest < _PRECISE:
            break
    covariance = np.linalg.pinv(_elo_spread(games * expected * (1 - expected)), hermitian=True)
    variance = np.diag(covariance).copy()
    if reference is None:
        strength -= strength.mean()
    else:
        strength -= strength[reference]
        variance += covariance[reference, reference] - 2 * covariance[reference]
    errors = _NORMAL_95 * np.sqrt(np.maximum(variance, 0.0))
    return Ratings(tuple((strength * _PER_UNIT).tolist()), tuple((errors * _PER_UNIT).tolist()))


def _elo_spread(weights: Floats) -> Floats:
    """The curvature of the log-likelihood: a graph's Laplacian."""
    spread: Floats = np.diag(weights.sum(1)) - weights
    return spread
