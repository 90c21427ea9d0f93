"""Actions of several agents as one: of all together, or of the agent whose turn it is.

An agent's action is either numbered (Discrete, MultiDiscrete, MultiBinary: one or more choices) or
a Box. Where both kinds meet, everything becomes a Box: a choice among n is n numbers from -1 to 1,
of which the largest wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.errors import ActionError, ConfigError

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]


class _Choices:
    """The numbered actions of one agent."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space
        if isinstance(space, spaces.Discrete):
            self.counts, self._start = np.array([space.n]), np.array([space.start])
        elif isinstance(space, spaces.MultiDiscrete):
            self.counts, self._start = space.nvec.ravel(), space.start.ravel()
        else:
            assert space.shape is not None
            self.counts = np.full(int(np.prod(space.shape)), 2)
            self._start = np.zeros_like(self.counts)

    def action(self, numbers: Numbers) -> Any:
        """The agent's own action from one number per choice, each counted from 0."""
        chosen = numbers % self.counts + self._start
        if isinstance(self._space, spaces.Discrete):
            return self._space.dtype.type(chosen[0])
        assert self._space.shape is not None
        return chosen.reshape(self._space.shape).astype(self._space.dtype)

    def from_scores(self, scores: Numbers) -> Any:
        """The agent's own action from a score for every alternative of every choice."""
        parts = np.split(scores, np.cumsum(self.counts)[:-1])
        return self.action(np.array([int(part.argmax()) for part in parts]))

    def mask(self, given: Any) -> list[Mask]:
        """What is allowed of each choice, from a mask as PettingZoo's environments give it."""
        if given is None:
            return [np.ones(count, np.bool_) for count in self.counts]
        parts = given if isinstance(given, (tuple, list)) else [given]
        flat = np.concatenate([np.asarray(part, np.bool_).ravel() for part in parts])
        if len(flat) != self.counts.sum():
            raise ActionError(
                f"an action mask for {self._space} has {self.counts.sum()} items, got {len(flat)}"
            )
        return np.split(flat, np.cumsum(self.counts)[:-1])


class _Actions:
    """What both forms share."""

    space: spaces.Space[Any]

    def __init__(self, agents: Mapping[Any, spaces.Space[Any]]) -> None:
        self._choices: dict[Any, _Choices] = {}
        self._boxes: dict[Any, spaces.Box] = {}
        for name, space in agents.items():
            if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
                self._choices[name] = _Choices(space)
            elif isinstance(space, spaces.Box):
                self._boxes[name] = space
            else:
                raise ConfigError(
                    f"the actions of {name} must be Discrete, MultiDiscrete, MultiBinary or Box "
                    f"to be flattened, got {space}"
                )
        self._names = list(agents)

    def _numbers(self, action: Any) -> Numbers:
        """The action as one row of numbers, after making sure that it has as many as it must."""
        numbers, shape = np.asarray(action), self.space.shape
        is_numeric = numbers.dtype.kind in "biuf"
        if not is_numeric or numbers.shape != shape or not np.isfinite(numbers).all():
            raise ActionError(f"an action must be in {self.space}, got {action!r}")
        return numbers.reshape(-1)

    def _box_part(self, name: Any) -> tuple[Numbers, Numbers]:
        """The bounds of one agent's part of a Box."""
        if name in self._boxes:
            box = self._boxes[name]
            return box.low.ravel(), box.high.ravel()
        width = int(self._choices[name].counts.sum())
        return np.full(width, -1.0), np.full(width, 1.0)

    def _own(self, name: Any, part: Numbers) -> Any:
        """One agent's action from its part of a Box."""
        if name in self._choices:
            return self._choices[name].from_scores(part)
        box = self._boxes[name]
        return np.clip(part.astype(box.dtype), box.low.ravel(), box.high.ravel()).reshape(box.shape)

    def _check_masks(self) -> None:
        if self._boxes:
            raise ActionError("only numbered actions have masks; some agents here act with a Box")


