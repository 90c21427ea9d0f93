"""A fleet as a vector environment of Stable-Baselines3: `SubprocVecEnv`, `DummyVecEnv`.

They take the place of the classes of the same names, with the same results, and run on a fleet:
several environments share a worker, data travels in shared memory, failures are supervised.
`FleetVecEnv` decides by itself whether worker processes pay, and says why in `plan`.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from envfleet.adapters import sb3_slot
from envfleet.adapters.gymnasium import make_vec
from envfleet.adapters.opening import env_functions
from envfleet.adapters.sb3_slot import MASKS, BuildSlot
from envfleet.engine import Batch, Incident, ResetPlan
from envfleet.engine.batch import any_set
from envfleet.errors import ConfigError, MissingExtra

try:
    from stable_baselines3.common.vec_env import VecEnv
    from stable_baselines3.common.vec_env.base_vec_env import (
        VecEnvIndices,
        VecEnvObs,
        VecEnvStepReturn,
    )
except ModuleNotFoundError as exc:
    if exc.name != "stable_baselines3":
        raise  # installed but broken inside: that must not look like a missing package
    raise MissingExtra("Stable-Baselines3 is not installed: pip install 'envfleet[sb3]'") from exc

__all__ = ["DummyVecEnv", "FleetVecEnv", "SubprocVecEnv"]

EnvBuilder = Callable[[], gymnasium.Env[Any, Any]]
_TRUNCATED, _LAST_OBS = "TimeLimit.truncated", "terminal_observation"
_PLAIN_SPACES = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary


class FleetVecEnv(VecEnv):
    """Environments for any algorithm of Stable-Baselines3, in this process or in workers.

    Which of the two is decided by what a step costs; `plan` says why. `SubprocVecEnv` always takes
    worker processes, `DummyVecEnv` this process.
    """

    def __init__(self, env_fns: Sequence[EnvBuilder], **options: Any) -> None:
        """Open the fleet.

        Args:
            env_fns: One function for each environment that builds it; each builds another one.
            **options: `num_workers`, `backend`, `start_method`, `step_timeout_s`,
                `reset_timeout_s`, `on_failure` and `max_restarts` of `envfleet.make_vec`.

        Raises:
            ValueError: An argument cannot work, or two functions return the same instance.
            StartError: The environments could not be built.
        """
        fns = [BuildSlot(env_fn) for env_fn in env_functions(list(env_fns))[0]]
        self._vector = make_vec(fns, autoreset="same_step", **options)
        self.fleet = self._vector.fleet
        """The fleet itself: snapshots, process ids, quarantined slots."""
        self.plan = self._vector.plan
        """What runs where, and why, in one sentence."""
        self._masks: list[Any] | None = None
        """The action masks of the last batch, if they came with it."""
        self._wants_masks = self._was_reset = False
        try:
            instances = self.fleet.apply(sb3_slot.instance_of)
            if len(set(instances)) < len(instances):
                raise ConfigError(
                    "two of the functions returned the same environment instance, so two slots "
                    "would step one environment; build it inside the function: "
                    "[lambda: gymnasium.make(...)] * n, not [lambda: env] * n"
                )
            self._check_videos()
            super().__init__(
                len(fns), self._vector.single_observation_space, self._vector.single_action_space
            )
        except BaseException:
            self._vector.close()
            raise
        self.metadata = dict(self.fleet.facts[0].metadata)

    def _check_videos(self) -> None:
        recorders: dict[str, int] = {}
        for slot, files in enumerate(self.fleet.apply(sb3_slot.video_files)):
            if files is not None and (first := recorders.setdefault(files, slot)) != slot:
                raise ConfigError(
                    f"slots {first} and {slot} both record videos as {files}, so one would "
                    "overwrite the other's: wrap the environment of one slot in RecordVideo, or "
                    "give each slot a video_folder of its own"
                )

    # ---- steps and resets -----------------------------------------------------------------------

    def reset(self) -> VecEnvObs:
        """Reset all environments, with the seeds and options set for this reset."""
        plans = [
            ResetPlan(None if seed is None else int(seed), options or None)
            for seed, options in zip(self._seeds, self._options, strict=True)
        ]
        batch = self.fleet.reset(plans)
        self._was_reset = True
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = _own_infos(batch)
        self._take_masks(self.reset_infos)
        obs: VecEnvObs = batch.obs
        return obs

    def step_async(self, actions: Any) -> None:
        """Start a step of all environments; before the first reset, reset them."""
        if not self._was_reset:
            self.reset()
        self.fleet.send(self._batched(actions))

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step; environments whose episode has ended are reset already."""
        try:
            batch = self.fleet.recv()
        except BaseException:
            if not self.fleet.is_closed:
                self.fleet.drop()  # the caller gets no rows of the other slots either
            raise
        rewards = batch.rewards.astype(np.float32)
        if not (batch.has_events or batch.packed.groups or batch.plain or self._wants_masks):
            infos: list[dict[str, Any]] = [{_TRUNCATED: False} for _ in range(self.num_envs)]
            return batch.obs, rewards, batch.terminated, infos
        dones = batch.terminated if batch.finals is None else batch.finals.ended
        return batch.obs, rewards, dones, self._infos(batch)

    def _infos(self, batch: Batch) -> list[dict[str, Any]]:
        """One info for each slot, and `reset_infos` where episodes have ended."""
        infos = _own_infos(batch)
        self._take_masks(infos)
        finals = batch.finals
        if finals is not None:
            has_last = finals.packed.groups or finals.plain
            last = dict([*finals.packed.each(), *finals.plain]) if has_last else {}
            for slot in finals.positions:
                self.reset_infos[slot] = begun = infos[slot]
                infos[slot] = ended = last.get(slot, {})
                if batch.incidents and "incident" in begun:  # it befell the episode that is over
                    ended["incident"] = begun.pop("incident")
        for info in infos:
            info[_TRUNCATED] = False
        if batch.has_events and any_set(batch.truncated):
            for slot in np.flatnonzero(batch.truncated & ~batch.terminated).tolist():
                infos[slot][_TRUNCATED] = True
        if finals is not None:
            for slot in finals.positions:
                infos[slot][_LAST_OBS] = finals.lasts[slot]
        return infos

    def _batched(self, actions: Any) -> Any:
        """Actions one by one, as Stable-Baselines3 gives them, as one batch for the fleet."""
        space = self.action_space
        if not isinstance(space, _PLAIN_SPACES):
            empty: Any = create_empty_array(space, n=self.num_envs)
            return actions if isinstance(actions, dict) else concatenate(space, actions, empty)
        array = actions if type(actions) is np.ndarray else np.asarray(actions)
        if array.dtype == space.dtype:
            return array
        with np.errstate(invalid="ignore"):
            cast = array.astype(space.dtype)
        # numbers of another kind are taken only if nothing is lost; the fleet refuses the others
        is_same_kind = array.dtype.kind == cast.dtype.kind
        return cast if is_same_kind or np.array_equal(cast, array) else array

    def close(self) -> None:
        """Close the environments and end the workers."""
        self._vector.close()

    # ---- what environments can be asked ---------------------------------------------------------

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have this name."""
        return all(self.fleet.apply(partial(sb3_slot.has_attr, attr_name)))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Read a name from these environments (None: all); a function is not called."""
        return self._each(indices, lambda slots: self.fleet.get(attr_name, slots))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set a name on the outermost wrapper of these environments (None: all)."""
        self._masks = None
        function = partial(sb3_slot.set_attr, attr_name, value)
        self._each(indices, lambda slots: self.fleet.apply(function, slots))

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call a method of these environments (None: all).

        `action_masks` is answered from the last batch, without asking the workers.
        """
        if method_name == "action_masks" and not method_args and not method_kwargs:
            return self._action_masks(indices)
        self._masks = None  # the method may change what is allowed
        return self._each(
            indices, lambda slots: self.fleet.call(method_name, method_args, method_kwargs, slots)
        )

    def env_is_wrapped(
        self,
        wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]],
        indices: VecEnvIndices = None,
    ) -> list[bool]:
        """Whether these environments (None: all) are wrapped in this class."""
        function = partial(
            sb3_slot.is_wrapped, wrapper_class.__module__, wrapper_class.__qualname__
        )
        return self._each(indices, lambda slots: self.fleet.apply(function, slots))

    def get_images(self) -> Sequence[Any]:
        """One frame for each environment."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"the render mode is {self.render_mode}, so there are no images; build the "
                "environments with render_mode='rgb_array'",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.fleet.call("render")

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every failure so far, oldest first."""
        return self._vector.incidents

    def __reduce__(self) -> Any:
        return self._vector.__reduce__()

    def _action_masks(self, indices: VecEnvIndices) -> list[Any]:
        if self._masks is None:
            self._masks = self.fleet.apply(sb3_slot.masks_of)
            self._wants_masks = True
        masks = self._masks
        return [masks[slot] for slot in self._slots(indices)]

    def _take_masks(self, infos: Iterable[dict[str, Any]]) -> None:
        if self._wants_masks:
            masks = [info.pop(MASKS, None) for info in infos]
            # a slot that was built anew does not send them yet
            self._masks = None if any(mask is None for mask in masks) else masks

    def _each(
        self, indices: VecEnvIndices, ask: Callable[[list[int] | None], list[Any]]
    ) -> list[Any]:
        """The answers of the slots that `indices` names, in its order."""
        if indices is None:
            return ask(None)
        slots = self._slots(indices)
        if not slots:
            return []
        named = sorted(set(slots))
        answers = dict(zip(named, ask(named), strict=True))
        return [answers[slot] for slot in slots]

    def _slots(self, indices: VecEnvIndices) -> list[int]:
        """Slot numbers; negative indices count from the end, as in a list."""
        every = range(self.num_envs)
        chosen = [indices] if isinstance(indices, int | np.integer) else indices
        try:
            return list(every) if chosen is None else [every[int(index)] for index in chosen]
        except IndexError:
            raise IndexError(
                f"indices must be within the {self.num_envs} environments, got {indices!r}"
            ) from None


