"""How much better than expected every action was: generalised advantage estimation, as pure maths.

Arrays are [time, slot]. Law: what lies behind an end never leaks into what was before it, a
truncated episode is worth what its true last observation promises, and a row that is no transition
(its environment was lost) changes nothing but ends what came before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


def successor_values(
    values: Floats,
    last_values: Floats,
    terminated: Flags,
    truncated: Flags,
    final_values: Floats,
) -> Floats:
    """The value of each row's successor.

    Args:
        values: Of the observation of each row.
        last_values: Of the observations after the last row, one per slot.
        terminated: Where an episode ended by itself: there is nothing to come.
        truncated: Where it was cut off.
        final_values: Of the true last observation, read only where `truncated`.
    """
    following = np.concatenate((values[1:], last_values[None]))
    following = np.where(truncated, final_values, following)
    return np.where(terminated, np.float32(0), following).astype(np.float32)


def advantages(
    rewards: Floats,
    values: Floats,
    successors: Floats,
    ended: Flags,
    valid: Flags,
    *,
    gamma: float,
    gae_lambda: float,
    weights: Floats | None = None,
) -> Floats:
    """Generalised advantage estimates; returns are these plus `values`.

    Rows that are not `valid` have none and give none to those before them. `weights` are for
    actions that an older policy took: clipped at 1, they make V-trace of the estimates and of the
    returns (Espeholt et al., 2018).
    """
    estimates = np.zeros_like(rewards)
    later = np.zeros_like(rewards[0])
    surprise = np.where(valid, rewards + np.float32(gamma) * successors - values, np.float32(0))
    decay = np.where(ended, np.float32(0), np.float32(gamma * gae_lambda))
    if weights is not None:
        surprise, decay = weights * surprise, weights * decay
    for time in range(len(rewards) - 1, -1, -1):
        estimates[time] = later = surprise[time] + decay[time] * later
    return estimates


def explained_variance(predicted: Floats, observed: Floats) -> float:
    """1 if values predict returns exactly, 0 if no better than a constant, below 0 if worse."""
    if not observed.size:
        return float("nan")
    spread = _advantage_spread(observed)
    return float("nan") if spread == 0 else 1.0 - _advantage_spread(observed - predicted) / spread


def _advantage_spread(numbers: Floats) -> float:
    """The variance times the number of values, in a fifth of numpy's time."""
    off = (numbers - numbers.mean()).reshape(-1)
    return float(off.dot(off))
