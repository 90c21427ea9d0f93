"""The Gymnasium door: a fleet as a `gymnasium.vector.VectorEnv`, and `make_vec` to open one.

Everything Gymnasium defines means here what it means there. `send` and `recv` are the same fleet
used first-ready; `queue_reset`, `snapshot` and the `slots=` arguments are what a fleet can do
beyond it.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envfleet.engine import Batch, Deadlines, Fleet, Incident, NativeFn, ResetPlan, Snapshot
from envfleet.engine.backends.base import backend_named
from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.machine import usable_cores
from envfleet.engine.memory import PagePlan
from envfleet.engine.options import (
    Autoreset,
    EnvFn,
    OnFailure,
    RestartPolicy,
    StartMethod,
    check_count,
    check_seconds,
    one_of,
)
from envfleet.engine.plan import Plan, choose_start_method, plan_fleet
from envfleet.engine.slots import Slots
from envfleet.errors import ConfigError, SpacesDiffer
from envfleet.layout import are_equal

EnvLike = str | EnvSpec | Callable[..., Any] | Sequence[Callable[[], Any]] | NativeFn
DEBUG_VARIABLE = "ENVFLEET_DEBUG"
"""Set to anything: rows are filled with junk when a slot is sent, so views kept too long show."""


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
        self.num_envs = fleet.num_slots
        if spec is not None:
            # the environment's own says what it was made with; a native one's, how many it holds
            own = None if first.native else first.spec
            # which was made without a wrapper that the fleet stands in for
            spec = deepcopy(spec) if own is None else replace(own, order_enforce=spec.order_enforce)
        self.spec = spec
        self.render_mode = first.render_mode
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode[fleet.autoreset.upper()]}
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

    def render(self) -> tuple[Any, ...] | None:
        """One frame per slot."""
        return self.call("render")

    def call(
        self, name: str, *args: Any, slots: Sequence[int] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call or read `name` on the environments of these slots (None: all)."""
        return tuple(self.fleet.call(name, args, kwargs, slots))

    def get_attr(self, name: str, slots: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Read `name` from the environments of these slots (None: all)."""
        return self.call(name, slots=slots)

    def set_attr(self, name: str, values: Any, slots: Sequence[int] | None = None) -> None:
        """Set `name`; a list or tuple has one value per slot, anything else is for all of them."""
        count = self._count(slots)
        if not isinstance(values, list | tuple):
            values = [values] * count
        if len(values) != count:
            raise ConfigError(
                f"set_attr needs one value, or a list of {count}; got a list of {len(values)}"
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

    def recv(
        self,
        min_slots: int | None = None,
        timeout_s: float | None = None,
        slots: Sequence[int] | Slots | None = None,
    ) -> Batch:
        """Wait for at least `min_slots` (None: all in flight) and return every slot that is ready.

        After `timeout_s` whatever is ready is returned, perhaps nothing. With `slots` it waits for
        these instead and returns exactly them. With `copy=False` the arrays are views of shared
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
        if not (is_list and all(map(_is_whole, slots))):
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
        if _is_whole(seed):
            numbers = range(count) if slots is None else slots
            seeds = [int(seed) + int(slot) for slot in numbers]
        elif seed is not None:
            seeds = _one_each("seed", seed, count, _is_whole, "a whole number")
        # plans outlive this call, and what a caller does to the options later is none of theirs
        if options is None or isinstance(options, Mapping):
            each = [None if options is None else detached_copy(dict(options))] * count
        else:
            given = _one_each("options", options, count, _is_mapping, "a mapping")
            each = [None if one is None else detached_copy(dict(one)) for one in given]
        return [
            ResetPlan(None if one is None else int(one), option)
            for one, option in zip(seeds, each, strict=True)
        ]


def native(env: str | EnvSpec | Callable[[int], VectorEnv], **kwargs: Any) -> NativeFn:
    """Mark an environment as natively vectorised: each worker hosts one instance for all its slots.

    Args:
        env: An id or spec that has a `vector_entry_point`, or a function from a number of
        environments
            to a `gymnasium.vector.VectorEnv`.
        **kwargs: Passed on to the environment.

    Returns:
        Something to pass to `make_vec` as its environment.
    """
    if isinstance(env, str | EnvSpec):
        spec = _spec(env)
        if spec.vector_entry_point is None:
            raise ConfigError(
                f"{spec.id} has no vector_entry_point; pass a function that builds the VectorEnv"
            )
        return NativeFn(functools.partial(_make_native, deepcopy(spec), kwargs))
    return NativeFn(functools.partial(_call_native, env, kwargs))


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
    rollout_steps: int = 0,
    rollout_floats: str | None = None,
    num_here: int = 0,
) -> FleetVectorEnv:
    """Open a fleet of environments as a Gymnasium vector environment.

    Args:
        env: A Gymnasium id, an `EnvSpec`, a function that builds one environment, a sequence of
        such
            functions (one per slot), or `envfleet.native(...)`.
        num_envs: How many; may be left out for a sequence.
        num_workers: How many workers share them; None decides.
        backend: "serial", "thread", "process", or "auto", which measures and says why in `plan`.
        start_method: "fork", "spawn" or "forkserver"; None takes the fastest that is safe here.
        autoreset: "next_step", "same_step" or "disabled", as Gymnasium defines them.
        step_timeout_s: Longest one step of one environment may take; None waits.
        reset_timeout_s: Longest one reset or call of one environment may take; None waits.
        on_failure: "raise"; "restart" (the slot comes back truncated, the incident in its info); or
            "fallback" (a dead worker's slots go on in this process).
        max_restarts: How many failures of one slot within ten minutes are answered by a restart;
            the next one quarantines it.
        copy: False returns views of shared memory, valid until the next send to the same slot.
        env_kwargs: Passed to every environment.
        rollout_steps: Keep the observations of so many steps in shared memory, where a trainer
            finds them in place.
        rollout_floats: Keep their floats there as this type, such as "float32" for networks, by
            whoever writes them; None keeps what comes.
        num_here: So many of the slots, the last, live in this process, which steps them while
            worker processes step the others. It is then one of the `num_workers`.

    Raises:
        ConfigError: An argument cannot work.
        StartError: The environments could not be built; the message says which, and what to do.
    """
    if not isinstance(env_kwargs, Mapping | None):
        raise ConfigError(f"env_kwargs must be a mapping of names to values, got {env_kwargs!r}")
    env_fns, spec = _env_fns(env, num_envs, dict(env_kwargs or {}))
    mode: Autoreset = one_of("autoreset", _mode_name(autoreset), Autoreset)
    failure: OnFailure = one_of("on_failure", on_failure, OnFailure)
    method: StartMethod | None = (
        None if start_method is None else one_of("start_method", start_method, StartMethod)
    )
    check_seconds("step_timeout_s", step_timeout_s)
    check_seconds("reset_timeout_s", reset_timeout_s)
    if num_workers is not None and not (
        _is_whole(num_workers) and 1 <= num_workers <= len(env_fns)
    ):
        raise ConfigError(
            f"num_workers must be a whole number between 1 and num_envs ({len(env_fns)}), got "
            f"{num_workers!r}; a worker without an environment would have nothing to do"
        )
    if not _is_whole(rollout_steps) or rollout_steps < 0:
        raise ConfigError(f"rollout_steps must be a whole number from 0 on, got {rollout_steps!r}")
    if rollout_floats not in (None, "float16", "float32", "float64"):
        raise ConfigError(
            "rollout_floats must be 'float16', 'float32', 'float64' or None (as they come), got "
            f"{rollout_floats!r}"
        )
    restarts = RestartPolicy(max_restarts=max_restarts)
    deadlines = Deadlines(step_s=step_timeout_s, reset_s=reset_timeout_s)
    has_limits = step_timeout_s is not None or reset_timeout_s is not None
    plan = _plan(
        env_fns,
        backend,
        num_workers,
        method,
        num_here,
        deadlines,
        needs_supervision=has_limits or failure != "raise",
    )
    fleet = Fleet(
        env_fns,
        num_workers=plan.num_workers,
        backend=plan.backend,
        start_method=plan.start_method,
        autoreset=mode,
        deadlines=deadlines,
        on_failure=failure,
        restarts=restarts,
        copy=copy,
        poison=DEBUG_VARIABLE in os.environ,
        page_plan=PagePlan(rollout_steps + 1 if rollout_steps else 0, rollout_floats),
        num_here=plan.num_here,
    )
    return FleetVectorEnv(fleet, plan.describe(len(env_fns)), spec)


