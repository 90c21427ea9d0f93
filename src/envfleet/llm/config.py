"""Configurations by name: presets of this package or files of one's own, and `key=value` changes.

A file may build on others by Hydra's `defaults:` list; later ones win. A change names a key that is
there (`es_manager.max_workers=4`), a new one with a plus (`+custom_envs.Mine.env_type=mine`), or
takes one away (`~seed`). Values are YAML, where 1e-3 is a number as it is for Hydra.

Law: whatever is wrong is one sentence that names the file or the change, the key, and the nearest
right one.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

from envfleet.errors import ConfigError, MissingExtra, did_you_mean

__all__ = ["BLOCKS", "Config", "load_config", "plain_config", "preset_names"]

BLOCKS = ("es_manager", "custom_envs", "agent_proxy", "seed")
"""Of a configuration, what is read here; the rest is for other programs."""


class Config(dict[str, Any]):
    """A mapping whose keys can be read as attributes too: `config.es_manager.max_workers`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the configuration has no key {name!r}{did_you_mean(name, map(str, self))}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def preset_names() -> list[str]:
    """The configurations that come with the package."""
    folder = resources.files("envfleet.llm") / "presets"
    return sorted(one.name.removesuffix(".yaml") for one in folder.iterdir())


def load_config(name: str | os.PathLike[str] = "base", overrides: Sequence[str] = ()) -> Config:
    """Read a configuration.

    Args:
        name: A preset, or the path of a YAML file.
        overrides: Changes, like "es_manager.train.env_groups=2".
    """
    if not isinstance(name, str | os.PathLike):
        raise ConfigError(
            "load_config takes the name of a preset or the path of a YAML file, got "
            f"{type(name).__name__}; what is a mapping already goes to EnvStateManager as it is"
        )
    settings = _read(str(name), ())
    for change in _changes(overrides):
        _apply(settings, change)
    config: Config = _rebuilt(settings, Config)
    return config


def plain_config(config: Any) -> dict[str, Any]:
    """A configuration in any form (mapping, OmegaConf, name or path of YAML) as plain data."""
    if isinstance(config, str | Path):
        config = load_config(config)
    if _is_of_omegaconf(config):
        config = _resolved(config)
    if not isinstance(config, Mapping):
        raise ConfigError(
            "a configuration is a mapping, an OmegaConf object, or the name or path of a YAML "
            f"file; got {type(config).__name__}"
        )
    try:
        data: dict[str, Any] = _rebuilt(config, dict)
    except RecursionError as exc:
        raise ConfigError("the configuration holds itself, or is nested too deeply") from exc
    return data


