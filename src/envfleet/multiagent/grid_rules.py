"""The rules of the grid world, without any interface: who is where, who sees whom, who earns what.

Agents watch a moving target without being seen by it. A cycle is one move of every agent, in
order, and then one of the target. Everything random comes from the generator given to `reset`.

Reward of an agent, right after its own move, with lambda = `lambda_fov`:

    on the target                    -3 lambda
    else seen by the target          -lambda
    else it sees the target          1 - lambda
    else                             -0.01
    and besides: ran into an obstacle `obstacle_collision_penalty`; a new cell +0.025 if `intrinsic`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.errors import ConfigError
from envfleet.multiagent.grid_agents import (
    AGENT,
    CLOUD,
    EMPTY,
    MOVES,
    NUM_LEVELS,
    OBSTACLE,
    RISE,
    SINK,
    TARGET,
    UNSEEN,
    Cell,
    FOVAgent,
    ObserverAgent,
    TargetConfig,
)

Rectangle = tuple[int, int, int, int]
"""Left, lowest, width, height."""
View = npt.NDArray[np.int64]

_STEP_PENALTY, _NEW_CELL_BONUS = -0.01, 0.025
_LONGEST_SIDE = 4
TURN_SHARE = 0.3
"""A smooth target takes a new direction with this part of the probability of a move."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridRules:
    """What does not change from episode to episode."""

    size: int
    agents: Sequence[FOVAgent | ObserverAgent]
    target: TargetConfig | None
    lambda_fov: float
    intrinsic: bool
    obstacle_collision_penalty: float
    num_obstacles: int
    num_visual_obstacles: int

    def __post_init__(self) -> None:
        """Check what was given."""
        if self.size < 2:
            raise ConfigError(f"size must be at least 2, got {self.size}")
        if not 0 <= self.lambda_fov <= 1:
            raise ConfigError(f"lambda_fov must be from 0 to 1, got {self.lambda_fov}")
        for name in ("num_obstacles", "num_visual_obstacles"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.num_placed > self.size**2:
            raise ConfigError(
                f"{self.num_placed} agents and targets do not fit into a grid of size {self.size}"
            )

    @property
    def num_placed(self) -> int:
        """How many cells are taken at the start."""
        return len(self.agents) + (self.target is not None)


class GridState:
    """One episode. Agents are named by their index."""

    def __init__(self, rules: GridRules, rng: np.random.Generator) -> None:
        """Draw obstacles and places."""
        self.rules, self._rng = rules, rng
        size, count = rules.size, len(rules.agents)
        self.obstacles = list(self._rectangles(rules.num_obstacles, may_overlap=True))
        self.clouds = list(self._rectangles(rules.num_visual_obstacles, may_overlap=False))
        self.is_blocked = _covered(size, self.obstacles)
        self.is_clouded = _covered(size, self.clouds)
        free = np.flatnonzero(~self.is_blocked)
        if len(free) < rules.num_placed:  # too many obstacles: they give way
            free = np.arange(size * size)
        places = [divmod(int(n), size) for n in rng.choice(free, rules.num_placed, replace=False)]
        self.places: list[Cell] = places[:count]
        self.target: Cell | None = places[count] if rules.target is not None else None
        self.levels = [int(isinstance(agent, ObserverAgent)) for agent in rules.agents]
        """Flight levels; 0 is the ground."""
        self._direction: Cell = (0, 0)
        self._luck = rng.random(count)
        """Drawn once per move, so that an observer sees the same however often it is asked."""
        self._visited = [{place} for place in self.places]

    # ---- what happens ---------------------------------------------------------------------------

    def act(self, index: int, action: int) -> float:
        """Carry out one agent's action; its reward."""
        rules, agent = self.rules, self.rules.agents[index]
        reward = 0.0
        if action < len(MOVES):
            is_stopped = self._move(index, MOVES[action])
            reward += rules.obstacle_collision_penalty if is_stopped else 0.0
        elif isinstance(agent, ObserverAgent):
            change = {RISE: 1, SINK: -1}.get(action, 0)
            self.levels[index] = min(max(self.levels[index] + change, 1), agent.max_altitude)
        self._luck[index] = self._rng.random()
        place = self.places[index]
        if place == self.target:
            reward -= 3 * rules.lambda_fov
        elif self.is_seen_by_target(index):
            reward -= rules.lambda_fov
        elif self.sees_target(index):
            reward += 1 - rules.lambda_fov
        else:
            reward += _STEP_PENALTY
        if rules.intrinsic and place not in self._visited[index]:
            reward += _NEW_CELL_BONUS
            self._visited[index].add(place)
        return reward

    def move_target(self) -> None:
        """The end of a cycle."""
        config, rng = self.rules.target, self._rng
        if config is None or self.target is None:
            return
        if config.smooth_movement and rng.random() < config.movement_speed * TURN_SHARE:
            self._direction = MOVES[int(rng.integers(4))]
        if rng.random() >= config.movement_speed:
            return
        if not config.smooth_movement:
            self._direction = MOVES[int(rng.integers(4))]
        ahead = self._towards(self.target, self._direction)
        if not self.is_blocked[ahead]:
            self.target = ahead
            return
        for way in rng.permutation(4):
            beside = self._towards(self.target, MOVES[int(way)])
            if not self.is_blocked[beside]:
                self.target = beside
                return

    def _move(self, index: int, move: Cell) -> bool:
        """Move an agent if nothing is in its way; whether an obstacle is."""
        ahead = self._towards(self.places[index], move)
        if isinstance(self.rules.agents[index], FOVAgent):
            if self.is_blocked[ahead]:
                return move != (0, 0)
            if any(ahead == other for i, other in enumerate(self.places) if i != index):
                return False
        self.places[index] = ahead
        return False

    def _towards(self, place: Cell, move: Cell) -> Cell:
        last = self.rules.size - 1
        return min(max(place[0] + move[0], 0), last), min(max(place[1] + move[1], 0), last)

    # ---- what is seen ---------------------------------------------------------------------------

    def distance(self, index: int) -> float:
        """How many moves an agent is from the target; -1 without one."""
        if self.target is None:
            return -1.0
        (x, y), (to_x, to_y) = self.places[index], self.target
        return float(abs(x - to_x) + abs(y - to_y))

    def is_seen_by_target(self, index: int) -> bool:
        """Whether an agent is in the target's box."""
        if self.rules.target is None or self.target is None:
            return False
        return self._are_near(self.places[index], self.target, self.rules.target.box_cells // 2)

    def sees_target(self, index: int) -> bool:
        """Whether an agent's field of view shows the target."""
        if self.target is None:
            return False
        agent, radius = self.rules.agents[index], self.view_radius(index)
        if not self._are_near(self.places[index], self.target, radius):
            return False
        if not isinstance(agent, ObserverAgent):
            return True
        is_noticed = self._luck[index] < agent.target_detection_probs[self.levels[index] - 1]
        return bool(is_noticed and not self.is_clouded[self.target])

    def view_radius(self, index: int) -> int:
        """How far an agent sees now."""
        return self.rules.agents[index].fov_size // 2 + max(self.levels[index] - 1, 0)

    def view(self, index: int) -> View:
        """An agent's field of view, [x, y] around its own cell."""
        agent, size, own = self.rules.agents[index], self.rules.size, self.places[index]
        is_observer = isinstance(agent, ObserverAgent)
        reach = agent.side // 2
        around = np.full((size + 2 * reach, size + 2 * reach), OBSTACLE, np.int64)
        inside = around[reach : reach + size, reach : reach + size]
        inside[...] = EMPTY if is_observer else self.is_blocked
        for other, place in enumerate(self.places):
            if other != index and not (is_observer and self.levels[other] > self.levels[index]):
                inside[place] = AGENT
        if is_observer:
            inside[self.is_clouded] = CLOUD
        if self.target is not None and self.sees_target(index):
            inside[self.target] = TARGET
        seen = around[own[0] : own[0] + agent.side, own[1] : own[1] + agent.side].copy()
        if is_observer:
            for ring in range(NUM_LEVELS - self.levels[index]):
                seen[[ring, -1 - ring], :] = seen[:, [ring, -1 - ring]] = UNSEEN
        return seen

    def observation(self, index: int) -> dict[str, Any]:
        """All that an agent is told; every array is its own."""
        agent = self.rules.agents[index]
        told: dict[str, Any] = {
            "agent": np.array(self.places[index], np.int64),
            "obstacles_fov": self.view(index),
        }
        if agent.show_target_coords:
            told["target"] = np.array((-1, -1) if self.target is None else self.target, np.int64)
        if isinstance(agent, ObserverAgent):
            told["flight_level"] = np.int64(self.levels[index])
        return told

    @staticmethod
    def _are_near(one: Cell, other: Cell, radius: int) -> bool:
        return abs(one[0] - other[0]) <= radius and abs(one[1] - other[1]) <= radius

    # ---- obstacles ------------------------------------------------------------------------------

    def _rectangles(self, count: int, *, may_overlap: bool) -> Iterator[Rectangle]:
        """Up to `count` small rectangles, fewer if there is no room for more."""
        size, made = self.rules.size, set[Rectangle]()
        taken = np.zeros((size, size), np.bool_)
        for _ in range(20 * count):
            if len(made) == count:
                return
            x, y = (int(n) for n in self._rng.integers(size, size=2))
            width = int(self._rng.integers(1, min(_LONGEST_SIDE, size - x) + 1))
            height = int(self._rng.integers(1, min(_LONGEST_SIDE, size - y) + 1))
            rectangle = (x, y, width, height)
            cells = taken[x : x + width, y : y + height]
            if rectangle in made or (cells.any() and not may_overlap):
                continue
            made.add(rectangle)
            cells[...] = True
            yield rectangle


def _covered(size: int, rectangles: Sequence[Rectangle]) -> npt.NDArray[np.bool_]:
    covered = np.zeros((size, size), np.bool_)
    for x, y, width, height in rectangles:
        covered[x : x + width, y : y + height] = True
    return covered
