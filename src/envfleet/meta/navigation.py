"""Points and cells in the plane: PointRobot, PointRobotSparse, Wind, GridNavi.

The time limits are those of the registrations. `state` is kept in float64, and observed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.meta.tasks import TaskEnv, TaskList, draw_uniform

Point = npt.NDArray[np.float64]
MAX_MOVE = 0.1


@dataclass(frozen=True, slots=True)
class PointRules:
    """What one environment of a point that moves by its actions differs in."""

    draw_task: Callable[[np.random.Generator], npt.ArrayLike]
    start: tuple[tuple[float, float], tuple[float, float]]
    """The corners of the square that episodes start in."""
    is_task_wind: bool = False
    """The task is a push at every step, and the goal is (0, 1); else the task is the goal."""
    numbered: Callable[[int, int], npt.ArrayLike] | None = None
    """Makes task i from the task seed and i, where it must be the task of the original."""


def _on_half_circle(rng: np.random.Generator) -> npt.ArrayLike:
    angle = rng.uniform(0.0, np.pi)
    return np.cos(angle), np.sin(angle)


def _original_wind(seed: int, number: int) -> npt.ArrayLike:
    """The original draws its winds one after another from numpy's old generator."""
    winds = np.random.RandomState(seed).uniform(-0.08, 0.08, (number + 1, 2))
    wind: Point = winds[number]
    return wind


POINT_RULES = {
    "PointRobot": PointRules(partial(draw_uniform, -1.0, 1.0, 2), ((-1.0, -1.0), (1.0, 1.0))),
    "PointRobotSparse": PointRules(_on_half_circle, ((-1.5, -0.5), (1.5, 1.5))),
    "Wind": PointRules(
        partial(draw_uniform, -0.08, 0.08, 2),
        ((0.0, 0.0), (0.0, 0.0)),
        is_task_wind=True,
        numbered=_original_wind,
    ),
}


class PointEnv(TaskEnv):
    """A point in the plane that is moved by up to 0.1 in x and y, rewarded by its distance."""

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's name and kind

    def __init__(self, rules: str, **task_args: Any) -> None:
        """`rules` is a key of `POINT_RULES`; `task_args` are those of `TaskList`."""
        self.rules = POINT_RULES[rules]
        draw, numbered = self.rules.draw_task, self.rules.numbered
        self.use_tasks(TaskList(draw, numbered=numbered, **task_args))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-MAX_MOVE, MAX_MOVE, (2,), np.float32)
        self.state: Point = np.zeros(2)

    @property
    def goal(self) -> Point:
        """Where the point is to go."""
        return np.array([0.0, 1.0]) if self.rules.is_task_wind else self.task

    def goal_of(self, number: int) -> Point:
        """Where the goal of a task is."""
        return self.goal if self.rules.is_task_wind else self.tasks[number]

    def step(self, action: npt.ArrayLike) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move by the action, and by the wind."""
        move = np.minimum(np.maximum(np.asarray(action, np.float64), -MAX_MOVE), MAX_MOVE)
        self.state = self.state + move + (self.task if self.rules.is_task_wind else 0.0)
        return self.state.astype(np.float32), self._reward(), False, False, {}

    def _reward(self) -> float:
        return -self._distance()

    def _distance(self) -> float:
        return float(np.linalg.norm(self.state - self.goal))

    def _begin(self) -> npt.NDArray[np.float32]:
        self.state = self.np_random.uniform(*self.rules.start)
        return self.state.astype(np.float32)


class SparsePointEnv(PointEnv):
    """The same, rewarded within a radius of the goal only."""

    def __init__(self, rules: str, *, goal_radius: float, **task_args: Any) -> None:
        """`rules` is a key of `POINT_RULES`; `task_args` are those of `TaskList`."""
        super().__init__(rules, **task_args)
        self.goal_radius = goal_radius

    def is_goal_state(self) -> bool:
        """Whether the point is within the radius."""
        return self._distance() <= self.goal_radius

    def _reward(self) -> float:
        return float(self.is_goal_state())


class GridNavi(TaskEnv):
    """Find one of 21 cells of a 5 x 5 grid, from a corner: stay, up, right, down, left."""

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's name and kind
    size = 5
    moves = np.array([(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)])

    def __init__(self, **task_args: Any) -> None:
        """`task_args` are those of `TaskList`."""
        cells = [(x, y) for y in range(self.size) for x in range(self.size) if max(x, y) > 1]
        self.use_tasks(TaskList(choices=cells, **task_args))
        self.observation_space = spaces.Box(0, self.size - 1, (2,), np.float32)
        self.action_space = spaces.Discrete(len(self.moves))
        self.state: Point = np.zeros(2)

    def goal_of(self, number: int) -> Point:
        """The cell of a task."""
        return self.tasks[number]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move to a neighbour; the border holds."""
        self.state = np.clip(self.state + self.moves[int(action)], 0, self.size - 1)
        reward = 1.0 if self.is_goal_state() else -0.1
        return self.state.astype(np.float32), reward, False, False, {}

    def is_goal_state(self) -> bool:
        """Whether this is the cell."""
        return bool((self.state == self.task).all())

    def _begin(self) -> npt.NDArray[np.float32]:
        self.state = np.zeros(2)
        return self.state.astype(np.float32)
