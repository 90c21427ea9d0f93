"""SAC, discrete SAC and TD3: how actions are drawn, and what critics and actors aim at.

An algorithm gets the actor's output ("said") and noise, both from outside: nothing is drawn here.
Shapes are [..., number]; values have one number at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from envfleet.meta.agents.options import SACDOptions, SACOptions, TD3Options

__all__ = ["SAC", "SACD", "TD3", "Algorithm", "Choice", "EntropyWeight"]

LOG_STD_RANGE = -20.0, 2.0


class Choice(NamedTuple):
    """The actor's actions as the critic gets them, and what they cost in entropy."""

    actions: Tensor
    """The actions, or the probabilities of discrete ones."""
    log_probs: Tensor | None
    """Of the actions [..., 1], or of every discrete one; None if nothing is drawn."""


class EntropyWeight:
    """The weight of the entropy, alpha: given, or learned so that the entropy is as wanted."""

    def __init__(self, options: SACOptions | SACDOptions, target: float) -> None:
        self.target = target
        self.learns = options.automatic_entropy_tuning
        start = 0.0 if self.learns else math.log(max(options.entropy_alpha, 1e-30))
        self.log = torch.tensor(start, requires_grad=self.learns)
        self._given = None if self.learns else options.entropy_alpha
        self.optimiser = torch.optim.Adam([self.log], lr=options.alpha_lr) if self.learns else None

    @property
    def value(self) -> float:
        """The weight as it is now."""
        return math.exp(self.log.item()) if self._given is None else self._given

    def update(self, entropy: float) -> None:
        """Less of it if there is more entropy than wanted."""
        if self.optimiser is not None:
            self.optimiser.zero_grad()
            loss = self.log.exp() * (entropy - self.target)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()


class Algorithm:
    """What the three have in common; the methods are those of continuous actions."""

    is_discrete: ClassVar[bool] = False
    has_target_actor: ClassVar[bool] = False

    def __init__(
        self,
        action_dim: int,
        entropy: EntropyWeight | None = None,
        noise_correlation: float = 0.0,
    ) -> None:
        self.action_dim, self.entropy = action_dim, entropy
        self._noise_correlation = noise_correlation

    @property
    def output_dim(self) -> int:
        """How many numbers the actor gives."""
        return self.action_dim

    def noise(self, rng: np.random.Generator, num_steps: int) -> npt.NDArray[np.float32]:
        """What `act` needs for so many steps of one row, [num_steps, action_dim]."""
        noise = rng.standard_normal((num_steps, self.action_dim), np.float32)
        kept = np.float32(self._noise_correlation)
        if kept:
            new = np.sqrt(1 - kept * kept)  # the deviation stays 1
            for step in range(1, num_steps):
                noise[step] = kept * noise[step - 1] + new * noise[step]
        return noise

    def act(self, said: Tensor, noise: Tensor | None) -> Tensor:
        """Actions as environments get them; without noise the best ones."""
        raise NotImplementedError

    def choose(self, said: Tensor, draw: Callable[..., Tensor]) -> Choice:
        """Actions to judge, through which gradients go."""
        raise NotImplementedError

    def choose_for_target(self, said: Tensor, draw: Callable[..., Tensor]) -> Choice:
        """Actions at the next observation, for the critic's target."""
        return self.choose(said, draw)

    def values(self, first: Tensor, second: Tensor, choice: Choice) -> Tensor:
        """What the choice is worth [..., 1]: the lower of two values, and the entropy."""
        worth = torch.minimum(first, second)
        if choice.log_probs is None or self.entropy is None:
            return worth
        return worth - self.entropy.value * choice.log_probs

    def taken(self, values: Tensor, actions: Tensor) -> Tensor:
        """The values of the actions that were taken [..., 1]."""
        return values

    def entropies(self, choice: Choice) -> Tensor | None:
        """How random each choice was [..., 1]."""
        return None if choice.log_probs is None else -choice.log_probs


