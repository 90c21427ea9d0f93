"""Several episodes of one task as one trial (BAMDP), and how such environments are made."""

from __future__ import annotations

import functools
from typing import Any, cast

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import RecordConstructorArgs

from envfleet.adapters.opening import EnvLike, env_functions
from envfleet.engine.options import EnvFn
from envfleet.errors import ConfigError, ResetNeeded
from envfleet.meta.tasks import TaskEnv, sample_uniformly
from envfleet.options import Count, check

Obs = npt.NDArray[np.float32]


class VariBadWrapper(gymnasium.Wrapper[Obs, Any, Any, Any], RecordConstructorArgs):
    """A trial: `episodes_per_task` episodes of one task, without a reset by the caller.

    The observation is the environment's own, then the task if `oracle`, then the done flag if
    there is more than one episode per task. The flag is 1 in the last observation of each episode.

    Infos of a step: `done_mdp` (an episode ended), `start_state` (the first observation of the next
    episode, if there is one), `is_goal_state` (if the environment has a method of that name).
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        episodes_per_task: int,
        oracle: bool = False,
        *,
        seed: int | None = None,
    ) -> None:
        """Wrap an environment.

        The environment is given its task by its method `reset_task`, or `set_task`, or else by
        `reset(options={"task": ...})`.

        Args:
            env: An environment with a time limit.
            episodes_per_task: How many episodes are one trial.
            oracle: Show the task, as `get_current_task()` of the environment has it.
            seed: The seed of the first reset that has none.
        """
        RecordConstructorArgs.__init__(
            self, episodes_per_task=episodes_per_task, oracle=oracle, seed=seed
        )
        gymnasium.Wrapper.__init__(self, env)
        check("episodes_per_task", episodes_per_task, Count)
        self.episodes_per_task, self.oracle = episodes_per_task, oracle
        self.horizon_bamdp = episodes_per_task * _time_limit(env)
        """The most steps a trial can have."""
        self.episode_count, self.step_count_bamdp = episodes_per_task, 0
        self.done_mdp = True
        """Whether the last observation was the last of its episode; False again if the next
        episode began."""
        self._first_seed = seed
        self._draws_task = isinstance(env.unwrapped, TaskEnv)
        self._task_setter: str | None = None
        """The method that sets the task; None: an option of `reset` does."""
        if not self._draws_task:
            setters = ("reset_task", "set_task")
            self._task_setter = next((name for name in setters if env.has_wrapper_attr(name)), None)
        self._drawing: np.random.Generator | None = None
        """Draws the tasks of an environment that does not, but has a list of training tasks."""
        self._has_goal = env.has_wrapper_attr("is_goal_state")
        self._options: dict[str, Any] = {}
        if oracle and not env.has_wrapper_attr("get_current_task"):
            raise ConfigError(
                f"oracle=True shows the task, but {env} has no method get_current_task; add one "
                "that returns an array, or leave oracle out"
            )
        self.observation_space = self._wrapped_space(env.observation_space)
        shape, seen = self.observation_space.shape, env.observation_space
        assert shape is not None
        self._width, self._num_seen = shape[0], 0
        """How many numbers an observation has, and, if nothing but the done flag is added to a
        list of numbers, how many that list has."""
        if isinstance(seen, spaces.Box) and len(seen.shape) == 1 and not oracle:
            self._num_seen = seen.shape[0]
        self.flag_at: int | None = shape[0] - 1 if episodes_per_task > 1 else None
        """Where observations have the done flag, if they have one."""
        self._bounds: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None
        if isinstance(env.action_space, spaces.Box):
            low, high = env.action_space.low, env.action_space.high
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise ConfigError(
                    f"actions from -1 to 1 cannot be mapped to {env.action_space}, which has no "
                    "bounds; give it bounds with a wrapper"
                )
            self._bounds = low, high
            self.action_space = spaces.Box(-1.0, 1.0, low.shape, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None, task: Any = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Start a trial of `task`, or of `options["task"]`, or of one that is drawn.

        The environment draws it, if it has no list `train_tasks` that one can be taken from. Other
        options are passed on at every episode of the trial.
        """
        rest = dict(options or {})
        asked = rest.pop("task", None)
        task = asked if task is None else task
        seed = self._first_seed if seed is None else seed
        self._first_seed = None
        if task is None and not self._draws_task:
            task = self._drawn_task(seed)
        if self._task_setter is not None:
            if seed is not None:  # a task may be drawn, by the generator that is seeded here
                self.env.reset(seed=seed, options=rest or None)
                seed = None
            if task is not None or self._task_setter == "reset_task":
                self._call(self._task_setter, task)
        elif task is not None:
            rest["task"] = task
        first = {**rest, "task": task} if self._draws_task else rest
        state, info = self.env.reset(seed=seed, options=first or None)
        self._options = rest
        self.episode_count = self.step_count_bamdp = 0
        self.done_mdp = False
        return self._wrapped(state), info

    def _drawn_task(self, seed: int | None) -> Any:
        tasks = getattr(self.env.unwrapped, "train_tasks", None)
        if tasks is None:
            return None
        if seed is not None or self._drawing is None:
            self._drawing = np.random.default_rng(seed)
        return sample_uniformly(self._drawing, tasks)

    def reset_mdp(self) -> Obs:
        """Start another episode of the same task."""
        state, _ = self.env.reset(options=self._options or None)
        self.done_mdp = False
        return self._wrapped(state)

    def step(self, action: Any) -> tuple[Obs, Any, bool, bool, dict[str, Any]]:
        """Step the episode; the trial ends with its last episode, in the same way."""
        if self.episode_count >= self.episodes_per_task:
            raise ResetNeeded("no trial is running: call reset(task=...) first")
        state, reward, terminated, truncated, info = self.env.step(self._mapped(action))
        self.done_mdp = bool(terminated or truncated)
        self.step_count_bamdp += 1
        obs = self._wrapped(state)
        info = {**info, "done_mdp": self.done_mdp}
        if self._has_goal:
            info["is_goal_state"] = bool(self._call("is_goal_state"))
        if not self.done_mdp:
            return obs, reward, False, False, info
        self.episode_count += 1
        if self.episode_count == self.episodes_per_task:
            return obs, reward, bool(terminated), bool(truncated), info
        info["start_state"] = self.reset_mdp()
        return obs, reward, False, False, info

    def _mapped(self, action: Any) -> Any:
        if self._bounds is None:
            return action
        low, high = self._bounds
        # np.clip takes four times as long, and every step waits for this
        unit = np.minimum(np.maximum(np.asarray(action, low.dtype), -1.0), 1.0)
        mapped = low + (unit + 1) * 0.5 * (high - low)
        return np.minimum(np.maximum(mapped, low), high)

    def _wrapped(self, state: Any) -> Obs:
        if self._num_seen:
            obs = np.empty(self._width, np.float32)
            obs[: self._num_seen] = state
            if self.flag_at is not None:
                obs[self.flag_at] = self.done_mdp
            return obs
        parts: list[Any] = [spaces.flatten(self.env.observation_space, state)]
        if self.oracle:
            parts.append(self._task_vector())
        if self.episodes_per_task > 1:
            parts.append(np.array([self.done_mdp]))
        return np.concatenate(parts).astype(np.float32)

    def _task_vector(self) -> npt.NDArray[Any]:
        return np.ravel(self._call("get_current_task"))

    def _call(self, method: str, *args: Any) -> Any:
        # not kept: a snapshot of this wrapper must not hold the environment a second time
        return self.env.get_wrapper_attr(method)(*args)

    def _wrapped_space(self, space: spaces.Space[Any]) -> spaces.Space[Obs]:
        flat = cast(spaces.Box, spaces.flatten_space(space))
        low, high = [flat.low], [flat.high]
        if self.oracle:
            size = self._task_vector().size
            low.append(np.full(size, -np.inf))
            high.append(np.full(size, np.inf))
        if self.episodes_per_task > 1:
            low.append(np.zeros(1))
            high.append(np.ones(1))
        return spaces.Box(
            np.concatenate(low).astype(np.float32), np.concatenate(high).astype(np.float32)
        )


