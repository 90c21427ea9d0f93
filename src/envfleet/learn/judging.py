"""What a policy says about rows that were collected: log-probabilities and values, all at once.

Arrays are [time, slot]. With a memory, episodes are gone through from what was remembered before
the rollout; otherwise rows are judged some at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from envfleet.learn.agent import Agent
from envfleet.learn.inputs import Leaves
from envfleet.learn.sequences import stretches

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
_ROWS_AT_ONCE = 4096
"""Rows of one forward pass over a rollout: pictures need memory."""


def flattened(arrays: Leaves) -> Leaves:
    """[time, slot] arrays as rows."""
    return tuple(array.reshape(-1, *array.shape[2:]) for array in arrays)


def worth(agent: Agent, leaves: Leaves, states: Tensor, slots: list[int]) -> Floats:
    """Values of observations of these slots."""
    try:
        values: Floats = agent.policy.value(agent.tensors(leaves), states).cpu().numpy()
    except RuntimeError:
        agent.inputs.refuse_outside(leaves, slots)
        raise
    return values


def judged(
    agent: Agent,
    obs: Leaves,
    actions: npt.NDArray[Any],
    masks: Flags | None,
    ended: Flags,
    states: Tensor,
) -> tuple[Floats, Floats]:
    """Log-probabilities of the actions taken and values of the observations."""
    policy = agent.policy
    leaves, taken = agent.tensors(flattened(obs)), agent.tensor(flattened((actions,))[0])
    allowed = None if masks is None else agent.tensor(flattened((masks,))[0])
    log_probs, values = np.zeros((2, ended.size), np.float32)
    cut = None if policy.memories is None else stretches(ended)
    for rows in _some_at_a_time(ended.size) if cut is None else [cut.order]:
        mine = tuple(leaf[rows] for leaf in leaves)
        if cut is None:
            features, _ = policy.features(mine, states)
        else:
            features = policy.unroll(mine, cut, states)
        said, found = policy.judge(features, None if allowed is None else allowed[rows])
        log_probs[rows] = policy.head.log_prob(said, taken[rows]).cpu().numpy()
        values[rows] = found.cpu().numpy()
    return log_probs.reshape(ended.shape), values.reshape(ended.shape)


def _some_at_a_time(count: int) -> list[slice]:
    """All rows in slices that fit into memory; not for policies with a memory."""
    starts = range(0, count, _ROWS_AT_ONCE)
    return [slice(start, start + _ROWS_AT_ONCE) for start in starts]
