"""The ENV argument of commands: found by its name, and built once to see that it can be built.

What names mean is decided in ``adapters/names.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gymnasium

from envfleet.adapters.names import find
from envfleet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvChoice:
    """The environment the user chose; it can be built."""

    name: str
    """The full name: ids with their version."""
    env_fn: Callable[[], gymnasium.Env[Any, Any]]
    """Builds one; pickles by reference, so spawned workers can use it."""
    action_space: gymnasium.Space[Any]
    observation_space: gymnasium.Space[Any]
    imports: str | None = None
    """The import line that a pasted ``make_vec`` call needs, if any."""
    expression: str = ""
    """What stands for the environment in a pasted ``make_vec`` call."""
    env_kwargs: str | None = None
    """The keyword arguments as a Python literal, if any."""


def add_env_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ENV and how it is built."""
    parser.add_argument(
        "env",
        metavar="ENV",
        help="a Gymnasium id, module:Class, module:function, file.py:Class, or module:Id (imports "
        "module first)",
    )
    parser.add_argument(
        "--env-kwargs",
        metavar="JSON",
        default="{}",
        help="keyword arguments for the environment as a JSON object, for example "
        "'{\"continuous\": true}'",
    )


def choose_env(env: str, env_kwargs: str = "{}") -> EnvChoice:
    """Find the environment, build one, and close it again.

    Args:
        env: What the user typed.
        env_kwargs: A JSON object of keyword arguments.

    Raises:
        ConfigError: It does not exist, cannot be imported, or cannot be built.
    """
    kwargs = parse_kwargs(env_kwargs)
    found = find(env)
    env_fn = functools.partial(found.build, **kwargs) if kwargs else found.build
    try:
        built = env_fn()
    except Exception as exc:
        with_kwargs = f" with {kwargs}" if kwargs else ""
        raise ConfigError(
            f"{found.name} cannot be built{with_kwargs}: {type(exc).__name__}: {exc}"
        ) from exc
    if not isinstance(built, gymnasium.Env):
        close = getattr(built, "close", None)
        if callable(close):
            close()
        raise ConfigError(
            f"{env} gives a {type(built).__name__}, not a gymnasium.Env; name a class or a "
            "function without arguments that returns one environment"
        )
    with closing(built):
        return EnvChoice(
            name=found.name,
            env_fn=env_fn,
            action_space=built.action_space,
            observation_space=built.observation_space,
            imports=found.imports,
            expression=found.expression,
            env_kwargs=repr(kwargs) if kwargs else None,
        )


def parse_kwargs(text: str) -> dict[str, Any]:
    """Read the JSON object given as ``--env-kwargs``."""
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(
            f"--env-kwargs is not JSON ({exc}); write it like '{{\"size\": 8}}'"
        ) from exc
    if not isinstance(kwargs, dict):
        raise ConfigError(f"--env-kwargs must be a JSON object like '{{\"size\": 8}}', got {text}")
    return kwargs
