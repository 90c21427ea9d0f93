"""From the name of an environment to something that builds it, here and in worker processes.

A name is a Gymnasium id (``CartPole-v1``), a class or function in a module or in a file
(``garden:Plot``, ``envs/garden.py:Plot``), or Gymnasium's own ``module:Id``. Law: finding builds no
environment, and a wrong name is answered by one sentence with the nearest right one.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium

from envfleet.errors import ConfigError

__all__ = ["NamedEnv", "find", "label", "look_also_in", "nearest"]

unversioned = re.compile(r"-v(\d+)$")


@dataclass(frozen=True, slots=True)
class NamedEnv:
    """An environment that was found by its name."""

    name: str
    """The full name: ids with their version, files with their path."""
    build: Callable[..., gymnasium.Env[Any, Any]]
    """Builds one, with the environment's keyword arguments; pickles by reference.

    Registered ones come without Gymnasium's checker: it would be measured too, and vectorisers
    differ in how many of their environments they put it around."""
    source: str | Callable[..., gymnasium.Env[Any, Any]]
    """What `make_vec` takes: an id is sent to workers with its registration."""
    imports: str | None
    """The import line that Python code needs to use `expression`, if any."""
    expression: str
    """What stands for the environment in Python code that calls `make_vec`."""


def find(name: str) -> NamedEnv:
    """Find an environment by its name.

    Raises:
        ConfigError: It does not exist or cannot be imported.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        env_id = _registered(name)
        return NamedEnv(env_id, _make_named(env_id), env_id, None, json.dumps(env_id))
    if not place or not attribute:
        raise ConfigError(
            f"{name!r} is half a name; write module:Class, module:function or module:Id"
        )
    if place.endswith(".py"):
        module, place = _import_file(place)
    else:
        module = _import_module(place)
    module_name = module.__name__
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
        if target is None:
            break
    if callable(target):
        imports = f"from {module_name} import {attribute.partition('.')[0]}"
        return NamedEnv(f"{place}:{attribute}", target, target, imports, attribute)
    if target is not None:
        raise ConfigError(
            f"{name} is a {type(target).__name__}, not something that builds an environment"
        )
    if attribute in gymnasium.registry or "/" in attribute or "-v" in attribute:
        env_id = _registered(attribute)
        full = f"{module_name}:{env_id}"
        imports = f"import {module_name}"
        return NamedEnv(f"{place}:{env_id}", _make_named(full), full, imports, json.dumps(env_id))
    known = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
    raise ConfigError(f"{place} has no {attribute!r}{nearest(attribute, known, f'{place}:')}")


def label(name: str) -> str:
    """A short name for people: a file without its folders."""
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).stem}:{attribute}" if place.endswith(".py") else name


def look_also_in(folder: str | None) -> None:
    """Search this folder for modules too, after all others."""
    if folder and folder not in sys.path and os.path.isdir(folder):
        sys.path.append(folder)


def nearest(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence: the nearest right name, or what to do when none is near."""
    # names are compared without their version; of the nearest one the newest version is named
    names = [(unversioned.sub("", name).lower(), _version_of(name), name) for name in known]
    folded = unversioned.sub("", wrong).lower()
    close = difflib.get_close_matches(folded, {base for base, _, _ in names}, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{max(name for name in names if name[0] == close[0])[2]}?"
    return (
        "; ids that a package registers need its import first (package:Id), and your own class is "
        "written module:Class"
    )


def _make_named(env_id: str) -> Callable[..., gymnasium.Env[Any, Any]]:
    return functools.partial(gymnasium.make, env_id, disable_env_checker=True)


def _registered(env_id: str) -> str:
    """The full id of a registered environment; the newest version where none is given."""
    if env_id in gymnasium.registry:
        return env_id
    versions = [known for known in gymnasium.registry if unversioned.sub("", known) == env_id]
    if versions:
        return max(versions, key=_version_of)
    raise ConfigError(
        f"Gymnasium knows no environment {env_id!r}{nearest(env_id, gymnasium.registry)}"
    )


def _version_of(name: str) -> int:
    """The number after the last ``-v`` of an id, -1 without one."""
    found = unversioned.search(name)
    return int(found[1]) if found else -1


def _import_module(name: str) -> Any:
    """Import a user's module, which may lie in the current directory."""
    # `python -m` puts this directory on the path, the installed script does not; worker processes
    # get the path from here
    _look_in(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(exc.name + ".")):
            raise ConfigError(
                f"there is no module {exc.name!r} to import; run the command in the directory that "
                "holds it, or install it"
            ) from exc
        raise ConfigError(
            f"importing {name} failed: it needs {exc.name!r}, which is not installed"
        ) from exc
    except Exception as exc:
        raise ConfigError(f"importing {name} failed: {type(exc).__name__}: {exc}") from exc


def _import_file(name: str) -> tuple[Any, str]:
    """Import a Python file by its path; the module, and the path from the root."""
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {name}")
    if not path.stem.isidentifier():
        raise ConfigError(f"{name} cannot be imported: rename it to a name Python can have")
    _look_in(str(path.parent))
    module = _import_module(path.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise ConfigError(
            f"{name} cannot be imported because another module is named {path.stem} too; rename it"
        )
    return module, str(path)


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