class ParallelEnv(FleetVectorEnv):
    """What `make_vec` returns, as a class that is called with the same arguments."""

    def __init__(self, env: EnvLike, num_envs: int | None = None, **options: Any) -> None:
        """Open a fleet, as `make_vec` does."""
        made = make_vec(env, num_envs, **options)
        super().__init__(made.fleet, made.plan, made.spec)
        made.closed = True  # the fleet is this one's now


def _plan(
    env_fns: Sequence[EnvFn],
    backend: str,
    num_workers: int | None,
    method: StartMethod | None,
    num_here: int,
    deadlines: Deadlines,
    *,
    needs_supervision: bool,
) -> Plan:
    start_method = choose_start_method(method)
    if num_here and backend in ("auto", "process"):
        why = f"num_here={num_here} was asked for"
        workers = num_workers or max(2, min(len(env_fns) - num_here + 1, usable_cores()))
        return Plan("process", start_method, workers, why, num_here)
    if backend == "auto" and num_workers is None:
        return plan_fleet(
            env_fns, start_method, may_be_serial=not needs_supervision, deadlines=deadlines
        )
    if backend == "auto":
        why = f"num_workers={num_workers} was asked for"
        return Plan("process", start_method, num_workers or 1, why)
    if not backend_named(backend, "auto").has_own_clock:
        why = f"backend={backend!r} was asked for"
        return Plan(backend, start_method, num_workers or 1, why, num_here)
    cores = usable_cores()
    workers = num_workers or min(len(env_fns), cores)
    why = f"backend={backend!r} was asked for"
    if num_workers is None:
        why += f", and {cores} cores are usable"
    return Plan(backend, start_method, workers, why, num_here)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


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