def make_env(
    env_id: str | EnvSpec | EnvFn,
    episodes_per_task: int,
    seed: int | None = None,
    oracle: bool = False,
    **kwargs: Any,
) -> VariBadWrapper:
    """Make one environment whose episodes are trials.

    Args:
        env_id: A Gymnasium id, a spec, or a function that builds the environment.
        episodes_per_task: How many episodes are one trial.
        seed: The seed of the first trial; later ones go on with the same generator. Tasks do not
            depend on it: they have a seed of their own, `task_seed`.
        oracle: Show the task in the observation.
        **kwargs: Passed to the environment, such as `num_train_tasks` and `num_eval_tasks`.

    Raises:
        ConfigError: The environment does not take one of these, or cannot be in trials.
    """
    make = trial_functions(env_id, episodes_per_task, 1, seed=seed, oracle=oracle, **kwargs)[0]
    try:
        return make()
    except TypeError as exc:
        unknown = [name for name in kwargs if f"unexpected keyword argument {name!r}" in str(exc)]
        if not unknown:
            raise
        raise ConfigError(
            f"the environment takes no {unknown[0]}; leave it out. An environment of your own has "
            "lists of tasks if it takes this, or has the attributes train_tasks and eval_tasks"
        ) from exc


def trial_functions(
    env_id: EnvLike,
    episodes_per_task: int,
    num_envs: int,
    *,
    seed: int | None = None,
    oracle: bool = False,
    **kwargs: Any,
) -> list[functools.partial[VariBadWrapper]]:
    """One function per environment that makes it, here or in a worker process."""
    env_fns, _ = env_functions(env_id, num_envs, kwargs)
    return [functools.partial(_make, env_fn, episodes_per_task, oracle, seed) for env_fn in env_fns]


def _make(env_fn: EnvFn, episodes_per_task: int, oracle: bool, seed: int | None) -> VariBadWrapper:
    env = VariBadWrapper(env_fn(), episodes_per_task, oracle, seed=seed)
    if seed is not None:
        env.action_space.seed(seed)
    return env


def _time_limit(env: gymnasium.Env[Any, Any]) -> int:
    limit = env.spec.max_episode_steps if env.spec is not None else None
    limit = limit or getattr(env.unwrapped, "_max_episode_steps", None)
    if limit is None:
        layer: Any = env
        while isinstance(layer, gymnasium.Wrapper):
            if isinstance(layer, gymnasium.wrappers.TimeLimit):
                return layer._max_episode_steps
            layer = layer.env
        raise ConfigError(
            f"{env} has no time limit, so the length of a trial is not known; pass "
            "max_episode_steps=..., or wrap it in gymnasium.wrappers.TimeLimit"
        )
    return int(limit)
