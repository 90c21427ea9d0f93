"""A scripted player of the grid world: what a learner's results are measured against.

It is given what an agent is given, and no more: the rules, and one observation after another. For
every agent it keeps how likely the target is in each cell and which way it is heading, and takes
the action that promises most for this move and the next one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.multiagent.grid_agents import (
    AGENT,
    CLOUD,
    MOVES,
    OBSTACLE,
    RISE,
    SINK,
    TARGET,
    UNSEEN,
    Cell,
    ObserverAgent,
)
from envfleet.multiagent.grid_rules import TURN_SHARE, GridRules

__all__ = ["GridWorldPolicy"]

Grid = npt.NDArray[np.float64]

_APPROACH = 1e-3
"""What being one move closer to the target is worth, to decide between equal actions."""
_NEXT_MOVE = 0.9
"""How much the move after this one counts."""


class GridWorldPolicy:
    """Plays every agent of a grid world.

    Example:
        >>> from envfleet.multiagent import GridWorldEnvParallel, GridWorldPolicy
        >>> env = GridWorldEnvParallel(size=7, max_steps=50, agents=[{"fov_size": 5}])
        >>> policy = GridWorldPolicy(env)
        >>> observations, _ = env.reset(seed=0)
        >>> total = 0.0
        >>> while env.agents:
        ...     actions = {agent: policy(agent, seen) for agent, seen in observations.items()}
        ...     observations, rewards, *_ = env.step(actions)
        ...     total += sum(rewards.values())
        >>> total > 15
        True
    """

    def __init__(self, env: Any) -> None:
        """Take the rules from a grid world, also through PettingZoo's wrappers."""
        self._rules: GridRules = env.unwrapped.rules
        self._names = list(env.possible_agents)
        self.reset()

    def reset(self) -> None:
        """Forget the last episode."""
        self._players = {
            name: _GridPlayer(self._rules, index) for index, name in enumerate(self._names)
        }

    def __call__(self, agent: str, observation: dict[str, Any]) -> int:
        """The action of an agent whose turn it is."""
        return self._players[agent].act(observation)


