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
    goal_radius: float | None
    """The reward is 1 within it, else 0; None rewards by minus the distance."""
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
    "PointRobot": PointRules(partial(draw_uniform, -1.0, 1.0, 2), ((-1.0, -1.0), (1.0, 1.0)), None),
    "PointRobotSparse": PointRules(_on_half_circle, ((-1.5, -0.5), (1.5, 1.5)), 0.2),
    "Wind": PointRules(
        partial(draw_uniform, -0.08, 0.08, 2),
        ((0.0, 0.0), (0.0, 0.0)),
        0.03,
        is_task_wind=True,
        numbered=_original_wind,
    ),
}


class PointEnv(TaskEnv):
    """A point in the plane that is moved by up to 0.1 in x and y."""

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's name and kind

    def __init__(self, rules: str, *, goal_radius: float | None = None, **task_args: Any) -> None:
        """`rules` is a key of `POINT_RULES`; `task_args` are those of `TaskList`."""
        self.rules = POINT_RULES[rules]
        self.goal_radius = self.rules.goal_radius if goal_radius is None else goal_radius
        draw, numbered = self.rules.draw_task, self.rules.numbered
        self.use_tasks(TaskList(draw, numbered=numbered, **task_args))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-MAX_MOVE, MAX_MOVE, (2,), np.float32)
        self.state: Point = np.zeros(2)

    @property
    def goal(self) -> Point:
        """Where the point is to go."""
        return np.array([0.0, 1.0]) if self.rules.is_task_wind else self.task

    def step(self, action: npt.ArrayLike) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move by the action, and by the wind."""
        move = np.clip(np.asarray(action, np.float64), -MAX_MOVE, MAX_MOVE)
        self.state = self.state + move + (self.task if self.rules.is_task_wind else 0.0)
        reward = -self._distance() if self.goal_radius is None else float(self.is_goal_state())
        return self.state.astype(np.float32), reward, False, False, {}

    def is_goal_state(self) -> bool:
        """Whether the point is within the radius; never, if rewards are distances."""
        return self.goal_radius is not None and self._distance() <= self.goal_radius

    def _distance(self) -> float:
        return float(np.linalg.norm(self.state - self.goal))

    def _begin(self) -> npt.NDArray[np.float32]:
        self.state = self.np_random.uniform(*self.rules.start)
        return self.state.astype(np.float32)


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
