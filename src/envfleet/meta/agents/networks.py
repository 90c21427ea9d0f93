"""Actors, critics, and the memory that goes over a trial.

A memory gets (a_{t-1}, r_{t-1}, o_t) and gives h_t. With a memory an actor gets h_t and a layer on
o_t, a critic h_t and a layer on (o_t, a_t); without one they get o_t and (o_t, a_t) as they are.
A critic of discrete actions gets no action: it has one value for each.

Shapes: T+1 observations of B trials are [T+1, B, number].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from envfleet.learn.networks import Body, Recurrence
from envfleet.meta.agents.options import AGENT_ARCHS, PolicyOptions

__all__ = ["ActorNetwork", "CriticNetwork", "Networks", "TrialMemory"]

HIDDEN_BIAS = 0.1
LAST_OF_CRITIC, LAST_OF_ACTOR = 3e-3, 1e-3
"""Bounds of the last layers' first weights."""


def layers(width: int, hidden: Sequence[int], size: int, last_bound: float) -> Body:
    """Layers with ReLU between them; weights are drawn by how many inputs a layer has."""
    body = Body(width, hidden, size, "relu", last_gain=None)
    *inner, last = body.layers
    for layer in inner:
        bound = 1 / math.sqrt(layer.in_features)  # type: ignore[arg-type]
        nn.init.uniform_(layer.weight, -bound, bound)  # type: ignore[arg-type]
        nn.init.constant_(layer.bias, HIDDEN_BIAS)  # type: ignore[arg-type]
    for parameter in last.parameters():
        nn.init.uniform_(parameter, -last_bound, last_bound)
    return body


class Embedding(nn.Module):
    """relu(W x + b)."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, size)

    def forward(self, values: Tensor) -> Tensor:
        """The embedded values."""
        return torch.relu(self.layer(values))


class TrialMemory(nn.Module):
    """A recurrent network over previous actions, previous rewards and observations."""

    def __init__(self, options: PolicyOptions, obs_dim: int, action_dim: int) -> None:
        """An embedding of size 0 leaves its input out."""
        super().__init__()
        assert options.memory is not None
        self.dims = {"action": action_dim, "reward": 1, "obs": obs_dim}
        """How many numbers each input has."""
        sizes = {
            "action": options.action_embedding_size,
            "reward": options.reward_embedding_size,
            "obs": options.observ_embedding_size,
        }
        self.embeddings = nn.ModuleDict(
            {name: Embedding(self.dims[name], size) for name, size in sizes.items() if size}
        )
        self.width = embedded_width(options)
        self.recurrence = Recurrence(
            options.memory, self.width, options.rnn_hidden_size, options.rnn_num_layers
        )
        self.state_size = self.recurrence.state_size
        self.predictor: Body | None = None
        """From what is remembered and a step (o_t, a_t, o_{t+1}) to its reward."""
        if options.reward_prediction:
            width = options.rnn_hidden_size + 2 * obs_dim + action_dim
            self.predictor = layers(width, options.dqn_layers, 1, LAST_OF_CRITIC)

    def forward(self, actions: Tensor, rewards: Tensor, obs: Tensor) -> Tensor:
        """What is remembered at each observation, from nothing on.

        Args:
            actions: The action before each observation; zeros before the first.
            rewards: The reward with it, [T+1, B, 1].
            obs: The observations.
        """
        given = {"action": actions, "reward": rewards, "obs": obs}
        seen = [embed(given[name]) for name, embed in self.embeddings.items()]
        start = obs.new_zeros((obs.shape[1], self.state_size))
        remembered: Tensor = self.recurrence(torch.cat(seen, -1), start)[0]
        return remembered


def embedded_width(options: PolicyOptions) -> int:
    """How many numbers a memory gets per observation."""
    return (
        options.action_embedding_size
        + options.reward_embedding_size
        + options.observ_embedding_size
    )


class ActorNetwork(nn.Module):
    """From what is remembered and the observation to what the algorithm makes an action of."""

    def __init__(
        self, options: PolicyOptions, obs_dim: int, output_dim: int, *, has_memory: bool
    ) -> None:
        super().__init__()
        self.shortcut: Embedding | None = None
        width = obs_dim
        if has_memory:
            size = options.observ_embedding_size or obs_dim
            self.shortcut = Embedding(obs_dim, size)
            width = options.rnn_hidden_size + size
        self.body = layers(width, options.policy_layers, output_dim, LAST_OF_ACTOR)

    def forward(self, memory: Tensor | None, obs: Tensor) -> Tensor:
        """The output of the last layer."""
        if self.shortcut is None or memory is None:
            said: Tensor = self.body(obs)
            return said
        said = self.body(torch.cat((memory, self.shortcut(obs)), -1))
        return said


class CriticNetwork(nn.Module):
    """Two networks that judge actions."""

    def __init__(
        self,
        options: PolicyOptions,
        obs_dim: int,
        action_dim: int,
        *,
        has_memory: bool,
        is_discrete: bool,
    ) -> None:
        super().__init__()
        self.is_discrete = is_discrete
        self.shortcut: Embedding | None = None
        width = obs_dim if is_discrete else obs_dim + action_dim
        if has_memory:
            size = embedded_width(options)
            self.shortcut = Embedding(width, size)
            width = options.rnn_hidden_size + size
        size = action_dim if is_discrete else 1
        self.first = layers(width, options.dqn_layers, size, LAST_OF_CRITIC)
        self.second = layers(width, options.dqn_layers, size, LAST_OF_CRITIC)

    def forward(
        self, memory: Tensor | None, obs: Tensor, actions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Two values of each action that is given, or of every discrete one."""
        seen = obs if actions is None else torch.cat((obs, actions), -1)
        if self.shortcut is not None and memory is not None:
            seen = torch.cat((memory, self.shortcut(seen)), -1)
        return self.first(seen), self.second(seen)


class Networks(nn.Module):
    """ActorNetwork and critic, with the memories they have; a shared one is the critic's."""

    def __init__(
        self, options: PolicyOptions, obs_dim: int, output_dim: int, action_dim: int, discrete: bool
    ) -> None:
        super().__init__()
        is_memory = options.arch is AGENT_ARCHS.Memory
        has_critic_memory = options.arch is not AGENT_ARCHS.Markov
        self.is_shared = is_memory and not options.separate

        def memory(*, is_there: bool) -> TrialMemory | None:
            return TrialMemory(options, obs_dim, action_dim) if is_there else None

        self.critic_memory = memory(is_there=has_critic_memory)
        self.actor_memory = memory(is_there=is_memory and not self.is_shared)
        self.critic = CriticNetwork(
            options, obs_dim, action_dim, has_memory=has_critic_memory, is_discrete=discrete
        )
        self.actor = ActorNetwork(options, obs_dim, output_dim, has_memory=is_memory)

    @property
    def acting_memory(self) -> TrialMemory | None:
        """What the actor remembers with."""
        return self.critic_memory if self.is_shared else self.actor_memory

    def of_critic(self) -> list[Tensor]:
        """The parameters of the critic, and of its memory if that is its own."""
        own = None if self.is_shared else self.critic_memory
        return [*self.critic.parameters(), *(own.parameters() if own is not None else ())]

    def of_actor(self) -> list[Tensor]:
        """The parameters of the actor, and of its memory if that is its own."""
        own = self.actor_memory
        return [*self.actor.parameters(), *(own.parameters() if own is not None else ())]