class SubprocVecEnv(FleetVecEnv):
    """Environments in worker processes, several in each; as many workers as cores by default."""

    def __init__(
        self,
        env_fns: Sequence[EnvBuilder],
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        """Open the fleet.

        Args:
            env_fns: One function for each environment that builds it.
            start_method: "fork", "spawn" or "forkserver"; None takes the fastest that is safe.
            **options: As for `FleetVecEnv`.
        """
        multiprocessing.get_context(start_method)  # raises ValueError for one that is unknown
        super().__init__(env_fns, backend="process", start_method=start_method, **options)


class DummyVecEnv(FleetVecEnv):
    """Environments in this process, one after another."""

    def __init__(self, env_fns: Sequence[EnvBuilder], **options: Any) -> None:
        """Open the fleet.

        Args:
            env_fns: One function for each environment that builds it.
            **options: As for `FleetVecEnv`.
        """
        super().__init__(env_fns, backend="serial", **options)

    @property
    def envs(self) -> list[gymnasium.Env[Any, Any]]:
        """The environments themselves."""
        return self.fleet.apply(sb3_slot.own_env)


def _own_infos(batch: Batch) -> list[dict[str, Any]]:
    """One dict for each row: what its environment said last, at a step or a reset."""
    infos: list[dict[str, Any]] = [{} for _ in range(len(batch))]
    if batch.packed.groups or batch.plain:
        for position, info in (*batch.packed.each(), *batch.plain):
            infos[position].update(info)
    return infos
