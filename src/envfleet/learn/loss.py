"""PPO's loss over one minibatch, and its gradient by autograd.

    loss = value weight * squared value error - clipped objective - entropy weight * entropy

`fast/gradients.py` computes the same gradient without autograd for small networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from envfleet.learn.networks import ActorCritic, Features


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The weights of the parts of the loss, and how far the policy may move."""

    clip: float
    value: float
    entropy: float
    clips_values: bool


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Rows to learn from, with what was computed when they were collected."""

    leaves: tuple[Tensor, ...]
    actions: Tensor
    allowed: Tensor | None
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.actions)

    def at(self, where: Tensor) -> TrainingRows:
        """Some rows, by their numbers or by a flag for each."""
        if where.dtype is torch.bool:
            where = where.nonzero()[:, 0]
        return TrainingRows(
            tuple(leaf.index_select(0, where) for leaf in self.leaves),
            self.actions.index_select(0, where),
            None if self.allowed is None else self.allowed.index_select(0, where),
            self.log_probs.index_select(0, where),
            self.values.index_select(0, where),
            self.advantages.index_select(0, where),
            self.returns.index_select(0, where),
        )

    def gather(self, where: Tensor, room: TrainingRows) -> None:
        """Copy the rows with these numbers into `room`, which has as many."""
        for mine, theirs in zip(self._tensors, room._tensors, strict=True):
            torch.index_select(mine, 0, where, out=theirs)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        numbers = (self.actions, self.log_probs, self.values, self.advantages, self.returns)
        return (*self.leaves, *numbers, *(() if self.allowed is None else (self.allowed,)))

    def split(self, size: int) -> list[TrainingRows]:
        """All rows, `size` at a time."""
        if len(self) <= size:
            return [self] if len(self) else []
        leaves = zip(*(torch.split(leaf, size) for leaf in self.leaves), strict=True)
        numbers = (self.log_probs, self.values, self.advantages, self.returns)
        columns = [torch.split(one, size) for one in (self.actions, *numbers)]
        allowed: Sequence[Tensor | None] = [None] * len(columns[0])
        if self.allowed is not None:
            allowed = torch.split(self.allowed, size)
        return [
            TrainingRows(mine, actions, may, *rest)
            for mine, may, actions, *rest in zip(leaves, allowed, *columns, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LossGradient:
    """The gradient of a minibatch, and what its figures are computed from."""

    gradients: Sequence[Tensor]
    log_ratio: Tensor
    gain: Tensor
    value_error: Tensor
    """Value estimates minus returns."""
    said: Tensor

    @torch.no_grad()
    def figures(self, policy: ActorCritic, clip: float) -> Tensor:
        """Policy loss, value loss, entropy, KL, share of clipped rows."""
        ratio = self.log_ratio.exp()
        objective = torch.min(self.gain * ratio, self.gain * ratio.clamp(1 - clip, 1 + clip))
        each = (
            -objective,
            self.value_error.square(),
            policy.head.entropy(self.said),
            self._moved(),
            (ratio - 1).abs() > clip,
        )
        return torch.stack(each).mean(1)

    @torch.no_grad()
    def kl(self) -> Tensor:
        """An unbiased estimate of how far the policy has moved since it collected the rows."""
        return self._moved().mean()

    def _moved(self) -> Tensor:
        return self.log_ratio.exp() - 1 - self.log_ratio


def by_autograd(
    policy: ActorCritic,
    parameters: Sequence[Tensor],
    features: Features,
    rows: TrainingRows,
    weights: LossWeights,
) -> LossGradient:
    """The gradient for any policy; `features` are its bodies' inputs, with their graph."""
    said, values = policy.judge(features, rows.allowed)
    log_ratio = policy.head.log_prob(said, rows.actions) - rows.log_probs
    ratio, gain = log_ratio.exp(), normalised(rows.advantages)
    clip = weights.clip
    objective = torch.min(gain * ratio, gain * ratio.clamp(1 - clip, 1 + clip))
    error = values - rows.returns
    if weights.clips_values:
        near = rows.values + (values - rows.values).clamp(-clip, clip) - rows.returns
        error = torch.where(error.square() >= near.square(), error, near)
    loss = weights.value * error.square().mean() - objective.mean()
    if weights.entropy:
        loss = loss - weights.entropy * policy.head.entropy(said).mean()
    gradients = torch.autograd.grad(loss, parameters)
    return LossGradient(gradients, log_ratio.detach(), gain, error.detach(), said.detach())


def normalised(advantages: Tensor) -> Tensor:
    """Advantages with mean 0 and deviation 1, if there are several."""
    if len(advantages) < 2:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)
