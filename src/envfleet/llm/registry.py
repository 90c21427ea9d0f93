"""Environment types by name: those of this package, and more by `register_env`.

A name with a colon is a class that need not be registered: `my_module:MyEnv`, `games.py:MyEnv`. A
class is imported when its type is first used, so that only then its packages have to be installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from envfleet.adapters.names import find
from envfleet.errors import ConfigError, did_you_mean
from envfleet.llm.environments.config_fields import build_config


@dataclass(frozen=True, slots=True)
class EnvType:
    """How environments of one name are made."""

    env_class: type[Any]
    config_class: type[Any]

    def make(self, settings: Mapping[str, Any] | None) -> Any:
        """An environment; `settings` are fields that differ from their defaults."""
        return self.env_class(self.config(settings))

    def config(self, settings: Mapping[str, Any] | None) -> Any:
        """A configuration of its own for one environment, with checked field names."""
        return build_config(self.config_class, settings)


_OURS = {
    "bandit": ("envfleet.llm.environments.bandit", "BanditEnv"),
    "countdown": ("envfleet.llm.environments.countdown", "CountdownEnv"),
    "frozen_lake": ("envfleet.llm.environments.frozen_lake", "FrozenLakeEnv"),
    "metamathqa": ("envfleet.llm.environments.metamathqa", "MetaMathQAEnv"),
    "openenv": ("envfleet.llm.openenv.client", "OpenEnvTextEnv"),
    "reasoning_gym": ("envfleet.llm.environments.reasoning_gym", "ReasoningGymEnv"),
    "sokoban": ("envfleet.llm.environments.sokoban", "SokobanEnv"),
    "textworld": ("envfleet.llm.environments.textworld", "TextWorldEnv"),
    "webshop": ("envfleet.llm.environments.webshop", "WebShopEnv"),
}
_NEEDED = ("reset", "step", "render")
_registered: dict[str, EnvType] = {}


def register_env(
    name: str, env_class: type[Any], config_class: type[Any] | None = None, *, replace: bool = False
) -> None:
    """Make an environment class usable as `env_type: <name>`.

    Args:
        name: Its name in configurations.
        env_class: Called with one configuration. Its environments have `reset(seed=...)`, with
            `mode` or `options` if they have splits, `step(action)` with four or five results,
            `render()` and perhaps `close()`.
        config_class: A dataclass; by default `env_class.config_class`.
        replace: Whether to replace a type of this name.
    """
    _check_type(name, env_class)
    config_class = config_class or getattr(env_class, "config_class", None)
    if config_class is None:
        raise ConfigError(
            f"{env_class.__name__} has no config_class: give the dataclass of its settings, "
            f"register_env({name!r}, {env_class.__name__}, ItsConfig)"
        )
    if not isinstance(config_class, type) or not is_dataclass(config_class):
        raise ConfigError(
            f"the settings of {env_class.__name__} must be a dataclass, got {config_class!r:.60}"
        )
    if not replace and name in env_types():
        raise ConfigError(f"there is an environment type {name!r} already; say replace=True")
    _registered[name] = EnvType(env_class, config_class)


def _check_type(name: Any, env_class: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"an environment type is named by text, got {name!r:.60}")
    if not isinstance(env_class, type):
        raise ConfigError(f"an environment type is a class, got {env_class!r:.60}")
    missing = [one for one in _NEEDED if not callable(getattr(env_class, one, None))]
    if missing:
        raise ConfigError(
            f"{env_class.__name__} has no {' and no '.join(missing)}; an environment has "
            f"{', '.join(_NEEDED)} and perhaps close"
        )


def env_types() -> list[str]:
    """Every name that `env_type` can be."""
    return sorted({*_OURS, *_registered})


def env_type(name: str) -> EnvType:
    """The type of this name."""
    if name not in _registered:
        if ":" in name:
            register_env(name, _class_of(name))
            return _registered[name]
        if name not in _OURS:
            known = env_types()
            nearest = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"there is no environment type {name!r}{nearest}")
        module, class_name = _OURS[name]
        found = getattr(importlib.import_module(module), class_name)
        _registered[name] = EnvType(found, found.config_class)
    return _registered[name]


def _class_of(name: str) -> type[Any]:
    found = find(name).build
    if not isinstance(found, type):
        raise ConfigError(f"{name} is not a class; an environment type is written module:Class")
    return found
