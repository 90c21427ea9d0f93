"""From the ENV a user types to something that can be built, here and in worker processes.

Understands a Gymnasium id, ``module:Class`` or ``module:function``, and Gymnasium's own
``module:Id``. Law: every way to get it wrong ends in one ``Usage`` sentence that names the nearest
right thing. Building many of them is the engine's business.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gymnasium

from envfleet.cli.command import Usage

__all__ = ["EnvChoice", "add_env_arguments", "choose", "find"]

unversioned = re.compile(r"-v(\d+)$")


@dataclass(frozen=True, slots=True)
class EnvChoice:
    """One environment the user chose, built once already to see that it can be."""

    name: str
    """As it may be typed again: ids carry their version."""
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
        help="a Gymnasium id, module:Class, module:function, or module:Id (imports module first)",
    )
    parser.add_argument(
        "--env-kwargs",
        metavar="JSON",
        default="{}",
        help="keyword arguments for the environment as a JSON object, for example "
        "'{\"continuous\": true}'",
    )


def choose(env: str, env_kwargs: str = "{}") -> EnvChoice:
    """Find the environment, build one, and close it again.

    Args:
        env: What the user typed.
        env_kwargs: A JSON object of keyword arguments.

    Raises:
        Usage: It does not exist, cannot be imported, or cannot be built.
    """
    kwargs = parse_kwargs(env_kwargs)
    build, name, imports, expression = find(env)
    env_fn = functools.partial(build, **kwargs) if kwargs else build
    try:
        built = env_fn()
    except Exception as exc:
        with_kwargs = f" with {kwargs}" if kwargs else ""
        raise Usage(f"{name} cannot be built{with_kwargs}: {type(exc).__name__}: {exc}") from exc
    if not isinstance(built, gymnasium.Env):
        close = getattr(built, "close", None)
        if callable(close):
            close()
        raise Usage(
            f"{env} gives a {type(built).__name__}, not a gymnasium.Env; name a class or a "
            "function without arguments that returns one environment"
        )
    with closing(built):
        return EnvChoice(
            name=name,
            env_fn=env_fn,
            action_space=built.action_space,
            observation_space=built.observation_space,
            imports=imports,
            expression=expression,
            env_kwargs=repr(kwargs) if kwargs else None,
        )


def parse_kwargs(text: str) -> dict[str, Any]:
    """Read the JSON object given as ``--env-kwargs``."""
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as exc:
        raise Usage(f"--env-kwargs is not JSON ({exc}); write it like '{{\"size\": 8}}'") from exc
    if not isinstance(kwargs, dict):
        raise Usage(f"--env-kwargs must be a JSON object like '{{\"size\": 8}}', got {text}")
    return kwargs


def find(env: str) -> tuple[Callable[..., gymnasium.Env[Any, Any]], str, str | None, str]:
    """How to build ``env``, its full name, the import it needs and how Python code calls it."""
    module_name, colon, attribute = env.partition(":")
    if not colon:
        env_id = registered(env)
        return make(env_id), env_id, None, json.dumps(env_id)
    if not module_name or not attribute:
        raise Usage(f"{env!r} is half a name; write module:Class, module:function or module:Id")
    module = import_user_module(module_name)
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
        if target is None:
            break
    if callable(target):
        root = attribute.partition(".")[0]
        return target, env, f"from {module_name} import {root}", attribute
    if target is not None:
        raise Usage(f"{env} is a {type(target).__name__}, not something that builds an environment")
    if attribute in gymnasium.registry or "/" in attribute or "-v" in attribute:
        env_id = registered(attribute)
        name = f"{module_name}:{env_id}"
        return make(name), name, f"import {module_name}", json.dumps(env_id)
    known = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
    raise Usage(f"{module_name} has no {attribute!r}{nearest(attribute, known, module_name + ':')}")


def make(env_id: str) -> Callable[..., gymnasium.Env[Any, Any]]:
    """Something that builds a registered environment, and pickles.

    Without Gymnasium's checker: it would be measured with the environment, and the vectorisers
    differ in whether they put it around every one, the first or none.
    """
    return functools.partial(gymnasium.make, env_id, disable_env_checker=True)


def registered(env_id: str) -> str:
    """The full id of a registered environment; the newest version where none is given.

    Raises:
        Usage: There is no such id; names the nearest.
    """
    if env_id in gymnasium.registry:
        return env_id
    versions = [known for known in gymnasium.registry if unversioned.sub("", known) == env_id]
    if versions:
        return max(versions, key=version_of)
    raise Usage(f"Gymnasium knows no environment {env_id!r}{nearest(env_id, gymnasium.registry)}")


def nearest(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence: the nearest right name, or what to do when none is near."""
    # the version says nothing about which environment was meant, so likeness is judged without it
    # and the newest version of the likeliest is named
    names = [(unversioned.sub("", name).lower(), version_of(name), name) for name in known]
    folded = unversioned.sub("", wrong).lower()
    close = difflib.get_close_matches(folded, {base for base, _, _ in names}, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{max(name for name in names if name[0] == close[0])[2]}?"
    return (
        "; ids that a package registers need its import first (package:Id), and your own class is "
        "written module:Class"
    )


def version_of(name: str) -> int:
    """The number after the last ``-v`` of an id, -1 without one."""
    found = unversioned.search(name)
    return int(found[1]) if found else -1


def import_user_module(name: str) -> Any:
    """Import a module of the user's, which may lie in the directory the command was typed in."""
    here = os.getcwd()
    if here not in sys.path:
        # the installed script starts with its own directory on the path, `python -m` with this one;
        # worker processes get the path from here
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(exc.name + ".")):
            raise Usage(
                f"there is no module {exc.name!r} to import; run the command in the directory that "
                "holds it, or install it"
            ) from exc
        raise Usage(
            f"importing {name} failed: it needs {exc.name!r}, which is not installed"
        ) from exc
    except Exception as exc:
        raise Usage(f"importing {name} failed: {type(exc).__name__}: {exc}") from exc