class _GridPlayer:
    def __init__(self, rules: GridRules, index: int) -> None:
        self._rules, self._agent = rules, rules.agents[index]
        size = rules.size
        self._is_blocked = np.zeros((size, size), np.bool_)
        self._belief = np.full((len(MOVES), size, size), 1.0)
        """By the direction in which the target is heading, as in `MOVES`, and its cell."""
        self._is_first = True
        self._box_radius = -1 if rules.target is None else rules.target.box_cells // 2
        cells = np.indices((size, size))
        self._x, self._y = cells[0], cells[1]

    def act(self, observation: dict[str, Any]) -> int:
        place = (int(observation["agent"][0]), int(observation["agent"][1]))
        level = int(observation.get("flight_level", 0))
        view = observation["obstacles_fov"]
        if not self._is_first:
            self._belief = self._moved(self._belief)
        self._is_first = False
        others = self._look(place, level, view, observation.get("target"))
        if isinstance(self._agent, ObserverAgent):
            wanted = self._wanted_level(self._agent)
            if level != wanted:
                return RISE if level < wanted else SINK
        return self._best_move(place, level, others)

    # ---- where the target is ------------------------------------------------------------------

    def _look(self, place: Cell, level: int, view: npt.NDArray[Any], told: Any) -> set[Cell]:
        """Learn from an observation; where other agents are."""
        size, reach = self._rules.size, self._agent.side // 2
        inside = np.full((size, size), UNSEEN)
        low = [max(part - reach, 0) for part in place]
        high = [min(part + reach + 1, size) for part in place]
        inside[low[0] : high[0], low[1] : high[1]] = view[
            low[0] - place[0] + reach : high[0] - place[0] + reach,
            low[1] - place[1] + reach : high[1] - place[1] + reach,
        ]
        self._is_blocked |= inside == OBSTACLE
        found = np.argwhere(inside == TARGET)
        if told is not None and told[0] >= 0:
            found = np.array([told])
        if len(found):
            x, y = (int(part) for part in found[0])
            heading = self._belief[:, x, y].copy()
            self._belief[...] = 0.0
            self._belief[:, x, y] = heading if heading.any() else 1.0
        else:
            is_seen = (inside != UNSEEN) & (inside != CLOUD)
            self._belief[:, is_seen] *= 1.0 - self._chance_to_notice(level)
            self._belief[:, self._is_blocked] = 0.0
        total = self._belief.sum()
        if total > 0:
            self._belief /= total
        else:  # it was thought to be where it is not: start again
            self._belief[...] = 1.0 / self._belief.size
        return {(int(x), int(y)) for x, y in np.argwhere(inside == AGENT)}

    def _moved(self, belief: Grid) -> Grid:
        """What is believed after one move of the target."""
        target = self._rules.target
        if target is None:
            return belief
        speed, turn = target.movement_speed, target.movement_speed * TURN_SHARE
        if target.smooth_movement:
            turned = (1 - turn) * belief
            turned[:4] += turn / 4 * belief.sum(axis=0)
        else:
            turned = np.zeros_like(belief)
            turned[:4] = belief.sum(axis=0) / 4
        moved = (1 - speed) * turned
        last = self._rules.size - 1
        for heading, (dx, dy) in enumerate(MOVES):
            to_x, to_y = np.clip(self._x + dx, 0, last), np.clip(self._y + dy, 0, last)
            is_stopped = self._is_blocked[to_x, to_y]
            to_x, to_y = np.where(is_stopped, self._x, to_x), np.where(is_stopped, self._y, to_y)
            np.add.at(moved[heading], (to_x, to_y), speed * turned[heading])
        return moved

    # ---- what to do ---------------------------------------------------------------------------

    def _best_move(self, place: Cell, level: int, others: set[Cell]) -> int:
        now, later = self._belief.sum(axis=0), self._moved(self._belief).sum(axis=0)
        distances = self._distances(np.unravel_index(int(later.argmax()), later.shape))
        values = []
        for move in range(len(MOVES)):
            there, penalty = self._after(place, move, others)
            next_best = max(
                self._expected(self._after(there, after, others)[0], level, later)
                for after in range(len(MOVES))
            )
            value = self._expected(there, level, now) + penalty + _NEXT_MOVE * next_best
            values.append(value - _APPROACH * distances[there])
        return int(np.argmax(values))

    def _after(self, place: Cell, move: int, others: set[Cell]) -> tuple[Cell, float]:
        """Where a move leads as far as it is known, and what running into something costs."""
        last = self._rules.size - 1
        there = tuple(
            min(max(part + by, 0), last) for part, by in zip(place, MOVES[move], strict=True)
        )
        if there == place or isinstance(self._agent, ObserverAgent):
            return (there[0], there[1]), 0.0
        if self._is_blocked[there]:
            return place, self._rules.obstacle_collision_penalty
        return (place if there in others else (there[0], there[1])), 0.0

    def _expected(self, place: Cell, level: int, chances: Grid) -> float:
        """The reward of being in a place."""
        weight = self._rules.lambda_fov
        apart = np.maximum(np.abs(self._x - place[0]), np.abs(self._y - place[1]))
        seeing = self._chance_to_notice(level) * (1 - weight)
        earned = np.where(apart <= self._view_radius(level), seeing, 0.0)
        earned = np.where(apart <= self._box_radius, -weight, earned)
        earned = np.where(apart == 0, -3 * weight, earned)
        return float((earned * chances).sum()) if self._rules.target is not None else 0.0

    def _distances(self, goal: Any) -> Grid:
        """Moves from every cell to the goal, around the obstacles that are known."""
        size = self._rules.size
        distances = np.full((size, size), float(size * size))
        if self._view_radius(self._wanted_level(self._agent)) <= self._box_radius:
            return np.zeros_like(distances)  # it cannot see unseen: better stay away
        queue = deque([(int(goal[0]), int(goal[1]))])
        distances[queue[0]] = 0
        while queue:
            x, y = queue.popleft()
            for dx, dy in MOVES[:4]:
                cell = (x + dx, y + dy)
                if (
                    0 <= cell[0] < size
                    and 0 <= cell[1] < size
                    and distances[cell] == size * size
                    and (not self._is_blocked[cell] or isinstance(self._agent, ObserverAgent))
                ):
                    distances[cell] = distances[x, y] + 1
                    queue.append(cell)
        return distances

    def _wanted_level(self, agent: Any) -> int:
        """The lowest flight level from which it sees further than the target."""
        if not isinstance(agent, ObserverAgent):
            return 0
        levels = range(1, agent.max_altitude + 1)
        return next((n for n in levels if self._view_radius(n) > self._box_radius), levels[-1])

    def _view_radius(self, level: int) -> int:
        return self._agent.fov_size // 2 + max(level - 1, 0)

    def _chance_to_notice(self, level: int) -> float:
        agent = self._agent
        return agent.target_detection_probs[level - 1] if isinstance(agent, ObserverAgent) else 1.0
