"""Actors and critics for any space: an encoder of observations, two bodies, a head of actions.

Sampling takes a generator of its own, so that a run repeats whatever else draws random numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from envfleet.errors import ConfigError

_LOG_2PI = math.log(2 * math.pi)


class Head(nn.Module, ABC):
    """Turns what the actor's body says, one row per observation, into actions."""

    size: int
    """How many numbers the body must say."""

    @abstractmethod
    def sample(self, said: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions."""

    @abstractmethod
    def mode(self, said: Tensor) -> Tensor:
        """The likeliest actions."""

    @abstractmethod
    def log_prob(self, said: Tensor, actions: Tensor) -> Tensor:
        """How likely actions are, one number per row."""

    @abstractmethod
    def entropy(self, said: Tensor) -> Tensor:
        """How undecided the actor is, one number per row."""


class Choices(Head):
    """One or several independent choices among a few; masked ones are never taken."""

    def __init__(self, counts: Sequence[int], *, is_scalar: bool) -> None:
        super().__init__()
        self._counts, self._is_scalar = list(counts), is_scalar
        self.size = sum(counts)

    def sample(self, said: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions."""
        noise = torch.rand(said.shape, generator=generator, device=said.device)
        # argmax of logits plus Gumbel noise is a draw by their softmax
        return self.mode(said - torch.log(-torch.log(noise.clamp_min(1e-20))))

    def mode(self, said: Tensor) -> Tensor:
        """The likeliest actions."""
        chosen = [part.argmax(-1) for part in torch.split(said, self._counts, -1)]
        return chosen[0] if self._is_scalar else torch.stack(chosen, -1)

    def log_prob(self, said: Tensor, actions: Tensor) -> Tensor:
        """How likely actions are."""
        wanted = actions.long().reshape(len(said), len(self._counts))
        logs = [
            part.log_softmax(-1).gather(-1, wanted[:, index : index + 1])
            for index, part in enumerate(torch.split(said, self._counts, -1))
        ]
        return torch.cat(logs, -1).sum(-1)

    def entropy(self, said: Tensor) -> Tensor:
        """How undecided the actor is."""
        total = said.new_zeros(len(said))
        for part in torch.split(said, self._counts, -1):
            logs = part.log_softmax(-1)
            total = total - (logs.exp() * logs.nan_to_num(neginf=0.0)).sum(-1)
        return total


class Switches(Head):
    """Independent yes-or-no decisions."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.size = count

    def sample(self, said: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions."""
        noise = torch.rand(said.shape, generator=generator, device=said.device)
        return (noise < said.sigmoid()).to(torch.int8)

    def mode(self, said: Tensor) -> Tensor:
        """The likeliest actions."""
        return (said > 0).to(torch.int8)

    def log_prob(self, said: Tensor, actions: Tensor) -> Tensor:
        """How likely actions are."""
        loss = nn.functional.binary_cross_entropy_with_logits(
            said, actions.to(said.dtype), reduction="none"
        )
        return -loss.sum(-1)

    def entropy(self, said: Tensor) -> Tensor:
        """How undecided the actor is."""
        yes = said.sigmoid()
        loss = nn.functional.binary_cross_entropy_with_logits(said, yes, reduction="none")
        return loss.sum(-1)


class Gaussian(Head):
    """Independent normal components whose deviation does not depend on the observation."""

    def __init__(self, shape: tuple[int, ...], log_std: float) -> None:
        super().__init__()
        self._shape, self.size = shape, int(np.prod(shape))
        self.log_std = nn.Parameter(torch.full((self.size,), log_std))

    def sample(self, said: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions."""
        noise = torch.randn(said.shape, generator=generator, device=said.device)
        return self.mode(said + self.log_std.exp() * noise)

    def mode(self, said: Tensor) -> Tensor:
        """The likeliest actions."""
        return said.reshape(len(said), *self._shape)

    def log_prob(self, said: Tensor, actions: Tensor) -> Tensor:
        """How likely actions are."""
        scaled = (actions.reshape(len(said), -1) - said) * (-self.log_std).exp()
        return -0.5 * (scaled**2 + _LOG_2PI).sum(-1) - self.log_std.sum()

    def entropy(self, said: Tensor) -> Tensor:
        """How undecided the actor is."""
        return (self.log_std + 0.5 * (1 + _LOG_2PI)).sum().expand(len(said))


def make_head(space: spaces.Space[Any], log_std: float) -> Head:
    """The head for an action space."""
    if isinstance(space, spaces.Discrete):
        return Choices([int(space.n)], is_scalar=True)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return Choices(space.nvec.tolist(), is_scalar=False)
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return Switches(space.shape[0])
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        return Gaussian(space.shape, log_std)
    raise ConfigError(
        f"PPO acts in Discrete, MultiDiscrete, MultiBinary and float Box spaces, not in {space}"
    )


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Linear | nn.Conv2d:
    """Initialise as PPO likes it."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """Separate bodies for acting and for judging, on observations flattened to one row each."""

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: spaces.Space[Any],
        *,
        hidden: Sequence[int] = (64, 64),
        activation: type[nn.Module] = nn.Tanh,
        log_std: float = 0.0,
        is_orthogonal: bool = True,
    ) -> None:
        super().__init__()
        self.head = make_head(action_space, log_std)
        width = int(np.prod(observation_space.shape))
        gain = math.sqrt(2) if is_orthogonal else None
        self.actor = _body(width, hidden, self.head.size, activation, gain, last_gain=0.01)
        self.critic = _body(width, hidden, 1, activation, gain, last_gain=1.0)

    def act(self, obs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, how likely they were, and what the observations are worth."""
        rows = obs.flatten(1)
        said = self.actor(rows)
        actions = self.head.sample(said, generator)
        return actions, self.head.log_prob(said, actions), self.critic(rows)[:, 0]

    def decide(self, obs: Tensor) -> Tensor:
        """The likeliest actions."""
        return self.head.mode(self.actor(obs.flatten(1)))

    def value(self, obs: Tensor) -> Tensor:
        """What observations are worth."""
        worth: Tensor = self.critic(obs.flatten(1))[:, 0]
        return worth

    def judge(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of actions taken, entropies, values."""
        rows = obs.flatten(1)
        said = self.actor(rows)
        return self.head.log_prob(said, actions), self.head.entropy(said), self.critic(rows)[:, 0]


def _body(
    width: int,
    hidden: Sequence[int],
    size: int,
    activation: type[nn.Module],
    gain: float | None,
    *,
    last_gain: float,
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), activation()]
        width = units
    layers.append(nn.Linear(width, size))
    if gain is not None:
        for layer in layers[:-1]:
            if isinstance(layer, nn.Linear):
                orthogonal(layer, gain)
        orthogonal(layers[-1], last_gain)  # type: ignore[arg-type]
    return nn.Sequential(*layers)