class JointActions(_Actions):
    """One action for all agents, their parts one after another."""

    def __init__(self, agents: Mapping[Any, spaces.Space[Any]]) -> None:
        """Plan the parts."""
        super().__init__(agents)
        parts: dict[Any, int]
        if self._boxes:
            bounds = [self._box_part(name) for name in agents]
            parts = {name: len(low) for name, (low, _) in zip(agents, bounds, strict=True)}
            low, high = (
                np.concatenate([bound[side] for bound in bounds]).astype(np.float32)
                for side in (0, 1)
            )
            self.space = spaces.Box(low, high, dtype=np.float32)
        else:
            parts = {name: len(choices.counts) for name, choices in self._choices.items()}
            counts = [choices.counts for choices in self._choices.values()]
            self.space = spaces.MultiDiscrete(np.concatenate(counts))
        stops = np.cumsum(list(parts.values())).tolist()
        self._parts = {
            name: slice(stop - size, stop)
            for (name, size), stop in zip(parts.items(), stops, strict=True)
        }

    def of_each(self, action: Any, names: Sequence[Any]) -> dict[Any, Any]:
        """The own actions of these agents."""
        numbers = self._numbers(action)
        if self._boxes:
            return {name: self._own(name, numbers[self._parts[name]]) for name in names}
        return {name: self._choices[name].action(numbers[self._parts[name]]) for name in names}

    def masks(self, given: Mapping[Any, Any], live: Sequence[Any]) -> Mask:
        """What all agents may do; of one that is gone only the first action is left."""
        self._check_masks()
        masks = []
        for name, choices in self._choices.items():
            if name in live:
                masks += choices.mask(given.get(name))
            else:
                masks += [np.arange(count) == 0 for count in choices.counts]
        return np.concatenate(masks)


class SharedActions(_Actions):
    """One action space in which every agent finds its own."""

    def __init__(self, agents: Mapping[Any, spaces.Space[Any]]) -> None:
        """Find a space that is large enough for each."""
        super().__init__(agents)
        self._is_scaled = False
        if self._boxes:
            boxes = list(self._boxes.values())
            if not self._choices and all(box == boxes[0] for box in boxes):
                low, high = (bound.ravel() for bound in (boxes[0].low, boxes[0].high))
            else:
                self._is_scaled = True
                width = max(len(self._box_part(name)[0]) for name in agents)
                low, high = np.full(width, -1.0), np.full(width, 1.0)
                self._check_bounds()
            self.space = spaces.Box(
                low.astype(np.float32), high.astype(np.float32), dtype=np.float32
            )
            return
        width = max(len(choices.counts) for choices in self._choices.values())
        counts = np.ones((len(agents), width), np.int64)
        for row, choices in zip(counts, self._choices.values(), strict=True):
            row[: len(choices.counts)] = choices.counts
        self._counts = counts.max(axis=0)
        is_single = all(isinstance(space, spaces.Discrete) for space in agents.values())
        self.space = (
            spaces.Discrete(int(self._counts[0]))
            if is_single
            else spaces.MultiDiscrete(self._counts)
        )

    def of_each(self, action: Any, names: Sequence[Any]) -> dict[Any, Any]:
        """The own actions of these agents, all of them chosen by the same numbers."""
        numbers = self._numbers(action)
        return {name: self._of(name, numbers) for name in names}

    def masks(self, given: Mapping[Any, Any], live: Sequence[Any]) -> Mask:
        """What the agent whose turn it is may do; what it does not have, it may not choose."""
        self._check_masks()
        masks = [np.arange(count) == 0 for count in self._counts]
        for name in live[:1]:
            for wide, own in zip(masks, self._choices[name].mask(given.get(name)), strict=False):
                wide[...] = False
                wide[: len(own)] = own
        return np.concatenate(masks)

    def _of(self, name: Any, numbers: Numbers) -> Any:
        if not self._boxes:
            choices = self._choices[name]
            return choices.action(numbers[: len(choices.counts)])
        low, high = self._box_part(name)
        part = numbers[: len(low)]
        if self._is_scaled and name in self._boxes:
            part = low + (part.astype(np.float64) + 1) / 2 * (high - low)
        return self._own(name, part)

    def _check_bounds(self) -> None:
        for name, box in self._boxes.items():
            if not box.is_bounded():
                raise ConfigError(
                    f"agents with different actions share one Box that is scaled to their bounds, "
                    f"but the actions of {name} have none: {box}"
                )
