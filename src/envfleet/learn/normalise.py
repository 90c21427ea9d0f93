"""Running statistics of observations and returns, kept in one place for all slots.

Law: statistics change only through `update`, never while evaluating, and are part of a checkpoint:
the same batches in the same order give the same numbers, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
_EPSILON = 1e-8


class Moments:
    """Mean and variance of everything seen so far, component by component."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0.0
        self.mean = np.zeros(shape, np.float64)
        self.var = np.ones(shape, np.float64)

    def update(self, batch: Array) -> None:
        """Take in a batch; its first axis is counted."""
        if not len(batch):
            return
        mean, var, count = *_moments(batch), len(batch)
        if not self.count:
            self.count, self.mean, self.var = float(count), mean, var
            return
        total = self.count + count
        shift = mean - self.mean
        squares = self.var * self.count + var * count + shift**2 * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.var, self.count = squares / total, total

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"count": self.count, "mean": self.mean.copy(), "var": self.var.copy()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.count = float(state["count"])
        self.mean, self.var = state["mean"].copy(), state["var"].copy()


def _moments(batch: Array) -> tuple[Array, Array]:
    """Mean and variance over the first axis, as numpy's own give them in half the time."""
    count = len(batch)
    mean = np.add.reduce(batch, 0, np.float64) / count
    off = batch - mean
    off *= off
    return mean, np.add.reduce(off, 0) / count


class ObservationNormaliser:
    """Observations with mean 0 and deviation 1, cut off at `clip`."""

    def __init__(self, shape: tuple[int, ...], *, clip: float = 10.0) -> None:
        self.moments, self.clip = Moments(shape), clip

    def update(self, obs: Array) -> None:
        """Learn from a batch."""
        self.moments.update(obs)

    def __call__(self, obs: Array) -> npt.NDArray[np.float32]:
        """Normalise a batch by what is known so far."""
        scaled = (obs - self.moments.mean) / np.sqrt(self.moments.var + _EPSILON)
        # every step waits for this, and np.clip takes twice as long
        return np.minimum(np.maximum(scaled, -self.clip), self.clip).astype(np.float32)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self.moments.state()

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.moments.load(state)


class RewardScaler:
    """Rewards divided by the deviation of discounted returns, cut off at `clip`."""

    def __init__(self, num_slots: int, gamma: float, *, clip: float = 10.0) -> None:
        self.gamma, self.clip = gamma, clip
        self._returns = np.zeros(num_slots, np.float64)
        self.moments = Moments(())

    def __call__(
        self, rewards: npt.NDArray[np.float64], ended: Flags, valid: Flags
    ) -> npt.NDArray[np.float32]:
        """Learn from one step of all slots, and scale it; rows that are no steps teach nothing."""
        self._returns = np.where(valid, self._returns * self.gamma + rewards, self._returns)
        self.moments.update(self._returns[valid])
        self._returns[ended] = 0.0
        scale = np.sqrt(self.moments.var + _EPSILON)
        return np.clip(rewards / scale, -self.clip, self.clip).astype(np.float32)

    def begin_anew(self) -> None:
        """Every slot has begun a new episode."""
        self._returns[:] = 0.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"returns": self._returns.copy(), "moments": self.moments.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._returns = state["returns"].copy()
        self.moments.load(state["moments"])


def scaled(
    scaler: RewardScaler | None, rewards: npt.NDArray[np.float64], ended: Flags, valid: Flags
) -> npt.NDArray[np.float32]:
    """Rewards of several steps, [step, slot], in the order of steps; as they are without one."""
    if scaler is None:
        return rewards.astype(np.float32)
    return np.stack([scaler(*rows) for rows in zip(rewards, ended, valid, strict=True)])
