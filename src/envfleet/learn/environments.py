"""The environments of a run: a fleet to train on, and single ones like those of the fleet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import gymnasium

from envfleet.adapters.gymnasium import FleetVectorEnv, make_vec
from envfleet.adapters.names import find
from envfleet.adapters.opening import wrapped
from envfleet.engine.machine import usable_cores
from envfleet.engine.options import Deadlines
from envfleet.engine.plan import Plan, choose_start_method, plan_fleet
from envfleet.learn.node_envs import opened_on_nodes
from envfleet.learn.ppo import PPOOptions, PPOTrainer
from envfleet.learn.torch_setup import threads, usable_device
from envfleet.learn.train_options import TrainOptions

MIN_GAIN = 1.5
"""The gain from which on workers are used: they fall asleep while the policy acts, and waking them
takes longer than a round trip from step to step."""
CUT_OFF = (
    "the run was cut off before, and an environment that ends its process would do that again here"
)


@contextmanager
def opened(
    options: TrainOptions, ppo: PPOOptions, *, is_wary: bool = False
) -> Iterator[PPOTrainer]:
    """Open a fleet and make a trainer on it, as at the start of a run.

    Args:
        options: Of the run.
        ppo: How to learn.
        is_wary: Whether the environments may take their process along: then that is never this one,
            unless it was asked for.
    """
    device = usable_device(options.device)
    if options.collect != "here":
        with opened_on_nodes(options, ppo, _wrappers(options)) as slots, threads():
            yield PPOTrainer(slots, ppo, seed=options.seed, device=device)
        return
    with closing(_fleet(options, ppo, is_wary)) as envs, threads():
        yield PPOTrainer(envs, ppo, seed=options.seed, device=device)


def placed(
    options: TrainOptions, env_fn: Callable[[], Any], *, is_wary: bool
) -> tuple[str, int | None, str | None]:
    """Where environments that this function builds run: backend, workers, and why.

    The reason is None where the caller said so, or where `make_vec` finds it itself.
    """
    if options.backend != "auto" or options.num_workers is not None:
        return options.backend, options.num_workers, None
    # restarts alone would call for processes, but an environment that raises costs its episode
    # in this process too, and for small ones that is much the faster place
    method = choose_start_method(options.parallel_start_method)
    plan = (
        Plan("process", method, min(usable_cores(), options.n_envs), CUT_OFF)
        if is_wary
        else plan_fleet(
            [env_fn] * options.n_envs,
            method,
            may_be_serial=not options.has_deadlines,
            min_gain=MIN_GAIN,
            deadlines=Deadlines(step_s=options.step_timeout_s, reset_s=options.reset_timeout_s),
        )
    )
    return plan.backend, plan.num_workers, plan.describe(options.n_envs)


def _fleet(options: TrainOptions, ppo: PPOOptions, is_wary: bool) -> FleetVectorEnv:
    backend, num_workers, why = placed(options, env_fn(options), is_wary=is_wary)
    envs = make_vec(
        find(options.env).source,
        options.n_envs,
        backend=backend,
        num_workers=num_workers,
        backend_options=options.ray,
        **options.fleet,
        autoreset="same_step",
        env_kwargs=options.env_kwargs,
        wrappers=_wrappers(options),
        rollout_steps=0 if ppo.normalise_obs else ppo.n_steps,
        rollout_floats="float32",
    )
    envs.plan = why or envs.plan
    return envs


def env_fn(options: TrainOptions, **more: Any) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Build a single environment like those of the run; `more` are other arguments."""
    found = find(options.env)
    build = found.build
    if isinstance(found.source, str):
        # the spec travels instead of the id: it may be registered in this process only
        build = functools.partial(gymnasium.make, _spec(found.source), disable_env_checker=True)
    bare = functools.partial(build, **{**options.env_kwargs, **more})
    return functools.partial(wrapped, bare, _wrappers(options)) if options.wrapper else bare


def _wrappers(options: TrainOptions) -> list[Callable[[Any], Any]]:
    return [] if options.wrapper is None else [find(options.wrapper).build]


def _spec(source: str) -> gymnasium.envs.registration.EnvSpec:
    """The spec of an id, or of "module:Id", whose module has been imported."""
    return gymnasium.spec(source.rpartition(":")[2])


def longest_episode(options: TrainOptions) -> int:
    """The most steps of an evaluation's episode, as far as that is known beforehand."""
    source = find(options.env).source
    limit = None
    if isinstance(source, str):
        limit = options.env_kwargs.get("max_episode_steps", _spec(source).max_episode_steps)
    return min(limit or options.eval_max_steps, options.eval_max_steps)


def packages(env: str) -> list[str]:
    """The packages that an environment comes from, as far as its name tells."""
    source = find(env).source
    entry: Any = source
    if isinstance(source, str):
        entry = _spec(source).entry_point
    where = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return [where.partition(".")[0], *(["mujoco"] if "mujoco" in where else [])]
