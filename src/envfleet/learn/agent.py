"""An agent: a policy, and how observations and actions of any space reach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor

from envfleet.learn.inputs import MASK, Leaves, batch_of_one
from envfleet.learn.networks import ActorCritic
from envfleet.learn.normalise import ObservationNormaliser
from envfleet.learn.options import PPOOptions
from envfleet.runs.plain_data import check_structure

Array = npt.NDArray[Any]
Act = Callable[[Any, Mapping[str, Any]], Any]
"""From one observation and its info to one action."""


class Agent:
    """A policy, and how observations and actions reach it: what a run makes."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        options: PPOOptions,
        device: torch.device,
        seed: int,
    ) -> None:
        """Build the networks; their weights follow from `seed` alone."""
        self.device, self._is_here = device, device.type == "cpu"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = ActorCritic(
                observation_space,
                action_space,
                hidden=options.hidden,
                activation=options.activation,
                log_std=options.log_std,
                is_orthogonal=options.orthogonal,
                memory=options.memory,
                memory_size=options.memory_size,
            ).to(device)
        self.inputs = self.policy.inputs
        self._normalisers = [
            ObservationNormaliser(leaf.shape)
            if options.normalise_obs and leaf.kind == "numbers"
            else None
            for leaf in self.inputs.leaves
        ]
        self.normalises = any(one is not None for one in self._normalisers)
        """Whether observations are normalised."""
        self._action_space = action_space
        self.bounds: tuple[Array, Array] | None = None
        if isinstance(action_space, spaces.Box):
            self.bounds = action_space.low, action_space.high
        start = getattr(action_space, "start", 0)
        self._start = start if np.any(start) else None

    def tensor(self, array: Array) -> Tensor:
        """An array as a tensor on the networks' device."""
        tensor = torch.from_numpy(array)
        return tensor if self._is_here else tensor.to(self.device)

    def tensors(self, leaves: Leaves) -> tuple[Tensor, ...]:
        """All leaves as tensors."""
        return tuple(self.tensor(leaf) for leaf in leaves)

    def look(self, obs: Any, *, learns: bool = False) -> Leaves:
        """A batch of observations as the networks get it; the statistics may learn from it."""
        return self.normalised(self.inputs.split(obs), learns=learns)

    def normalised(self, leaves: Leaves, *, learns: bool = False) -> Leaves:
        """The same for a batch that was split already."""
        if not self.normalises:
            return leaves
        seen = []
        with np.errstate(over="ignore", invalid="ignore"):  # infinite ones are found later
            for leaf, normaliser in zip(leaves, self._normalisers, strict=True):
                if normaliser is not None and learns:
                    normaliser.update(leaf)
                seen.append(leaf if normaliser is None else normaliser(leaf))
        return tuple(seen)

    def learn_from(self, leaves: Leaves) -> None:
        """Let the statistics learn from a batch that was split already."""
        with np.errstate(over="ignore", invalid="ignore"):
            for leaf, normaliser in zip(leaves, self._normalisers, strict=True):
                if normaliser is not None:
                    normaliser.update(leaf)

    def sees_plainly(self, batch: Array) -> bool:
        """Whether such observations reach the networks as they are."""
        return self._normalisers == [None] and self.inputs.keeps(batch)

    def masks(self, obs: Any, infos: Mapping[str, Any]) -> npt.NDArray[np.bool_] | None:
        """Which actions are allowed, one row per observation; None if nothing is said of it."""
        masks = self.inputs.masks(obs, infos)
        if masks is not None:
            self.policy.head.check(masks)
        return masks

    def fit(self, actions: Array) -> Array:
        """Actions as environments get them."""
        if self.bounds is not None:
            low, high = self.bounds
            bounded: Array = np.minimum(np.maximum(actions, low), high)  # np.clip takes longer
            return bounded
        return actions if self._start is None else actions + self._start

    def fresh_states(self, count: int) -> Tensor:
        """The memory at the start of an episode: zeros."""
        return torch.zeros((count, self.policy.state_size), device=self.device)

    def play(self) -> Act:
        """How to act in one episode: the likeliest actions, with a memory of its own."""
        states, space = self.fresh_states(1), self._action_space
        is_number = isinstance(space, spaces.Discrete)

        @torch.inference_mode()
        def act(obs: Any, info: Mapping[str, Any]) -> Any:
            nonlocal states
            batch = batch_of_one(obs)
            infos = {MASK: [info[MASK]]} if MASK in info else {}
            masks = self.masks(batch, infos)
            allowed = None if masks is None else self.tensor(masks)
            leaves = self.tensors(self.look(batch))
            said, states = self.policy.respond(leaves, states, allowed)
            action = self.fit(self.policy.head.mode(said).cpu().numpy())[0]
            if is_number:
                return action
            return np.asarray(action, space.dtype).reshape(space.shape)

        return act

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "policy": deepcopy(self.policy.state_dict()),
            "normalisers": tuple(one and one.state() for one in self._normalisers),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the agent that gave this state; other entries of the mapping are ignored."""
        mine = self.state()
        check_structure(mine, {name: state[name] for name in mine}, "the agent's state")
        self.policy.load_state_dict(state["policy"])
        for normaliser, kept in zip(self._normalisers, state["normalisers"], strict=True):
            if normaliser is not None:
                normaliser.load(kept)
