"""What can be chosen about PPO."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args

import numpy as np

from envfleet.engine.options import check_count
from envfleet.errors import ConfigError, did_you_mean
from envfleet.learn.networks import Activation, Memory

Options = TypeVar("Options")
MOST_SEEDS = 1 << 63
"""PyTorch takes no larger ones."""
_FLAGS = (
    "anneal_learning_rate",
    "anneal_clip_range",
    "clip_values",
    "normalise_obs",
    "normalise_rewards",
    "orthogonal",
)
_NUMBERS = (
    "learning_rate",
    "clip_range",
    "gamma",
    "gae_lambda",
    "ent_coef",
    "vf_coef",
    "max_grad_norm",
    "target_kl",
    "log_std",
)


def by_name(kind: type[Options]) -> type[Options]:
    """Let a dataclass answer a name that it does not have with the nearest one that it has."""
    made: Any = kind.__init__
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(made)
    def checked(self: Options, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                said = f"{kind.__name__} has no option {name!r}"
                raise ConfigError(f"{said}{did_you_mean(name, names)}")
        made(self, *args, **kwargs)

    setattr(kind, "__init__", checked)  # noqa: B010 - mypy would refuse the assignment
    return kind


@by_name
@dataclass(frozen=True, slots=True)
class PPOOptions:
    """What can be chosen; the defaults are plain PPO's."""

    n_steps: int = 128
    """Steps of every slot per iteration."""
    batch_size: int = 256
    """Rows per minibatch; with a memory, rows of whole slots, so at least `n_steps`."""
    n_epochs: int = 4
    """How often an iteration goes over its rows."""
    learning_rate: float = 2.5e-4
    """Of Adam, at the beginning."""
    anneal_learning_rate: bool = True
    """Towards 0 over the whole run."""
    clip_range: float = 0.2
    """How far the probability of an action may move in an iteration, as a share."""
    anneal_clip_range: bool = False
    """Towards 0 over the whole run."""
    gamma: float = 0.99
    """What a reward is worth one step later."""
    gae_lambda: float = 0.95
    """Between trusting the values (0) and the rewards alone (1)."""
    ent_coef: float = 0.0
    """Weight of the entropy in the loss: more keeps the policy undecided for longer."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Longer gradients are cut to this length."""
    clip_values: bool = False
    """Keep new value estimates within `clip_range` of the old ones."""
    target_kl: float | None = None
    """Stop the epochs of an iteration once the policy has moved 1.5 times this far."""
    normalise_obs: bool = False
    """Bring observations to mean 0 and deviation 1, by central statistics."""
    normalise_rewards: bool = False
    """Divide rewards by the deviation of the running returns."""
    hidden: tuple[int, ...] = (64, 64)
    """Units of each hidden layer."""
    activation: Activation = "tanh"
    """Between the layers."""
    log_std: float = 0.0
    """Logarithm of the deviation of continuous actions, at the beginning."""
    orthogonal: bool = True
    """Begin with orthogonal weights and biases of 0."""
    memory: Memory | None = None
    """A recurrent policy, for environments that do not show everything."""
    memory_size: int = 64
    """Units of the memory."""
    overlap: bool | None = None
    """Act for one half of the slots while the other steps; None does so from 16 slots and three
    cores on."""

    def __post_init__(self) -> None:
        for name in ("n_steps", "batch_size", "n_epochs", "memory_size"):
            check_count(name, getattr(self, name))
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if self.overlap is not None:
            check_flag("overlap", self.overlap, or_none=True)
        for name in _NUMBERS:
            given = getattr(self, name)
            if not _is_number(given) and (given is not None or name != "target_kl"):
                raise ConfigError(f"{name} must be a number, got {given!r}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_range", "max_grad_norm", "target_kl"):
            given = getattr(self, name)
            if given is not None and not 0 < given < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, got {given}")
        for name in ("ent_coef", "vf_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not math.isfinite(self.log_std):
            raise ConfigError(f"log_std must be finite, got {self.log_std}")
        if not isinstance(self.hidden, list | tuple):
            raise ConfigError(f"hidden must be layer sizes like (64, 64), got {self.hidden!r}")
        for units in self.hidden:
            check_count("every layer in hidden", units)
        # a list would not be equal to itself when it comes back from a checkpoint
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for name, choices in (("activation", Activation), ("memory", Memory)):
            given = getattr(self, name)
            if given not in get_args(choices) and (given is not None or name == "activation"):
                raise ConfigError(f"{name} must be one of {list(get_args(choices))}, got {given!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_flag(name: str, value: Any, *, or_none: bool = False) -> None:
    """Refuse what only looks like yes or no."""
    if not isinstance(value, bool):
        others = "True, False or None" if or_none else "True or False"
        raise ConfigError(f"{name} must be {others}, got {value!r}")


def check_seed(seed: Any) -> None:
    """Refuse what generators of numpy, PyTorch and environments do not all take."""
    is_whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not is_whole or not 0 <= seed < MOST_SEEDS:
        raise ConfigError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
