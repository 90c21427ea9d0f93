"""From the output of an actor's body to actions: one head for each kind of action space.

Randomness comes in from outside as noise, drawn for a whole rollout at once from a generator of the
run's own: a run can be repeated although other code draws random numbers, and acting is short.

`pull` is the gradient in closed form, for learning without an autograd graph; tests hold it equal
to what autograd says.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor, nn

from envfleet.errors import ConfigError

_LOG_2PI = math.log(2 * math.pi)
_NEVER = -1e8
"""The logit of a masked choice: its probability is 0, and nothing becomes NaN."""

_MASKS_ARE_FOR = "action masks are for Discrete and MultiDiscrete actions only"


class Head(nn.Module, ABC):
    """Turns the body's output, one row per observation, into actions."""

    size: int
    """How many numbers the body has to put out."""
    dtype: torch.dtype
    """Of actions."""
    shape: tuple[int, ...]
    """Of one action."""
    takes_masks = False
    """Whether some actions can be forbidden."""

    @abstractmethod
    def noise(self, rows: Sequence[int], generator: torch.Generator) -> Tensor:
        """The random numbers that `sample` needs for an array of rows."""

    @abstractmethod
    def sample(self, said: Tensor, noise: Tensor) -> Tensor:
        """Draw actions."""

    @abstractmethod
    def mode(self, said: Tensor) -> Tensor:
        """The likeliest actions."""

    @abstractmethod
    def log_prob(self, said: Tensor, actions: Tensor) -> Tensor:
        """The log-probabilities of actions, one number per row."""

    @abstractmethod
    def entropy(self, said: Tensor) -> Tensor:
        """The entropy of the actions, one number per row."""

    @abstractmethod
    def pull(
        self, said: Tensor, actions: Tensor, of_log_prob: Tensor, of_entropy: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient for `said` and for the head's own parameters.

        Args:
            said: What the body said.
            actions: The actions taken.
            of_log_prob: What one more unit of each row's log-probability does to the loss.
            of_entropy: The same for any row's entropy.
        """

    def masked(self, said: Tensor, allowed: Tensor) -> Tensor:
        """`said` with masked choices made impossible."""
        raise ConfigError(_MASKS_ARE_FOR)

    def check(self, masks: npt.NDArray[np.bool_]) -> None:
        """Refuse masks that do not fit, or that leave nothing to choose."""
        raise ConfigError(_MASKS_ARE_FOR)


class Choices(Head):
    """One or several independent choices among a few."""

    dtype = torch.int64
    takes_masks = True

    def __init__(self, counts: Sequence[int], *, is_scalar: bool) -> None:
        super().__init__()
        self._counts, self._is_scalar = list(counts), is_scalar
        self.size = sum(counts)
        self.shape = () if is_scalar else (len(counts),)

    def noise(self, rows: Sequence[int], generator: torch.Generator) -> Tensor:
        """The random numbers that `sample` needs."""
        drawn = torch.rand((*rows, self.size), generator=generator, device=generator.device)
        # argmax of logits plus Gumbel noise is a draw by their softmax
        return drawn.clamp_min_(1e-20).log_().neg_().log_().neg_()

    def sample(self, said: Tensor, noise: Tensor) -> Tensor:
        """Draw actions."""
        return self.mode(said + noise)

    def mode(self, said: Tensor) -> Tensor:
        """The likeliest actions."""
        if self._is_scalar:
            return said.argmax(-1)
        return torch.stack([part.argmax(-1) for part in self._parts(said)], -1)

    def log_prob(self, said: Tensor, actions: Tensor) -> Tensor:
        """The log-probabilities of actions."""
        chosen = [
            part.log_softmax(-1).gather(-1, wanted)
            for part, wanted in zip(self._parts(said), self._wanted(said, actions), strict=True)
        ]
        return chosen[0][:, 0] if self._is_scalar else torch.cat(chosen, -1).sum(-1)

    def entropy(self, said: Tensor) -> Tensor:
        """The entropy of the actions."""
        logs = [part.log_softmax(-1) for part in self._parts(said)]
        each = [-(log.exp() * log).sum(-1) for log in logs]
        return each[0] if self._is_scalar else torch.stack(each, -1).sum(-1)

    def pull(
        self, said: Tensor, actions: Tensor, of_log_prob: Tensor, of_entropy: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient for `said`."""
        each = [
            _pull_of_one_choice(part, wanted, of_log_prob[:, None], of_entropy)
            for part, wanted in zip(self._parts(said), self._wanted(said, actions), strict=True)
        ]
        return each[0] if self._is_scalar else torch.cat(each, -1), ()

    def masked(self, said: Tensor, allowed: Tensor) -> Tensor:
        """`said` with masked choices made impossible."""
        return said.masked_fill(~allowed, _NEVER)

    def check(self, masks: npt.NDArray[np.bool_]) -> None:
        """Refuse masks that do not fit, or that leave nothing to choose."""
        if masks.shape[1:] != (self.size,):
            raise ConfigError(
                f"an action mask must have {self.size} entries here (those of several choices one "
                f"behind the other), got {masks.shape[1:]}"
            )
        starts = np.cumsum([0, *self._counts[:-1]])
        possible = np.logical_or.reduceat(masks, starts, axis=-1).all(-1)
        if not possible.all():
            row = int(np.flatnonzero(~possible)[0])
            raise ConfigError(
                f"the action mask {masks[row].astype(int).tolist()} leaves nothing to choose; "
                "allow at least one of each choice, or end the episode"
            )

    def _parts(self, said: Tensor) -> Sequence[Tensor]:
        return (said,) if self._is_scalar else torch.split(said, self._counts, -1)

    def _wanted(self, said: Tensor, actions: Tensor) -> Sequence[Tensor]:
        columns = actions.reshape(len(said), len(self._counts))
        return (columns,) if self._is_scalar else torch.split(columns, 1, -1)


def _pull_of_one_choice(
    said: Tensor, wanted: Tensor, of_log_prob: Tensor, of_entropy: float
) -> Tensor:
    logs = said.log_softmax(-1)
    chances = logs.exp()
    pull = chances * -of_log_prob
    pull.scatter_add_(-1, wanted, of_log_prob)
    if of_entropy:
        entropy = -(chances * logs).sum(-1, keepdim=True)
        pull.addcmul_(chances, logs + entropy, value=-of_entropy)
    return pull


class Switches(Head):
    """Independent yes-or-no decisions."""

    dtype = torch.int8

    def __init__(self, count: int) -> None:
        super().__init__()
        self.size, self.shape = count, (count,)

    def noise(self, rows: Sequence[int], generator: torch.Generator) -> Tensor:
        """The random numbers that `sample` needs."""
        return torch.rand((*rows, self.size), generator=generator, device=generator.device)

    def sample(self, said: Tensor, noise: Tensor) -> Tensor:
        """Draw actions."""
        return (noise < said.sigmoid()).to(self.dtype)

    def mode(self, said: Tensor) -> Tensor:
        """The likeliest actions."""
        return (said > 0).to(self.dtype)

    def log_prob(self, said: Tensor, actions: Tensor) -> Tensor:
        """The log-probabilities of actions."""
        loss = nn.functional.binary_cross_entropy_with_logits(
            said, actions.to(said.dtype), reduction="none"
        )
        return -loss.sum(-1)

    def entropy(self, said: Tensor) -> Tensor:
        """The entropy of the actions."""
        yes = said.sigmoid()
        loss = nn.functional.binary_cross_entropy_with_logits(said, yes, reduction="none")
        return loss.sum(-1)

    def pull(
        self, said: Tensor, actions: Tensor, of_log_prob: Tensor, of_entropy: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient for `said`."""
        yes = said.sigmoid()
        pull = (actions.to(said.dtype) - yes) * of_log_prob[:, None]
        if of_entropy:
            pull.addcmul_(yes * (1 - yes), said, value=-of_entropy)
        return pull, ()


class Gaussian(Head):
    """Independent normal components whose deviation does not depend on the observation."""

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...], log_std: float) -> None:
        super().__init__()
        self.shape, self.size = shape, int(np.prod(shape))
        self.log_std = nn.Parameter(torch.full((self.size,), log_std))

    def noise(self, rows: Sequence[int], generator: torch.Generator) -> Tensor:
        """The random numbers that `sample` needs."""
        return torch.randn((*rows, self.size), generator=generator, device=generator.device)

    def sample(self, said: Tensor, noise: Tensor) -> Tensor:
        """Draw actions."""
        return self.mode(torch.addcmul(said, self.log_std.exp(), noise))

    def mode(self, said: Tensor) -> Tensor:
        """The likeliest actions."""
        return said.reshape(len(said), *self.shape)

    def log_prob(self, said: Tensor, actions: Tensor) -> Tensor:
        """The log-probabilities of actions."""
        scaled = (actions.reshape(len(said), -1) - said) * (-self.log_std).exp()
        return -0.5 * (scaled**2 + _LOG_2PI).sum(-1) - self.log_std.sum()

    def entropy(self, said: Tensor) -> Tensor:
        """The entropy of the actions."""
        return (self.log_std + 0.5 * (1 + _LOG_2PI)).sum().expand(len(said))

    def pull(
        self, said: Tensor, actions: Tensor, of_log_prob: Tensor, of_entropy: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient for `said` and for the deviations."""
        narrow = (-self.log_std).exp()
        scaled = (actions.reshape(len(said), -1) - said) * narrow
        weight = of_log_prob[:, None]
        of_deviation = ((scaled * scaled - 1) * weight).sum(0) + of_entropy * len(said)
        return scaled * (weight * narrow), (of_deviation,)


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
        f"PPO acts in Discrete spaces, in MultiDiscrete and MultiBinary ones of one axis, and in "
        f"Boxes of floats, not in {space}; wrap the environment to translate its actions"
    )
