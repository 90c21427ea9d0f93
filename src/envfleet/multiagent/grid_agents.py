"""The agents and the target of the grid world: how they are described, move and look.

A ground agent (`FOVAgent`) is stopped by obstacles and by other agents. An observer
(`ObserverAgent`) flies over both, and sees further but less surely the higher it flies.
Positions are (x, y) with y upwards, so that "up" adds one to y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.errors import ConfigError

__all__ = ["FOVAgent", "GridAgent", "ObserverAgent", "TargetConfig", "read_agents"]

Cell = tuple[int, int]
Colour = tuple[int, int, int]

MOVES: tuple[Cell, ...] = ((1, 0), (0, 1), (-1, 0), (0, -1), (0, 0))
"""What the actions right, up, left, down and no-op add to a position."""
RISE, STAY_LEVEL, SINK = 5, 6, 7
"""The further actions of an observer."""
EMPTY, OBSTACLE, AGENT, TARGET, CLOUD, UNSEEN = 0, 1, 2, 3, 4, -10
"""What a cell of a field of view holds; `UNSEEN` is beyond an observer's view at its level."""
NUM_LEVELS = 3
COLOURS: tuple[Colour, ...] = ((80, 160, 255), (255, 180, 60), (100, 200, 100), (255, 100, 100))


@dataclass(frozen=True, kw_only=True, slots=True)
class GridAgent:
    """What both types of agent have in common."""

    name: str
    color: tuple[int, ...]
    fov_size: int = 3
    """The side of the square that it sees; for an observer, at its lowest flight level."""
    outline_width: int = 2
    box_scale: float = 0.8
    show_target_coords: bool = False

    def __post_init__(self) -> None:
        """Check what was given."""
        if not self.name:
            raise ConfigError(f"the name of an agent must not be empty, got {self.name!r}")
        if self.fov_size < 3 or self.fov_size % 2 == 0:
            raise ConfigError(
                f"the fov_size of {self.name} must be odd and at least 3, got {self.fov_size}"
            )
        if len(self.color) != 3 or not all(0 <= part <= 255 for part in self.color):
            raise ConfigError(
                f"the color of {self.name} must be three numbers from 0 to 255, got {self.color}"
            )

    @property
    def side(self) -> int:
        """The side of its `obstacles_fov`."""
        return self.fov_size


@dataclass(frozen=True, kw_only=True, slots=True)
class FOVAgent(GridAgent):
    """Walks, and sees all that is near."""

    @property
    def action_space(self) -> spaces.Discrete:
        """Right, up, left, down, no-op."""
        return spaces.Discrete(len(MOVES))

    def observation_space(self, size: int, *, has_target: bool) -> spaces.Dict:
        """Its own position and what is around it."""
        return _observation_space(self, size, has_target, EMPTY, TARGET)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserverAgent(GridAgent):
    """Flies on one of three levels; each level shows one more ring of cells than the one below."""

    max_altitude: int = NUM_LEVELS
    target_detection_probs: tuple[float, ...] = (1.0, 0.66, 0.33)
    """How likely it is, on each level, to notice a target that it could see."""

    def __post_init__(self) -> None:
        """Check what was given."""
        GridAgent.__post_init__(self)
        probs = self.target_detection_probs
        if len(probs) != NUM_LEVELS or not all(0 <= prob <= 1 for prob in probs):
            raise ConfigError(
                f"the target_detection_probs of {self.name} must be {NUM_LEVELS} numbers from 0 "
                f"to 1, got {probs}"
            )
        if not 1 <= self.max_altitude <= NUM_LEVELS:
            raise ConfigError(
                f"the max_altitude of {self.name} must be from 1 to {NUM_LEVELS}, "
                f"got {self.max_altitude}"
            )

    @property
    def side(self) -> int:
        """The side of its `obstacles_fov`: what it sees from the highest level."""
        return self.fov_size + 2 * (NUM_LEVELS - 1)

    @property
    def action_space(self) -> spaces.Discrete:
        """The moves of a ground agent, then rise, stay on this level, sink."""
        return spaces.Discrete(SINK + 1)

    def observation_space(self, size: int, *, has_target: bool) -> spaces.Dict:
        """Its own position, its flight level (from 1) and what is below it."""
        space = _observation_space(self, size, has_target, UNSEEN, CLOUD)
        return spaces.Dict({**space.spaces, "flight_level": spaces.Discrete(NUM_LEVELS + 1)})


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """How the target moves and how far it sees."""

    name: str = "target"
    color: Sequence[int] = (255, 0, 0)
    movement_speed: float = 0.3
    """How likely it is to move in a cycle."""
    movement_range: int = 1
    """Accepted because the original has it: a target never moves by more than one cell."""
    smooth_movement: bool = True
    """Keep a direction for a while, instead of a new one for every move."""
    box_cells: int = 3
    """The side of the square in which it sees agents."""
    outline_width: int = 2
    box_scale: float = 1.0

    def __post_init__(self) -> None:
        """Check what was given."""
        if not 0 <= self.movement_speed <= 1:
            raise ConfigError(
                f"the target's movement_speed must be from 0 to 1, got {self.movement_speed}"
            )
        if self.box_cells < 1 or self.box_cells % 2 == 0:
            raise ConfigError(
                f"the target's box_cells must be odd and positive, got {self.box_cells}"
            )


