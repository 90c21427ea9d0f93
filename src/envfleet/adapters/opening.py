"""From a user's arguments to an open fleet: the environment argument, the plan, the fleet.

Every adapter, and the text environments, open their fleets here, so that an argument means the same
everywhere. Importing this module builds nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from envfleet.engine import Deadlines, Fleet, NativeFn
from envfleet.engine.backends.base import backend_named, check_options
from envfleet.engine.machine import may_have_children, usable_cores
from envfleet.engine.memory import PagePlan
from envfleet.engine.options import (
    Autoreset,
    EnvFn,
    OnFailure,
    RayOptions,
    RestartPolicy,
    StartMethod,
)
from envfleet.engine.plan import (
    Plan,
    choose_start_method,
    plan_fleet,
    plan_without_children,
)
from envfleet.errors import ConfigError
from envfleet.options import Count, CountOrZero, Seconds, check

__all__ = [
    "DEBUG_VARIABLE",
    "EnvLike",
    "EnvWrapper",
    "env_functions",
    "is_whole",
    "native",
    "open_fleet",
    "spec_of",
    "wrapped",
]

EnvLike = str | EnvSpec | Callable[..., Any] | Sequence[Callable[[], Any]] | NativeFn
EnvWrapper = Callable[[Any], Any]
DEBUG_VARIABLE = "ENVFLEET_DEBUG"
"""Set to anything: rows are filled with junk when a slot is sent, so views kept too long show."""

_NAMES_ELSEWHERE = {
    "async": "process",
    "subproc": "process",
    "multiprocessing": "process",
    "sync": "serial",
    "dummy": "serial",
    "threading": "thread",
}
"""Words of other libraries for our backends."""


def open_fleet(
    env_fns: Sequence[EnvFn],
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
    rollout_steps: int = 0,
    rollout_floats: str | None = None,
    num_here: int = 0,
    backend_options: RayOptions | None = None,
) -> tuple[Fleet, Plan]:
    """Open a fleet with one slot for each function, and say what runs where.

    The arguments are those of `envfleet.make_vec`. Only `backend="auto"` without `num_workers`
    measures the environments first.

    Raises:
        ConfigError: An argument cannot work.
        StartError: The environments could not be built.
    """
    if autoreset in [mode.value for mode in AutoresetMode]:  # Gymnasium's names: "SameStep"
        autoreset = AutoresetMode(autoreset)
    if isinstance(autoreset, AutoresetMode):
        autoreset = autoreset.name.lower()
    mode: Autoreset = check("autoreset", autoreset, Autoreset)
    failure: OnFailure = check("on_failure", on_failure, OnFailure)
    method: StartMethod | None = None
    if start_method is not None:
        method = check("start_method", start_method, StartMethod)
    check("step_timeout_s", step_timeout_s, Seconds | None)
    check("reset_timeout_s", reset_timeout_s, Seconds | None)
    if num_workers is not None and not (is_whole(num_workers) and 1 <= num_workers <= len(env_fns)):
        raise ConfigError(
            f"num_workers must be a whole number between 1 and num_envs ({len(env_fns)}), got "
            f"{num_workers!r}; a worker without an environment would have nothing to do"
        )
    check("rollout_steps", rollout_steps, CountOrZero)
    check("rollout_floats", rollout_floats, Literal["float16", "float32", "float64"] | None)
    restarts = RestartPolicy(max_restarts=max_restarts)
    deadlines = Deadlines(step_s=step_timeout_s, reset_s=reset_timeout_s)
    has_limits = step_timeout_s is not None or reset_timeout_s is not None
    if backend not in _NAMES_ELSEWHERE:
        check_options(backend, backend_options)
    with contextlib.ExitStack() as until_open:
        plan = _plan(
            env_fns,
            backend,
            num_workers,
            method,
            num_here,
            deadlines,
            until_open,
            backend_options,
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
            backend_options=backend_options,
        )
    trip_s = fleet.round_trip_s
    if trip_s is not None:
        told = f"{trip_s * 1e3:.2g} ms to a worker and back, so steps that are shorter"
        plan = replace(plan, why=f"{plan.why}; it is {told} are faster on one machine")
    return fleet, plan


def env_functions(
    env: EnvLike,
    num_envs: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[EnvWrapper] = (),
) -> tuple[list[EnvFn], EnvSpec | None]:
    """One function per slot that builds its environment, and the spec if they share one.

    Args:
        env: A Gymnasium id, an `EnvSpec`, a function that builds one environment, a sequence of
            such functions (one per slot), or `native(...)`.
        num_envs: How many slots; left out, as many as a sequence has functions, or else 1.
        env_kwargs: Passed to every environment.
        wrappers: Called with each environment in turn.

    Raises:
        ConfigError: These arguments describe no environments.
    """
    env_fns, spec = _bare_functions(env, num_envs, env_kwargs)
    _check_wrappers(wrappers)
    if not wrappers:
        return env_fns, spec
    if isinstance(env_fns[0], NativeFn):
        raise ConfigError(
            "wrappers are for single environments, and this one is natively vectorised; wrap the "
            "vector environment in the function given to envfleet.native"
        )
    # slots that shared a function still do: that is how a worker knows them to be alike
    by_function = {id(one): functools.partial(wrapped, one, tuple(wrappers)) for one in env_fns}
    return [by_function[id(one)] for one in env_fns], spec


def _check_wrappers(wrappers: Any) -> None:
    is_list = isinstance(wrappers, Sequence) and not isinstance(wrappers, str)
    if not (is_list and all(map(callable, wrappers))):
        raise ConfigError(f"wrappers must be a sequence of functions, got {wrappers!r}")


def _bare_functions(
    env: EnvLike, num_envs: int | None, env_kwargs: Mapping[str, Any] | None
) -> tuple[list[EnvFn], EnvSpec | None]:
    if not isinstance(env_kwargs, Mapping | None):
        raise ConfigError(f"env_kwargs must be a mapping of names to values, got {env_kwargs!r}")
    kwargs = dict(env_kwargs or {})
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
    num_envs = 1 if num_envs is None else num_envs
    check("num_envs", num_envs, Count)
    if isinstance(env, NativeFn):
        if kwargs:
            raise ConfigError("give keyword arguments to envfleet.native(...), not as env_kwargs")
        return [env] * num_envs, None
    if isinstance(env, str | EnvSpec):
        spec = spec_of(env)
        if spec.entry_point is None:
            return [native(spec, **kwargs)] * num_envs, spec
        # the spec travels instead of the id: it may be registered in this process only. Only the
        # first slot runs Gymnasium's environment checker: the others are built alike.
        checked = functools.partial(_make_env, deepcopy(spec), kwargs, is_checked=True)
        unchecked = functools.partial(_make_env, checked.args[0], kwargs, is_checked=False)
        return [checked, *[unchecked] * (num_envs - 1)], spec
    return [_bound(env, kwargs)] * num_envs, None


def native(env: str | EnvSpec | Callable[[int], VectorEnv], **kwargs: Any) -> NativeFn:
    """Mark an environment as natively vectorised: each worker hosts one instance for all its slots.

    Args:
        env: An id or spec that has a `vector_entry_point`, or a function from a number of
            environments to a `gymnasium.vector.VectorEnv`.
        **kwargs: Passed on to the environment.

    Returns:
        Something to pass to `make_vec` as its environment.
    """
    if isinstance(env, str | EnvSpec):
        spec = spec_of(env)
        if spec.vector_entry_point is None:
            raise ConfigError(
                f"{spec.id} has no vector_entry_point; pass a function that builds the VectorEnv"
            )
        return NativeFn(functools.partial(_make_native, deepcopy(spec), kwargs))
    return NativeFn(functools.partial(_call_native, env, kwargs))


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number, of Python or numpy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _plan(
    env_fns: Sequence[EnvFn],
    backend: str,
    num_workers: int | None,
    method: StartMethod | None,
    num_here: int,
    deadlines: Deadlines,
    until_open: contextlib.ExitStack,
    backend_options: RayOptions | None,
    *,
    needs_supervision: bool,
) -> Plan:
    if backend in _NAMES_ELSEWHERE:
        ours = _NAMES_ELSEWHERE[backend]
        raise ConfigError(f"backend={backend!r} is called {ours!r} here; write backend={ours!r}")
    start_method = choose_start_method(method)
    if num_here and backend in ("auto", "process"):
        why = f"num_here={num_here} was asked for"
        workers = num_workers or max(2, min(len(env_fns) - num_here + 1, usable_cores()))
        return Plan("process", start_method, workers, why, num_here)
    if backend == "auto" and num_workers is None:
        return plan_fleet(
            env_fns, start_method, may_be_serial=not needs_supervision, deadlines=deadlines
        )
    if backend == "auto" and not may_have_children():
        return plan_without_children(start_method, num_workers)
    if backend == "auto":
        why = f"num_workers={num_workers} was asked for"
        return Plan("process", start_method, num_workers or 1, why)
    if not backend_named(backend, "auto").has_own_clock:
        why = f"backend={backend!r} was asked for"
        return Plan(backend, start_method, num_workers or 1, why, num_here)
    place = backend_named(backend).place(backend_options, num_workers)
    room, said = until_open.enter_context(place)
    workers = num_workers or max(1, min(len(env_fns), room))
    why = f"backend={backend!r} was asked for"
    if num_workers is None:
        why += f", and {said}"
    return Plan(backend, start_method, workers, why, num_here)


def spec_of(env: str | EnvSpec) -> EnvSpec:
    """The registration of an id, also of Gymnasium's "module:id"."""
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
            "pass a function that builds one"
        )
    if not callable(env_fn):
        raise ConfigError(
            f"env must be an id, an EnvSpec, a function or a sequence of functions; got {env_fn!r}"
        )
    return functools.partial(env_fn, **kwargs) if kwargs else env_fn


def wrapped(env_fn: EnvFn, wrappers: Sequence[EnvWrapper]) -> Any:
    """Build an environment and call the wrappers with it, one after another."""
    env = env_fn()
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def _make_env(spec: EnvSpec, kwargs: dict[str, Any], *, is_checked: bool) -> Any:
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
