"""A fleet as a `gymnasium.vector.VectorEnv`, and `make_vec` to open one.

Everything that Gymnasium defines means the same here. `send` and `recv`, `queue_reset`, `snapshot`
and the `slots=` arguments are what a fleet can do beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import VectorizeMode
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envfleet.adapters.opening import (
    EnvLike,
    EnvWrapper,
    env_functions,
    is_whole,
    native,
    open_fleet,
)
from envfleet.adapters.vector_words import check_names, translated
from envfleet.engine import Batch, Fleet, Incident, NativeFn, ResetPlan, Snapshot
from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.options import RayOptions
from envfleet.engine.slots import Slots
from envfleet.errors import ConfigError, SpacesDiffer
from envfleet.layout import are_equal

__all__ = ["FleetVectorEnv", "ParallelEnv", "make_vec"]


class FleetVectorEnv(VectorEnv[Any, Any, Any]):
    """A fleet whose slots have equal spaces. Made by `envfleet.make_vec`."""

    def __init__(self, fleet: Fleet, plan: str, spec: EnvSpec | None = None) -> None:
        """Take over `fleet`, which is closed with this environment."""
        super().__init__()
        self.fleet, self.plan = fleet, plan
        """What runs where, and why, in one sentence."""
        first = fleet.facts[0]
        for which in ("observation", "action"):
            expected = getattr(first, f"{which}_space")
            compared = {id(expected)}
            for slot, facts in enumerate(fleet.facts):
                got = getattr(facts, f"{which}_space")
                if id(got) in compared:
                    continue
                compared.add(id(got))
                if not are_equal(expected, got):
                    fleet.close()
                    raise SpacesDiffer(which, slot, str(expected), str(got))
        self._call_results: Callable[[float | None], list[Any]] | None = None
        """Waits for what `call_async` started."""
        self.num_envs = fleet.num_slots
        if spec is not None:
            # the environment's own spec knows its keyword arguments; a native one's does not
            own = None if first.native else first.spec
            # the environment was made without the order enforcer: the fleet does its work
            spec = deepcopy(spec) if own is None else replace(own, order_enforce=spec.order_enforce)
        self.spec = spec
        self.render_mode = first.render_mode
        self.autoreset_mode = AutoresetMode[fleet.autoreset.upper()]
        """The same as in `metadata`, where Gymnasium keeps it; TorchRL reads the attribute."""
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)

    # ---- Gymnasium ------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all slots, or those of `options["reset_mask"]`; each may have its own arguments.

        Args:
            seed: One for all (slot i gets `seed + i`), a list with one per slot, or None.
            options: One for all, or a list with one per slot.

        Returns:
            Observations of all slots, and infos of those that were reset.
        """
        mask, options = self._split_mask(options)
        plans = self._plans(seed, options, self.num_envs)
        if mask is None:
            batch = self.fleet.reset(plans)
            return batch.obs, batch.infos
        slots = np.flatnonzero(mask)
        batch = self.fleet.reset([plans[slot] for slot in slots], slots)
        return self.fleet.observations(), batch.infos_among(self.num_envs)

    def step(
        self, actions: Any
    ) -> tuple[
        Any,
        npt.NDArray[np.float64],
        npt.NDArray[np.bool_],
        npt.NDArray[np.bool_],
        dict[str, Any],
    ]:
        """Step all slots and wait for all of them."""
        batch = self.fleet.step(actions)
        return batch.obs, batch.rewards, batch.terminated, batch.truncated, batch.infos

    def step_async(self, actions: Any) -> None:
        """Start a step of all slots; `step_wait` brings its results."""
        self.send(actions)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """What `step` returns, for the step that `step_async` started.

        Raises:
            TimeoutError: It is not done after `timeout` seconds; wait again, or close.
        """
        batch = self.recv(timeout_s=timeout, slots=range(self.num_envs))
        if len(batch.slots) < self.num_envs:
            raise TimeoutError(f"the step was not done within {timeout} s; call step_wait again")
        return batch.obs, batch.rewards, batch.terminated, batch.truncated, batch.infos

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start a call on all environments; `call_wait` brings its results."""
        if self._call_results is not None:
            message = f"{name!r} was called while another call waits for call_wait"
            raise gymnasium.error.AlreadyPendingCallError(message, "call")
        self._call_results = self.fleet.start_call(name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """What `call` returns, for the call that `call_async` started.

        Raises:
            TimeoutError: It is not done after `timeout` seconds; its results are dropped.
        """
        if self._call_results is None:
            message = "call_wait has nothing to wait for; use call_async first"
            raise gymnasium.error.NoAsyncCallError(message, "call")
        results, self._call_results = self._call_results, None
        return tuple(results(timeout))

    def render(self) -> tuple[Any, ...] | None:
        """One frame per slot."""
        return self.call("render")

    def call(
        self, name: str, *args: Any, slots: Sequence[int] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call `name` on the environments of these slots (None: all); a value is only read."""
        return tuple(self.fleet.call(name, args, kwargs, slots))

    def get_attr(self, name: str, slots: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Read `name` from the environments of these slots (None: all), without calling it."""
        return tuple(self.fleet.get(name, slots))

    def apply(
        self, function: Callable[[Any], Any], slots: Sequence[int] | None = None
    ) -> tuple[Any, ...]:
        """Call `function(env)` where the environments of these slots (None: all) live."""
        return tuple(self.fleet.apply(function, slots))

    def set_attr(self, name: str, values: Any, slots: Sequence[int] | None = None) -> None:
        """Set `name`; a list or tuple has one value per slot, anything else is for all of them."""
        count = self._count(slots)
        if not isinstance(values, list | tuple):
            values = [values] * count
        if len(values) != count:
            raise ConfigError(
                f"set_attr needs one value, or a list of {count} values; got {len(values)} values"
            )
        self.fleet.set_attr(name, values, slots)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Each environment's generator (a copy, if it lives in another process)."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Each environment's seed."""
        return self.get_attr("np_random_seed")

    def close_extras(self, **kwargs: Any) -> None:
        """Close the fleet. Gymnasium's arguments are accepted; closing is bounded without them."""
        self.fleet.close()

    # ---- beyond Gymnasium -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a fleet cannot be pickled or copied: its environments live in workers. Open another "
            "with make_vec, or take the states of the environments with snapshot()"
        )

    def send(self, actions: Any, slots: Sequence[int] | Slots | None = None) -> None:
        """Start a step of these slots (None: all) and return at once."""
        self.fleet.send(actions, slots)

    def send_reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Start a reset of these slots (None: all) and return at once; `recv` brings their rows."""
        count = self._count(slots)
        self.fleet.send_reset(self._plans(seed, options, count, slots), slots)

    def recv(
        self,
        min_slots: int | None = None,
        timeout_s: float | None = None,
        slots: Sequence[int] | Slots | None = None,
    ) -> Batch:
        """Wait for at least `min_slots` (None: all in flight) and return every slot that is ready.

        After `timeout_s` it returns what is ready, perhaps nothing. With `slots` it waits for these
        only, and leaves the others where they are. With `copy=False` the arrays are views of shared
        memory, valid until the next send to the same slot.
        """
        return self.fleet.recv(min_slots, timeout_s, slots)

    def queue_reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Use this seed and these options at the next autoreset of these slots (None: all)."""
        count = self._count(slots)
        self.fleet.queue_reset(self._plans(seed, options, count, slots), slots)

    def snapshot(self, slots: Sequence[int] | None = None) -> tuple[Snapshot, ...]:
        """The state of these slots, to go on from later, here or in another fleet."""
        return self.fleet.snapshot(slots)

    def restore(self, snapshots: Sequence[Snapshot], slots: Sequence[int] | None = None) -> Any:
        """Bring these slots to those states; returns the observations of all slots."""
        self.fleet.restore(snapshots, slots)
        return self.fleet.observations()

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every failure so far, oldest first."""
        return tuple(self.fleet.incidents)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds spent so far in environments, waiting and copying."""
        return self.fleet.timings

    def _count(self, slots: Any) -> int:
        if slots is None:
            return self.num_envs
        is_list = isinstance(slots, Sequence) or (isinstance(slots, np.ndarray) and slots.ndim)
        if not (is_list and all(map(is_whole, slots))):
            raise ConfigError(f"slots must be a non-empty list of slot numbers, got {slots!r}")
        return len(slots)

    def _split_mask(self, options: Any) -> tuple[npt.NDArray[np.bool_] | None, Any]:
        if not isinstance(options, Mapping) or "reset_mask" not in options:
            return None, options
        mask, name = options["reset_mask"], "`options['reset_mask']`"
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"{name} must be a numpy array of bool, got {type(mask).__name__}")
        if mask.shape != (self.num_envs,):
            raise ConfigError(f"{name} must have shape `({self.num_envs},)`, got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
        if not mask.any():
            raise ConfigError(
                f"{name} must contain a boolean array with at least one True value, got "
                f"reset_mask={mask}; to reset nothing, do not call reset"
            )
        rest = {key: value for key, value in options.items() if key != "reset_mask"}
        return mask, rest

    def _plans(
        self, seed: Any, options: Any, count: int, slots: Sequence[int] | None = None
    ) -> list[ResetPlan]:
        seeds = [seed] * count
        if is_whole(seed):
            numbers = range(count) if slots is None else slots
            seeds = [int(seed) + int(slot) for slot in numbers]
        elif seed is not None:
            seeds = _one_each("seed", seed, count, is_whole, "a whole number")
        # plans outlive this call, so they need options that the caller cannot change later
        if options is None or isinstance(options, Mapping):
            each = [None if options is None else detached_copy(dict(options))] * count
        else:
            given = _one_each("options", options, count, _is_mapping, "a mapping")
            each = [None if one is None else detached_copy(dict(one)) for one in given]
        return [
            ResetPlan(None if one is None else int(one), option)
            for one, option in zip(seeds, each, strict=True)
        ]


def make_vec(
    env: EnvLike,
    num_envs: int | None = None,
    *,
    num_workers: int | None = None,
    backend: str = "auto",
    start_method: str | None = None,
    autoreset: str | AutoresetMode = "next_step",
    step_timeout_s: float | None = None,
    reset_timeout_s: float | None = None,
    on_failure: str = "raise",
    max_restarts: int = 5,
    copy: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[EnvWrapper] = (),
    rollout_steps: int = 0,
    rollout_floats: str | None = None,
    num_here: int = 0,
    backend_options: RayOptions | None = None,
    vectorization_mode: VectorizeMode | str | None = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> FleetVectorEnv:
    """Open a fleet of environments as a Gymnasium vector environment.

    Args:
        env: A Gymnasium id, an `EnvSpec`, a function that builds one environment, a sequence of
            such functions (one per slot), or `envfleet.native(...)`.
        num_envs: How many; left out, as many as a sequence has functions, or else 1.
        num_workers: How many workers share them; None decides.
        backend: "serial", "thread", "process", "ray" (actors in a Ray cluster), or "auto", which
            measures, says why in `plan`, and never takes "ray".
        start_method: "fork", "spawn" or "forkserver"; None takes the fastest that is safe here.
        autoreset: "next_step", "same_step" or "disabled", as Gymnasium defines them.
        step_timeout_s: Longest one step of one environment may take; None waits.
        reset_timeout_s: Longest one reset or call of one environment may take; None waits.
        on_failure: "raise"; "restart" (the slot comes back truncated, the incident in its info);
            "resume" (the slot is replayed, and its rows are as if nothing had happened); or
            "fallback" (a dead worker's slots go on in this process).
        max_restarts: How many failures of one slot within ten minutes are answered by a restart;
            the next one quarantines it.
        copy: False returns views of shared memory, valid until the next send to the same slot.
        env_kwargs: Passed to every environment.
        wrappers: Called with each environment in turn; each returns what stands around it.
        rollout_steps: Keep the observations of so many steps in shared memory, where a trainer
            finds them in place.
        rollout_floats: Store the floats of those observations as this type, such as "float32" for
            networks; None keeps their own type.
        num_here: The last `num_here` slots live in this process, which steps them while worker
            processes step the others. This process then counts as one of the `num_workers`.
        backend_options: For backend="ray", `RayOptions`: address, placement, resources and so on.
        vectorization_mode: Gymnasium's word for `backend`: "async" is "process", "sync" is
            "serial", and "vector_entry_point" is `native(env)`.
        vector_kwargs: Gymnasium's `context`, `autoreset_mode` and `copy`, under its names.
        **kwargs: Passed to every environment too, such as `render_mode` and `max_episode_steps`.

    Raises:
        ConfigError: An argument cannot work.
        StartError: The environments could not be built; the message says which, and what to do.
    """
    options = {
        "num_workers": num_workers,
        "backend": backend,
        "start_method": start_method,
        "autoreset": autoreset,
        "step_timeout_s": step_timeout_s,
        "reset_timeout_s": reset_timeout_s,
        "on_failure": on_failure,
        "max_restarts": max_restarts,
        "copy": copy,
        "rollout_steps": rollout_steps,
        "rollout_floats": rollout_floats,
        "num_here": num_here,
        "backend_options": backend_options,
    }
    check_names(kwargs, [*options, "num_envs", "env_kwargs", "wrappers"])
    is_native, words = translated(vectorization_mode, vector_kwargs, options)
    given = _joined(env_kwargs, kwargs)
    if is_native and not isinstance(env, NativeFn):
        if isinstance(env, Sequence) and not isinstance(env, str):
            raise ConfigError("vector_entry_point is for one environment; give its id or function")
        env, given = native(env, **(given or {})), None
    env_fns, spec = env_functions(env, num_envs, given, wrappers)
    fleet, plan = open_fleet(env_fns, **{**options, **words})
    return FleetVectorEnv(fleet, plan.describe(len(env_fns)), spec)


class ParallelEnv(FleetVectorEnv):
    """What `make_vec` returns, as a class that is called with the same arguments."""

    def __init__(self, env: EnvLike, num_envs: int | None = None, **options: Any) -> None:
        """Open a fleet, as `make_vec` does."""
        made = make_vec(env, num_envs, **options)
        super().__init__(made.fleet, made.plan, made.spec)
        made.closed = True  # the fleet is this one's now


def _joined(env_kwargs: Any, kwargs: dict[str, Any]) -> Any:
    """Both ways to give an environment's arguments, as one."""
    if not kwargs or not isinstance(env_kwargs, Mapping | None):  # refused where it is used
        return env_kwargs
    twice = sorted(kwargs.keys() & (env_kwargs or {}).keys())
    if twice:
        raise ConfigError(f"{twice[0]!r} was given twice, as a keyword and in env_kwargs")
    return {**(env_kwargs or {}), **kwargs}


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _one_each(
    name: str, values: Any, count: int, is_right: Callable[[object], bool], what: str
) -> list[Any]:
    """`values` as a list with one for each slot, each None or right."""
    is_list = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
    each = list(values) if is_list else [values]
    wrong = [value for value in each if value is not None and not is_right(value)]
    if wrong or len(each) != count:
        got = f"{wrong[0]!r}" if wrong else f"{len(each)} of them"
        raise ConfigError(
            f"{name} must be {what}, None, or a list with one for each of {count} slots; got {got}"
        )
    return each
