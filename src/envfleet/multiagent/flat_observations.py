"""Observations of several agents as one vector of float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.errors import ConfigError
from envfleet.multiagent.bare import MASK_KEY

Flat = npt.NDArray[np.float32]


class FlatObservations:
    """Where each agent's observation lies, for agents in a fixed order."""

    def __init__(self, agents: Mapping[Any, spaces.Space[Any]]) -> None:
        """Plan both forms."""
        self._names = list(agents)
        self._spaces = {name: _without_mask(space) for name, space in agents.items()}
        boxes = {name: _as_box(name, space) for name, space in self._spaces.items()}
        self._parts: dict[Any, slice] = {}
        stop = 0
        for name, box in boxes.items():
            self._parts[name] = slice(stop, stop + len(box.low))
            stop += len(box.low)
        self._width = max(len(box.low) for box in boxes.values())
        # an agent that is gone, and what fills up a shorter observation, is zero
        lows = [np.minimum(box.low, 0) for box in boxes.values()]
        highs = [np.maximum(box.high, 0) for box in boxes.values()]
        flags = np.zeros(len(boxes), np.float32), np.ones(len(boxes), np.float32)
        self.joint_space = spaces.Box(
            np.concatenate([*lows, flags[0]]), np.concatenate([*highs, flags[1]]), dtype=np.float32
        )
        low = np.min([self._filled(part) for part in lows], axis=0)
        high = np.max([self._filled(part) for part in highs], axis=0)
        self.turn_space = spaces.Box(
            np.concatenate([low, flags[0]]), np.concatenate([high, flags[1]]), dtype=np.float32
        )

    def joint(self, seen: Mapping[Any, Any], alive: Sequence[Any]) -> Flat:
        """All agents' observations, then who is alive."""
        flat = np.zeros(self.joint_space.shape, np.float32)
        for name, observation in seen.items():
            flat[self._parts[name]] = self._flat(name, observation)
        first_flag = len(flat) - len(self._names)
        for number, name in enumerate(self._names):
            flat[first_flag + number] = name in alive
        return flat

    def turn(self, name: Any, observation: Any) -> Flat:
        """One agent's observation, then its number as a one among zeros."""
        flat = np.zeros(self.turn_space.shape, np.float32)
        part = self._flat(name, observation)
        flat[: len(part)] = part
        flat[self._width + self._names.index(name)] = 1
        return flat

    def _flat(self, name: Any, observation: Any) -> npt.NDArray[Any]:
        space = self._spaces[name]
        if isinstance(observation, Mapping) and not isinstance(space, spaces.Dict):
            (observation,) = (part for key, part in observation.items() if key != MASK_KEY)
        return np.asarray(spaces.flatten(space, observation))

    def _filled(self, part: Flat) -> Flat:
        return np.concatenate([part, np.zeros(self._width - len(part), np.float32)])


def _without_mask(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """A Dict without its mask; if one part is left, that part alone."""
    if not isinstance(space, spaces.Dict) or MASK_KEY not in space.spaces:
        return space
    left = {key: part for key, part in space.spaces.items() if key != MASK_KEY}
    return next(iter(left.values())) if len(left) == 1 else spaces.Dict(left)


def _as_box(name: Any, space: spaces.Space[Any]) -> spaces.Box:
    if not space.is_np_flattenable:
        raise ConfigError(
            f"the observations of {name} cannot be a vector of fixed length: {space}; give the "
            "environment an observation of Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
        )
    flat: Any = spaces.flatten_space(space)
    low, high = (np.asarray(bound, np.float32) for bound in (flat.low, flat.high))
    return spaces.Box(low, high, dtype=np.float32)
