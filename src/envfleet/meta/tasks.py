"""The tasks of a meta-RL environment: one list for all workers, drawn from one task seed.

Task i depends on the task seed and on i only. So it is the same goal in every worker, in an
evaluation environment and after a restart, and drawing it uses up no other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from envfleet.errors import ConfigError
from envfleet.options import Count, CountOrZero, check

Task = npt.NDArray[np.float64]
TaskSampler = Callable[[np.random.Generator, Sequence[Any]], Any]
"""Chooses the task of the next trial: (generator, training tasks) -> task, or None."""


def sample_uniformly(rng: np.random.Generator, train_tasks: Sequence[Any]) -> Any:
    """Every training task is as likely as any other; None where tasks are endless."""
    return train_tasks[int(rng.integers(len(train_tasks)))] if len(train_tasks) else None


def draw_uniform(low: float, high: float, size: int, rng: np.random.Generator) -> Task:
    """A task of `size` numbers between `low` and `high`."""
    return rng.uniform(low, high, size)


class TaskList:
    """Numbered tasks: so many, or endless; the first are for training, the last for evaluation."""

    def __init__(
        self,
        draw: Callable[[np.random.Generator], npt.ArrayLike] | None = None,
        *,
        choices: Sequence[npt.ArrayLike] | None = None,
        numbered: Callable[[int, int], npt.ArrayLike] | None = None,
        num_tasks: int | None = None,
        num_train_tasks: int | None = None,
        num_eval_tasks: int | None = None,
        task_seed: int = 0,
        task_sampler: TaskSampler = sample_uniformly,
    ) -> None:
        """Nothing is drawn yet.

        Args:
            draw: Draws one task; needed unless there are choices.
            choices: All tasks there are, if these are few. Task i is then one of them, in an order
                that the task seed decides; tasks repeat only after all have had their turn.
            numbered: Makes task i from the task seed and i; else it is drawn from both.
            num_tasks: How many tasks; None is the sum of the two below, or endless.
            num_train_tasks: How many of them are for training, from the first on.
            num_eval_tasks: How many of them are for evaluation, up to the last. Endless tasks are
                trained on as they are drawn, and evaluated on the first of the list.
            task_seed: What the tasks are drawn from.
            task_sampler: Chooses the task of a reset that names none.
        """
        check("num_tasks", num_tasks, Count | None)
        check("num_train_tasks", num_train_tasks, Count | None)
        check("num_eval_tasks", num_eval_tasks, CountOrZero | None)
        check("task_seed", task_seed, CountOrZero)
        num_eval = num_eval_tasks or 0
        if num_tasks is None and num_train_tasks is not None:
            num_tasks = num_train_tasks + num_eval
        num_train = num_train_tasks or (0 if num_tasks is None else num_tasks - num_eval)
        if num_tasks is not None and not (1 <= num_train <= num_tasks and num_eval <= num_tasks):
            raise ConfigError(
                f"num_tasks={num_tasks} leaves {num_train} tasks for training and {num_eval} for "
                "evaluation; raise num_tasks, or lower num_train_tasks or num_eval_tasks"
            )
        self.num_tasks = num_tasks
        self.train_tasks: list[int] = list(range(num_train))
        """Numbers of the tasks to train on; empty if tasks are endless."""
        first_eval = 0 if num_tasks is None else num_tasks - num_eval
        self.eval_tasks: list[int] = list(range(first_eval, first_eval + num_eval))
        if draw is None and choices is None:
            raise ConfigError("a list of tasks needs a function that draws one, or choices")
        self._draw, self._numbered = draw, numbered
        self._seed, self._sampler = task_seed, task_sampler
        self._choices: npt.NDArray[np.float64] | None = None
        if choices is not None:
            order = np.random.default_rng(task_seed).permutation(len(choices))
            self._choices = np.asarray(choices, np.float64)[order]

    def __getitem__(self, number: int) -> Task:
        """Task `number`; endless lists have every number from 0 on."""
        if number < 0 or (self.num_tasks is not None and number >= self.num_tasks):
            have = "0 and up" if self.num_tasks is None else f"0 to {self.num_tasks - 1}"
            raise ConfigError(f"there is no task {number}: this environment has tasks {have}")
        if self._choices is not None:
            choice: Task = self._choices[number % len(self._choices)]
            return choice
        if self._numbered is not None:
            return np.atleast_1d(np.asarray(self._numbered(self._seed, number), np.float64))
        return self._drawn(np.random.default_rng([self._seed, number]))

    def sample(self, rng: np.random.Generator) -> Task:
        """The task of a reset that names none."""
        number = self._sampler(rng, self.train_tasks)
        return self.find(number) if number is not None else self._drawn(rng)

    def find(self, task: Any) -> Task:
        """The task of this number; a task that is given as such is returned."""
        if isinstance(task, int | np.integer) and not isinstance(task, bool):
            return self[int(task)]
        if not isinstance(task, np.ndarray | list | tuple):
            raise ConfigError(f"a task is a number in the list, an array or None; got {task!r}")
        given, like = np.asarray(task, np.float64), self[0]
        if given.shape != like.shape:
            raise ConfigError(f"a task of this environment is like {like}; got {task!r}")
        return given

    def _drawn(self, rng: np.random.Generator) -> Task:
        if self._choices is not None:
            choice: Task = self._choices[rng.integers(len(self._choices))]
            return choice
        assert self._draw is not None
        return np.atleast_1d(np.asarray(self._draw(rng), np.float64))


class TaskEnv(gymnasium.Env[Any, Any]):
    """An environment with a task: `reset(options={"task": i})` sets it, `reset()` keeps it.

    A reset with a seed and without a task draws one, so that the seed says all.
    """

    tasks: TaskList
    task: Task
    _is_task_chosen = False

    def use_tasks(self, tasks: TaskList) -> None:
        """Have these tasks; called by the constructor."""
        self.tasks, self.task = tasks, tasks[0]

    @property
    def train_tasks(self) -> list[int]:
        """Numbers of the tasks to train on; empty if tasks are endless."""
        return self.tasks.train_tasks

    @property
    def eval_tasks(self) -> list[int]:
        """Numbers of the tasks to evaluate on."""
        return self.tasks.eval_tasks

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, of another task if `options` has one (None draws it)."""
        gymnasium.Env.reset(self, seed=seed)
        if options is not None and "task" in options:
            self.reset_task(options["task"])
        elif seed is not None or not self._is_task_chosen:
            self.reset_task(None)
        return self._begin(), {}

    def reset_task(self, task: Any = None) -> None:
        """Set the task: a number in the list, a task as such, or None to draw one."""
        found = self.tasks.sample(self.np_random) if task is None else self.tasks.find(task)
        self.task, self._is_task_chosen = found.copy(), True

    def get_current_task(self) -> Task:
        """What an agent is told that knows the task."""
        return self.task.copy()

    def get_all_task_idx(self) -> range:
        """The numbers of all tasks; empty if they are endless."""
        return range(self.tasks.num_tasks or 0)

    def _begin(self) -> Any:
        """Put the robot to its start; the first observation."""
        raise NotImplementedError