def read_agents(
    configs: Sequence[Mapping[str, Any]] | None, *, show_target_coords: bool
) -> list[FOVAgent | ObserverAgent]:
    """The agents that dicts describe; None is two ground agents, agent_1 and agent_2."""
    if configs is None:
        configs = [{"outline_width": 1}, {"outline_width": 1}]
    agents = [
        _read_agent(number, config, show_target_coords)
        for number, config in enumerate(configs, start=1)
    ]
    names = [agent.name for agent in agents]
    if not agents or len(set(names)) < len(names):
        raise ConfigError(f"agents must be one or more, each with a name of its own, got {names}")
    return agents


def read_config(kind: type[Any], what: str, config: Mapping[str, Any]) -> Any:
    """An object of a dataclass from a dict, with one sentence about a key that it does not have."""
    known = list(kind.__dataclass_fields__)
    unknown = [key for key in config if key not in known]
    if unknown:
        raise ConfigError(f"{what} has no {unknown[0]!r}; it has {', '.join(known)}")
    return kind(**config)


def _read_agent(
    number: int, config: Mapping[str, Any], show_target_coords: bool
) -> FOVAgent | ObserverAgent:
    given = {
        "name": f"agent_{number}",
        "color": COLOURS[(number - 1) % len(COLOURS)],
        "show_target_coords": show_target_coords,
        **config,
    }
    kinds = {kind.__name__: kind for kind in (FOVAgent, ObserverAgent)}
    name = given.pop("type", FOVAgent.__name__)
    if name not in kinds:
        raise ConfigError(f"the type of an agent must be one of {', '.join(kinds)}, got {name!r}")
    if name == ObserverAgent.__name__ and "fov_base_size" in given:
        given["fov_size"] = given.pop("fov_base_size")  # the original's name for it
    for key in ("color", "target_detection_probs"):
        if key in given:
            given[key] = tuple(given[key])
    agent: FOVAgent | ObserverAgent = read_config(kinds[name], f"an agent of type {name}", given)
    return agent


def _observation_space(
    agent: GridAgent, size: int, has_target: bool, low: int, high: int
) -> spaces.Dict:
    parts: dict[str, spaces.Space[Any]] = {
        "agent": spaces.Box(0, size - 1, (2,), np.int64),
        "obstacles_fov": spaces.Box(low, high, (agent.side, agent.side), np.int64),
    }
    if agent.show_target_coords:
        parts["target"] = spaces.Box(0 if has_target else -1, size - 1, (2,), np.int64)
    return spaces.Dict(parts)
