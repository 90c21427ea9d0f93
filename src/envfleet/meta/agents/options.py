"""What an agent is: architecture, algorithm, sizes and rates; the section `policy` of a YAML file.

Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from envfleet.errors import ConfigError
from envfleet.options import (
    Count,
    CountOrZero,
    Must,
    NotNegative,
    Positive,
    Share,
    from_mapping,
    option_class,
)

__all__ = [
    "AGENT_ARCHS",
    "PolicyOptions",
    "SACDOptions",
    "SACOptions",
    "TD3Options",
    "policy_options",
]

Correlation = Annotated[float, Must("a number from 0 to below 1", lambda x: 0 <= x < 1)]


class AGENT_ARCHS(StrEnum):
    """What an agent's networks see."""

    Markov = "markov"
    """The present observation only."""
    Memory = "memory"
    """All that happened in the trial: previous actions, rewards and observations."""
    Memory_Markov = "memory-markov"
    """The actor sees the present observation only; the critic has a memory."""


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class SACOptions:
    """Soft actor-critic, for continuous actions."""

    automatic_entropy_tuning: bool = True
    """Learn the weight of the entropy, from 1 on."""
    entropy_alpha: NotNegative = 0.2
    """The weight of the entropy if it is not learned."""
    target_entropy: float | None = None
    """What the entropy is steered to; None is minus the number of actions' dimensions."""
    alpha_lr: Positive = 3e-4
    """Learning rate of the weight."""
    noise_correlation: Correlation = 0.0
    """How much of the exploration noise of a step is that of the step before. With much of it an
    agent explores in long strides, not by trembling."""


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class SACDOptions:
    """Soft actor-critic, for discrete actions."""

    automatic_entropy_tuning: bool = True
    """Learn the weight of the entropy, from 1 on."""
    entropy_alpha: NotNegative = 0.1
    """The weight of the entropy if it is not learned."""
    target_entropy: Share = 0.7
    """What the entropy is steered to, as a share of the highest possible one."""
    alpha_lr: Positive = 3e-4
    """Learning rate of the weight."""


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class TD3Options:
    """Twin delayed deterministic policy gradient; its actor is updated as often as its critics."""

    exploration_noise: NotNegative = 0.1
    """Deviation of the noise that is added to actions."""
    target_noise: NotNegative = 0.2
    """Deviation of the noise that is added to the target actor's actions."""
    target_noise_clip: NotNegative = 0.5
    """That noise is cut to this."""
    noise_correlation: Correlation = 0.0
    """How much of the exploration noise of a step is that of the step before. With much of it an
    agent explores in long strides, not by trembling."""


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions:
    """An agent: its networks, its algorithm, its rates."""

    seq_model: Literal["mlp", "gru", "lstm", "gru-mlp", "lstm-mlp"] = "lstm"
    """No memory, one of this kind, or one for the critic only."""
    separate: bool = True
    """Actor and critic have a memory each; else they share one, which the critic's loss trains."""
    algo_name: Literal["sac", "sacd", "td3"] = "sac"
    """The algorithm; sacd is for discrete actions."""
    action_embedding_size: CountOrZero = 8
    """Width of the previous action as the memory gets it; 0 leaves it out."""
    observ_embedding_size: CountOrZero = 32
    """Width of the observation as the memory gets it; 0 leaves it out."""
    reward_embedding_size: CountOrZero = 8
    """Width of the previous reward as the memory gets it; 0 leaves it out."""
    rnn_hidden_size: Count = 128
    """Units of the memory."""
    rnn_num_layers: Count = 1
    """Layers of the memory."""
    dqn_layers: tuple[Count, ...] = (128, 128)
    """Units of the critics' hidden layers."""
    policy_layers: tuple[Count, ...] = (128, 128)
    """Units of the actor's hidden layers."""
    reward_prediction: NotNegative = 0.0
    """Weight of one more loss for memories: they tell the rewards of other steps of the window, of
    which observations and action are given. It makes them find out the task much sooner."""
    lr: Positive = 3e-4
    """Learning rate of actor and critics."""
    gamma: Share = 0.99
    """Discount of a reward per step."""
    tau: Share = 0.005
    """How far target networks follow per update."""
    sac: SACOptions = SACOptions()
    """What only SAC has."""
    sacd: SACDOptions = SACDOptions()
    """What only discrete SAC has."""
    td3: TD3Options = TD3Options()
    """What only TD3 has."""

    def __post_init__(self) -> None:
        if self.arch is AGENT_ARCHS.Markov:
            return
        sizes = (
            self.action_embedding_size, self.observ_embedding_size, self.reward_embedding_size,
        )  # fmt: skip
        if not any(sizes):
            raise ConfigError(
                "all embedding sizes are 0, so the memory would see nothing; raise "
                "observ_embedding_size, action_embedding_size or reward_embedding_size"
            )
        if self.arch is AGENT_ARCHS.Memory_Markov and not self.separate:
            raise ConfigError(
                f"separate=False shares the memory between actor and critic, but with seq_model="
                f"{self.seq_model!r} the actor has none; set separate=True, or seq_model="
                f"{self.memory!r}"
            )

    @property
    def arch(self) -> AGENT_ARCHS:
        """What the networks see."""
        if self.seq_model == "mlp":
            return AGENT_ARCHS.Markov
        return AGENT_ARCHS.Memory_Markov if "-" in self.seq_model else AGENT_ARCHS.Memory

    @property
    def memory(self) -> Literal["gru", "lstm"] | None:
        """The kind of memory, if there is one."""
        if self.seq_model == "mlp":
            return None
        return "gru" if self.seq_model.startswith("gru") else "lstm"


_BLOCKS: dict[str, type[Any]] = {"sac": SACOptions, "sacd": SACDOptions, "td3": TD3Options}


def policy_options(values: Mapping[str, Any]) -> PolicyOptions:
    """The options of an agent from the section `policy` of a YAML file.

    Raises:
        ConfigError: A name does not exist, or a value does not fit.
    """
    flat = dict(values)
    for name, kind in _BLOCKS.items():
        block = flat.get(name)
        if block is None:
            flat.pop(name, None)  # "sac:" with nothing below it
        elif isinstance(block, Mapping):
            flat[name] = from_mapping(kind, block, f"policy.{name}")
        elif not isinstance(block, kind):
            raise ConfigError(f"policy.{name} must be a mapping, got {block!r:.100}")
    return from_mapping(PolicyOptions, flat, "policy")