def _is_of_omegaconf(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "omegaconf"


def _resolved(config: Any) -> Any:
    """An OmegaConf object as plain data.

    Blocks that nobody here reads stay as they are written: what they refer to may only be there
    once another program has composed them.
    """
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(config)
    if isinstance(found, dict):
        for name in BLOCKS:
            if name in found:
                found[name] = _contained(functools.partial(operator.getitem, config, name), name)
    return found


def _contained(block_of: Callable[[], Any], name: str) -> Any:
    """A part of an OmegaConf object as plain data; `name` is the block that it belongs to."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    is_read = name in BLOCKS
    try:
        block = block_of()
        if OmegaConf.is_config(block):
            block = OmegaConf.to_container(block, resolve=is_read, throw_on_missing=is_read)
    except OmegaConfBaseException as exc:
        key = getattr(exc, "full_key", None) or name
        raise ConfigError(
            f"{key} cannot be resolved: {str(exc).partition(chr(10))[0].strip()}"
        ) from exc
    return block


def _rebuilt(value: Any, kind: type[dict[str, Any]], block: str = "") -> Any:
    """The same, with every mapping in it of this kind, also where OmegaConf's were put into it."""
    if _is_of_omegaconf(value):
        value = _contained(lambda: value, block)
    if isinstance(value, Mapping):
        return kind({key: _rebuilt(one, kind, block or str(key)) for key, one in value.items()})
    return [_rebuilt(one, kind, block) for one in value] if isinstance(value, list) else value


# ---- files --------------------------------------------------------------------------------------


def _read(name: str, above: tuple[str, ...], folder: Path | None = None) -> dict[str, Any]:
    try:
        where = _find(name, folder)
    except ConfigError as exc:
        if not above:
            raise
        raise ConfigError(f"{above[-1]} builds on {name!r}, but {exc}") from exc
    if str(where) in above:
        raise ConfigError(f"{where} builds on itself: {' -> '.join([*above, str(where)])}")
    found = _yaml(_text(where), str(where))
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise ConfigError(f"{where} must hold keys with their values, but holds {found!r:.60}")
    settings: dict[str, Any] = {}
    bases = found.pop("defaults", None) or []
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{where}: defaults must be a list of names, got {bases!r:.60}")
    for base in bases:
        if base != "_self_":
            below = where.parent if isinstance(where, Path) else None
            _merge(settings, _read(str(base), (*above, str(where)), below))
    _merge(settings, found)
    return settings


def _find(name: str, folder: Path | None) -> Any:
    """The file of this name: beside the one that asks, as a path, or among the presets."""
    beside = [folder / name, folder / f"{name}.yaml"] if folder is not None else []
    for path in [*beside, Path(name), Path(f"{name}.yaml")]:
        with contextlib.suppress(OSError):  # a name that no file could have
            if path.is_file():
                return path
    known = preset_names()
    if name in known:
        return resources.files("envfleet.llm") / "presets" / f"{name}.yaml"
    nearest = did_you_mean(name, known) or f"; there are {', '.join(known)}"
    raise ConfigError(f"there is no configuration and no file {name!r}{nearest}")


def _text(where: Any) -> str:
    try:
        text: str = where.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{where} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{where} cannot be read: it is not text") from exc
    return text


def _yaml(text: str, where: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as exc:
        raise MissingExtra("configurations need PyYAML: pip install 'envfleet[llm]'") from exc

    try:
        found = yaml.load(text, _loader())
        _check_ends(found)
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(exc).split())}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{where} holds itself, or is nested too deeply") from exc
    return found


@functools.cache
def _loader() -> Any:
    """PyYAML's, which reads no tags, but with numbers like 1e-3, to YAML 1.1 a text without dot."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def _check_ends(value: Any) -> None:
    """Follow it to its ends; RecursionError if there are none."""
    if isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            _check_ends(one)


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = deepcopy(value)


# ---- changes ------------------------------------------------------------------------------------


def _changes(overrides: Any) -> list[str]:
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(change, str) for change in overrides):
        raise ConfigError(
            f'overrides must be a list of changes like ["seed.train=1"], got {overrides!r:.60}'
        )
    return list(overrides)


def _apply(settings: dict[str, Any], change: str) -> None:
    key, is_set, text = change.partition("=")
    is_new, is_gone = key.startswith("+"), key.startswith("~")
    *path, last = key.lstrip("+~").split(".")
    if not last or not (is_set or is_gone):
        raise ConfigError(f"a change is written key=value, +key=value or ~key; got {change!r}")
    inner = settings
    for depth, name in enumerate(path):
        if is_new:
            inner.setdefault(name, {})
        inner = _inside(inner, [*path[:depth], name], change)
    if not is_new and last not in inner:
        remedy = "" if is_gone else "; a new one is written with a plus in front"
        _no_such_key(inner, [*path, last], change, remedy)
    if is_gone:
        del inner[last]
    else:
        inner[last] = _yaml(text, f"the value of {change!r}")


def _inside(inner: dict[str, Any], path: list[str], change: str) -> dict[str, Any]:
    if path[-1] not in inner:
        _no_such_key(inner, path, change, "")
    found = inner[path[-1]]
    if not isinstance(found, dict):
        raise ConfigError(f"{change!r}: {'.'.join(path)} is {found!r:.60} and has no keys")
    return found


def _no_such_key(inner: dict[str, Any], path: list[str], change: str, else_said: str) -> None:
    nearest = did_you_mean(path[-1], map(str, inner)) or else_said
    raise ConfigError(f"{change!r}: there is no key {'.'.join(path)}{nearest}")