def _mode_name(autoreset: str | AutoresetMode) -> str:
    return autoreset.name.lower() if isinstance(autoreset, AutoresetMode) else autoreset


def _env_fns(
    env: EnvLike, num_envs: int | None, kwargs: dict[str, Any]
) -> tuple[list[EnvFn], EnvSpec | None]:
    if isinstance(env, Sequence) and not isinstance(env, str):
        if num_envs is not None and num_envs != len(env):
            raise ConfigError(
                f"num_envs is {num_envs} but {len(env)} functions were given; leave num_envs out"
            )
        if not env:
            raise ConfigError("the sequence of environment functions is empty")
        for one in env:
            _check_in_sequence(one, len(env))
        return [_bound(one, kwargs) for one in env], None
    if num_envs is None:
        raise ConfigError("num_envs is needed unless env is a sequence of functions, one per slot")
    check_count("num_envs", num_envs)
    if isinstance(env, NativeFn):
        if kwargs:
            raise ConfigError("give keyword arguments to envfleet.native(...), not as env_kwargs")
        return [env] * num_envs, None
    if isinstance(env, str | EnvSpec):
        spec = _spec(env)
        if spec.entry_point is None:
            return [native(spec, **kwargs)] * num_envs, spec
        # the spec travels instead of the id: it may be registered in this process only. One slot
        # checks the environment's manners; the others are the same and need not pay for it.
        checked = functools.partial(_make, deepcopy(spec), kwargs, is_checked=True)
        unchecked = functools.partial(_make, checked.args[0], kwargs, is_checked=False)
        return [checked, *[unchecked] * (num_envs - 1)], spec
    return [_bound(env, kwargs)] * num_envs, None


def _spec(env: str | EnvSpec) -> EnvSpec:
    if isinstance(env, EnvSpec):
        return env
    module, _, name = env.rpartition(":")
    if module:  # Gymnasium's "module:id": importing the module registers the id
        importlib.import_module(module)
    return gymnasium.spec(name)


def _check_in_sequence(one: Any, count: int) -> None:
    if isinstance(one, str | EnvSpec):
        name = repr(one if isinstance(one, str) else one.id)
        raise ConfigError(
            f"a sequence must hold functions, one per slot, got {name} in it; write "
            f"make_vec({name}, {count}) if all are the same, else "
            f"[lambda: gymnasium.make({name}), ...]"
        )


def _bound(env_fn: Any, kwargs: dict[str, Any]) -> EnvFn:
    if isinstance(env_fn, gymnasium.Env | VectorEnv):
        raise ConfigError(
            f"env is an environment ({env_fn}), and one instance cannot be in several slots: "
            f"pass a "
            "function that builds one"
        )
    if not callable(env_fn):
        raise ConfigError(
            f"env must be an id, an EnvSpec, a function or a sequence of functions; got {env_fn!r}"
        )
    return functools.partial(env_fn, **kwargs) if kwargs else env_fn


def _make(spec: EnvSpec, kwargs: dict[str, Any], *, is_checked: bool) -> Any:
    checker = {} if is_checked else {"disable_env_checker": True}
    # the fleet itself holds step and reset in order; a wrapper for it costs 2 % of a CartPole step
    return gymnasium.make(replace(spec, order_enforce=False), **{**checker, **kwargs})


def _make_native(spec: EnvSpec, kwargs: dict[str, Any], num_envs: int) -> VectorEnv:
    mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    return gymnasium.make_vec(spec, num_envs, vectorization_mode=mode, **kwargs)


def _call_native(
    build: Callable[..., VectorEnv], kwargs: dict[str, Any], num_envs: int
) -> VectorEnv:
    return build(num_envs, **kwargs)
