"""The gradient of PPO's loss over one minibatch, in two ways that tests hold equal.

`closed_form` is for the common case, two bodies on plain numbers: no graph is built, and a small
network learns in a third of the time. `by_autograd` takes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from envfleet.learn.networks import ActorCritic, Features


@dataclass(frozen=True, slots=True)
class Weights:
    """What the parts of the loss count, and how far the policy may move."""

    clip: float
    value: float
    entropy: float
    clips_values: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of each row from when it was collected."""

    leaves: tuple[Tensor, ...]
    actions: Tensor
    allowed: Tensor | None
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def __len__(self) -> int:
        """How many there are."""
        return len(self.actions)

    def at(self, where: Tensor) -> Rows:
        """Some of them, by their numbers or by a flag for each."""
        if where.dtype is torch.bool:
            where = where.nonzero()[:, 0]
        return Rows(
            tuple(leaf.index_select(0, where) for leaf in self.leaves),
            self.actions.index_select(0, where),
            None if self.allowed is None else self.allowed.index_select(0, where),
            self.log_probs.index_select(0, where),
            self.values.index_select(0, where),
            self.advantages.index_select(0, where),
            self.returns.index_select(0, where),
        )

    def gather(self, where: Tensor, room: Rows) -> None:
        """Overwrite as many others with some of them, by their numbers."""
        for mine, theirs in zip(self._tensors, room._tensors, strict=True):
            torch.index_select(mine, 0, where, out=theirs)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        numbers = (self.actions, self.log_probs, self.values, self.advantages, self.returns)
        return (*self.leaves, *numbers, *(() if self.allowed is None else (self.allowed,)))

    def split(self, size: int) -> list[Rows]:
        """All of them, `size` at a time."""
        if len(self) <= size:
            return [self] if len(self) else []
        leaves = zip(*(torch.split(leaf, size) for leaf in self.leaves), strict=True)
        numbers = (self.log_probs, self.values, self.advantages, self.returns)
        columns = [torch.split(one, size) for one in (self.actions, *numbers)]
        allowed: Sequence[Tensor | None] = [None] * len(columns[0])
        if self.allowed is not None:
            allowed = torch.split(self.allowed, size)
        return [
            Rows(mine, actions, may, *rest)
            for mine, may, actions, *rest in zip(leaves, allowed, *columns, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Found:
    """A gradient, and what the figures of the minibatch are worked out from."""

    gradients: Sequence[Tensor]
    log_ratio: Tensor
    gain: Tensor
    value_error: Tensor
    """How far values were off."""
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
        """How far the policy has moved from the one that collected, by an estimate without bias."""
        return self._moved().mean()

    def _moved(self) -> Tensor:
        return self.log_ratio.exp() - 1 - self.log_ratio


@torch.inference_mode()
def closed_form(policy: ActorCritic, rows: Rows, weights: Weights) -> Found:
    """For policies that are plain."""
    count, clip = len(rows), weights.clip
    features = policy.encoder(rows.leaves)
    actor, critic = policy.actor.trace(features), policy.critic.trace(features)
    said = actor[-1] if rows.allowed is None else policy.head.masked(actor[-1], rows.allowed)
    values = critic[-1][:, 0]

    gain = _normalised(rows.advantages)
    log_ratio = policy.head.log_prob(said, rows.actions).sub_(rows.log_probs)
    ratio = log_ratio.exp()
    free, held = gain * ratio, gain * ratio.clamp(1 - clip, 1 + clip)
    of_log_prob = free.mul(free <= held).mul_(-1 / count)  # held back rows pull nowhere
    pull, of_head = policy.head.pull(said, rows.actions, of_log_prob, -weights.entropy / count)

    error = values - rows.returns
    of_value = error
    if weights.clips_values:
        moved = values - rows.values
        near = rows.values + moved.clamp(-clip, clip) - rows.returns
        is_inside = moved.abs() <= clip
        of_value = torch.where(error.square() >= near.square(), error, near * is_inside)
        error = torch.where(error.square() >= near.square(), error, near)
    of_value = of_value.mul(2 * weights.value / count)

    gradients = [
        *policy.actor.pull(actor, pull),
        *policy.critic.pull(critic, of_value[:, None]),
        *of_head,
    ]
    return Found(gradients, log_ratio, gain, error, said)


def by_autograd(
    policy: ActorCritic,
    parameters: Sequence[Tensor],
    features: Features,
    rows: Rows,
    weights: Weights,
) -> Found:
    """For any policy; `features` are what its bodies get for these rows, with their graph."""
    said, values = policy.judge(features, rows.allowed)
    log_ratio = policy.head.log_prob(said, rows.actions) - rows.log_probs
    ratio, gain = log_ratio.exp(), _normalised(rows.advantages)
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
    return Found(gradients, log_ratio.detach(), gain, error.detach(), said.detach())


def _normalised(advantages: Tensor) -> Tensor:
    if len(advantages) < 2:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)
