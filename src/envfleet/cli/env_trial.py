"""A trial of an environment in a worker, before a command runs it in its own process.

An environment that ends its process, crashes in native code or never returns from `close` would
take the command along without a word. So it is built, stepped for a moment and closed in a worker
first. What an environment raises there is left to the command, which meets it again.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

from envfleet.adapters.names import find
from envfleet.cli.env_argument import EnvChoice, choose_env, parse_kwargs
from envfleet.engine import Deadlines, Fleet
from envfleet.engine.machine import may_have_children
from envfleet.engine.messages import OLD_API
from envfleet.engine.plan import choose_start_method
from envfleet.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvFailed,
    EnvfleetError,
    WorkerDied,
    describe_exit,
)

_MOMENT_S, _MOST_STEPS = 0.3, 300
_LIMIT_S, _CLOSE_LIMIT_S = 60.0, 10.0


def choose_tried_env(env: str, env_kwargs: str = "{}") -> EnvChoice:
    """`choose_env`, of an environment that this process can be trusted with."""
    kwargs = parse_kwargs(env_kwargs)
    found = find(env)
    if may_have_children():
        _try(found.name, functools.partial(found.build, **kwargs))
    return choose_env(env, env_kwargs)


def _try(name: str, env_fn: Callable[[], Any]) -> None:
    parts = (("a reset or step", _play, _LIMIT_S), ("close", _close, _CLOSE_LIMIT_S))
    try:
        for what, part, limit_s in parts:
            doing = "the constructor"
            deadlines = Deadlines(start_s=_LIMIT_S, reset_s=limit_s, close_s=0.1)
            fleet = Fleet([env_fn], start_method=choose_start_method(None), deadlines=deadlines)
            doing = what
            with warnings.catch_warnings(), closing(fleet):
                warnings.simplefilter("ignore")  # the command meets the same
                fleet.apply(part)
    except WorkerDied as exc:
        raise ConfigError(
            f"{name} ends its process in {doing} ({describe_exit(exc.exitcode)}), and this command "
            "runs it in its own process too"
        ) from exc
    except DeadlineExceeded as exc:
        at = exc.stack.partition("\n")[2].partition("\n")[0].strip()
        raise ConfigError(
            f"{name} does not return from {doing} within {exc.seconds:g} s, and this command runs "
            f"it in its own process too. It stands at: {at}"
        ) from exc
    except EnvFailed as exc:
        if OLD_API in exc.reason:
            raise ConfigError(f"{name} cannot be used: {exc.reason}") from exc
    except EnvfleetError:
        return


def _play(env: Any) -> None:
    """Reset and step at random for a moment."""
    until_s = time.monotonic() + _MOMENT_S
    env.action_space.seed(0)
    is_over, seed = True, 0
    for _ in range(_MOST_STEPS):
        if is_over:
            env.reset(seed=seed)
            seed += 1
        is_over = any(env.step(env.action_space.sample())[2:4])
        if time.monotonic() > until_s:
            return


def _close(env: Any) -> None:
    env.close()
