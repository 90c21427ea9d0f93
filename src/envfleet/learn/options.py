"""The options of PPO."""

from __future__ import annotations

from dataclasses import dataclass

from envfleet.learn.networks import Activation, Memory
from envfleet.options import Count, NotNegative, Positive, Share, option_class

__all__ = ["PPOOptions"]


@option_class
@dataclass(frozen=True, slots=True)
class PPOOptions:
    """How to learn; the defaults are those of plain PPO."""

    n_steps: Count = 128
    """Steps of every slot per iteration."""
    batch_size: Count = 256
    """Rows per minibatch; with a memory, rows of whole slots, so at least `n_steps`."""
    n_epochs: Count = 4
    """Passes over the rows of an iteration."""
    learning_rate: Positive = 2.5e-4
    """Of Adam, at the start."""
    anneal_learning_rate: bool = True
    """Lower it towards 0 over the run."""
    clip_range: Positive = 0.2
    """How far the probability of an action may move in an iteration, as a share."""
    anneal_clip_range: bool = False
    """Lower it towards 0 over the run."""
    gamma: Share = 0.99
    """Discount of a reward per step."""
    gae_lambda: Share = 0.95
    """From 0, which relies on the value estimates, to 1, which relies on the rewards."""
    ent_coef: NotNegative = 0.0
    """Weight of the entropy in the loss: more of it keeps the policy exploring for longer."""
    vf_coef: NotNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: Positive = 0.5
    """Longer gradients are cut to this length."""
    clip_values: bool = False
    """Keep new value estimates within `clip_range` of the old ones."""
    target_kl: Positive | None = None
    """Stop the epochs of an iteration once the policy has moved 1.5 times this far."""
    normalise_obs: bool = False
    """Scale observations to mean 0 and deviation 1, by the statistics of all slots."""
    normalise_rewards: bool = False
    """Divide rewards by the deviation of the running returns."""
    hidden: tuple[Count, ...] = (64, 64)
    """Units of each hidden layer."""
    activation: Activation = "tanh"
    """Between the layers."""
    log_std: float = 0.0
    """Logarithm of the deviation of continuous actions, at the start."""
    orthogonal: bool = True
    """Start with orthogonal weights and biases of 0."""
    memory: Memory | None = None
    """A recurrent policy, for environments that do not show everything."""
    memory_size: Count = 64
    """Units of the memory."""
    overlap: bool | None = None
    """Act for one half of the slots while the other steps; None does so from 16 slots and three
    cores on."""
