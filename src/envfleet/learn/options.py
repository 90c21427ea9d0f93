"""What can be chosen about PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from envfleet.errors import ConfigError
from envfleet.learn.networks import Activation, Memory


@dataclass(frozen=True, slots=True)
class PPOOptions:
    """What can be chosen; the defaults are plain PPO's."""

    n_steps: int = 128
    """Steps of every slot per iteration."""
    batch_size: int = 256
    """Rows per minibatch; with a memory, rows of whole slots."""
    n_epochs: int = 4
    learning_rate: float = 2.5e-4
    anneal_learning_rate: bool = True
    """Towards 0 over the whole run."""
    clip_range: float = 0.2
    anneal_clip_range: bool = False
    gamma: float = 0.99
    gae_lambda: float = 0.95
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    clip_values: bool = False
    """Keep new value estimates within `clip_range` of the old ones."""
    target_kl: float | None = None
    """Stop the epochs of an iteration once the policy has moved 1.5 times this far."""
    normalise_obs: bool = False
    normalise_rewards: bool = False
    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    log_std: float = 0.0
    orthogonal: bool = True
    memory: Memory | None = None
    """A recurrent policy, for environments that do not show everything."""
    memory_size: int = 64
    overlap: bool | None = None
    """Act for one half of the slots while the other steps; None does so from 16 slots on."""

    def __post_init__(self) -> None:
        for name in ("n_steps", "batch_size", "n_epochs", "memory_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_range", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if any(units < 1 for units in self.hidden):
            raise ConfigError(f"hidden must be layer sizes of at least 1, got {self.hidden}")
        for name, choices in (("activation", Activation), ("memory", Memory)):
            given = getattr(self, name)
            if given not in get_args(choices) and (given is not None or name == "activation"):
                raise ConfigError(f"{name} must be one of {list(get_args(choices))}, got {given!r}")
