"""A network of Stable-Baselines3's PPO that plays the grid world alike in all its reflections.

Turned or mirrored, the world has the same rules. So the network is asked about an observation in
all eight ways to look at it, and its answers are turned back and averaged: what is learned in one
corner holds in the other three.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from envfleet.multiagent.grid_agents import MOVES

FRAMES = 2
"""Observations that are shown at once; two show which way the target went."""
SIZE, SIDE, CODES = 7, 5, 4
"""Cells of the world, and of the field of view, in a row; what a cell can show."""
WIDTH = 256
_PLACE = 2 * SIZE
_FRAME = _PLACE + SIDE * SIDE * CODES


class OneHot(BaseFeaturesExtractor):
    """The agent's place and every cell of its view, each as zeros and a one."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, FRAMES * _FRAME)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Leave out whether the agent is alive, the last number of a frame: it always is."""
        frames = observations.reshape(len(observations), FRAMES, -1).long()
        place = nn.functional.one_hot(frames[..., :2], SIZE).flatten(2)
        view = nn.functional.one_hot(frames[..., 2:-1], CODES).flatten(2)
        return torch.cat([place, view], dim=-1).flatten(1).float()


class Symmetric(nn.Module):
    """An actor and a critic with a hidden layer each, averaged over the eight reflections."""

    latent_dim_pi, latent_dim_vf = len(MOVES), 1
    _inputs: torch.Tensor
    _moves: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        inputs, moves = zip(*_reflections(), strict=True)
        self.register_buffer("_inputs", torch.tensor(np.array(inputs)))
        self.register_buffer("_moves", torch.tensor(np.array(moves)))
        self._actor = _network(len(MOVES), 0.01)
        self._critic = _network(1, 1.0)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the moves, and the value."""
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: torch.Tensor) -> torch.Tensor:
        """Logits of the moves."""
        seen = self._actor(features[:, self._inputs])
        return torch.gather(seen, 2, self._moves.expand(len(features), -1, -1)).mean(dim=1)

    def forward_critic(self, features: torch.Tensor) -> torch.Tensor:
        """The value."""
        values: torch.Tensor = self._critic(features[:, self._inputs])
        return values.mean(dim=1)


class SymmetricPolicy(ActorCriticPolicy):
    """A policy whose logits and values are the network's answers as they are."""

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = Symmetric()  # type: ignore[assignment]  # with the methods of SB3's

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net, self.value_net = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )


def _network(num_outputs: int, gain: float) -> nn.Sequential:
    layers = nn.Linear(FRAMES * _FRAME, WIDTH), nn.Tanh(), nn.Linear(WIDTH, num_outputs)
    for layer, size in ((layers[0], 2**0.5), (layers[2], gain)):
        nn.init.orthogonal_(layer.weight, size)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def _reflections() -> Iterator[tuple[list[int], list[int]]]:
    """For each way to look: which input goes where, and as which move each move is seen."""
    middle, reach = SIZE // 2, SIDE // 2
    for is_swapped, *signs in itertools.product((False, True), (1, -1), (1, -1)):
        source = list(range(_FRAME))
        for axis, cell in itertools.product(range(2), range(SIZE)):
            old_axis = 1 - axis if is_swapped else axis
            source[axis * SIZE + cell] = old_axis * SIZE + signs[axis] * (cell - middle) + middle
        for x, y in itertools.product(range(-reach, reach + 1), repeat=2):
            seen_x, seen_y = _seen((x, y), signs, is_swapped=is_swapped)
            for code in range(CODES):
                source[_view(seen_x, seen_y) + code] = _view(x, y) + code
        moves = [MOVES.index(_seen(move, signs, is_swapped=is_swapped)) for move in MOVES]
        yield [frame * _FRAME + n for frame in range(FRAMES) for n in source], moves


def _seen(place: tuple[int, int], signs: list[int], *, is_swapped: bool) -> tuple[int, int]:
    x, y = reversed(place) if is_swapped else place
    return signs[0] * x, signs[1] * y


def _view(x: int, y: int) -> int:
    """Where a cell of the view begins among the inputs of a frame, as seen from the agent."""
    reach = SIDE // 2
    return _PLACE + ((x + reach) * SIDE + y + reach) * CODES