class SAC(Algorithm):
    """A Gaussian, squashed by tanh."""

    def __init__(self, options: SACOptions, action_dim: int) -> None:
        target = -float(action_dim) if options.target_entropy is None else options.target_entropy
        super().__init__(action_dim, EntropyWeight(options, target), options.noise_correlation)

    @property
    def output_dim(self) -> int:
        """Means and logarithms of deviations."""
        return 2 * self.action_dim

    def act(self, said: Tensor, noise: Tensor | None) -> Tensor:
        """Actions as environments get them; without noise the best ones."""
        mean, log_std = _gaussian(said)
        return torch.tanh(mean if noise is None else mean + log_std.exp() * noise)

    def choose(self, said: Tensor, draw: Callable[..., Tensor]) -> Choice:
        """Actions to judge, through which gradients go."""
        mean, log_std = _gaussian(said)
        noise = draw(mean.shape)
        raw = mean + log_std.exp() * noise
        of_gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)^2), without the loss of digits
        of_tanh = 2 * (math.log(2) - raw - softplus(-2 * raw))
        return Choice(torch.tanh(raw), (of_gaussian - of_tanh).sum(-1, keepdim=True))


def _gaussian(said: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = said.chunk(2, -1)
    return mean, log_std.clamp(*LOG_STD_RANGE)


class SACD(Algorithm):
    """One of several actions; expectations are taken over all of them."""

    is_discrete = True

    def __init__(self, options: SACDOptions, action_dim: int) -> None:
        target = options.target_entropy * math.log(action_dim)
        super().__init__(action_dim, EntropyWeight(options, target))

    def noise(self, rng: np.random.Generator, num_steps: int) -> npt.NDArray[np.float32]:
        """Gumbel noise: the action with the highest sum is drawn from the softmax."""
        return rng.gumbel(size=(num_steps, self.action_dim)).astype(np.float32)

    def act(self, said: Tensor, noise: Tensor | None) -> Tensor:
        """The numbers of the actions."""
        return (said if noise is None else said + noise).argmax(-1)

    def choose(self, said: Tensor, draw: Callable[..., Tensor]) -> Choice:
        """All actions, with their probabilities."""
        log_probs = torch.log_softmax(said, -1)
        return Choice(log_probs.exp(), log_probs)

    def values(self, first: Tensor, second: Tensor, choice: Choice) -> Tensor:
        """What the choice is worth [..., 1]: the lower of two values, and the entropy."""
        return (choice.actions * super().values(first, second, choice)).sum(-1, keepdim=True)

    def taken(self, values: Tensor, actions: Tensor) -> Tensor:
        """The values of the actions that were taken [..., 1]; these are one-hot."""
        return (values * actions).sum(-1, keepdim=True)

    def entropies(self, choice: Choice) -> Tensor | None:
        """How random each choice was [..., 1]."""
        assert choice.log_probs is not None
        return -(choice.actions * choice.log_probs).sum(-1, keepdim=True)


class TD3(Algorithm):
    """A tanh, with noise beside it."""

    has_target_actor = True

    def __init__(self, options: TD3Options, action_dim: int) -> None:
        super().__init__(action_dim, noise_correlation=options.noise_correlation)
        self._options = options

    def act(self, said: Tensor, noise: Tensor | None) -> Tensor:
        """Actions as environments get them; without noise the best ones."""
        best = torch.tanh(said)
        if noise is None:
            return best
        return (best + self._options.exploration_noise * noise).clamp(-1, 1)

    def choose(self, said: Tensor, draw: Callable[..., Tensor]) -> Choice:
        """The best actions."""
        return Choice(torch.tanh(said), None)

    def choose_for_target(self, said: Tensor, draw: Callable[..., Tensor]) -> Choice:
        """The target actor's actions, with noise that is cut."""
        most = self._options.target_noise_clip
        noise = (self._options.target_noise * draw(said.shape)).clamp(-most, most)
        return Choice((torch.tanh(said) + noise).clamp(-1, 1), None)


def encoded(actions: Tensor, action_dim: int, *, is_discrete: bool) -> Tensor:
    """Actions as networks get them: numbers of discrete ones [..., 1] become one-hot."""
    if not is_discrete:
        return actions
    return one_hot(actions[..., 0].long(), action_dim).to(torch.float32)


def make_algorithm(options: Any, action_dim: int, *, is_discrete: bool) -> Algorithm:
    """The algorithm that the options name."""
    if options.algo_name == "sac":
        return SAC(options.sac, action_dim)
    return SACD(options.sacd, action_dim) if is_discrete else TD3(options.td3, action_dim)
