"""Configurations by name: presets of this package or the user's files, and `key=value` changes.

A file may build on others by Hydra's `defaults:` list; later ones win. A change names a key that is
there (`es_manager.max_workers=4`), a new one with a plus (`+custom_envs.Mine.env_type=mine`), or
removes one (`~seed`). OmegaConf reads, merges and resolves `${...}`. Changes are applied by hand,
because OmegaConf would put a mapping in the place of a number and suggests no key that is meant.

Law: every mistake is one sentence that names the file or the change, the key, and the nearest right
key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from envfleet.errors import ConfigError, did_you_mean
from envfleet.llm.extras import import_extra

__all__ = ["BLOCKS", "Config", "changed_config", "load_config", "plain_config", "preset_names"]

BLOCKS = ("es_manager", "custom_envs", "agent_proxy", "seed", "llm")
"""The blocks of a configuration that are read here; the rest is for other programs."""


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
            f"{type(name).__name__}; give a mapping to EnvStateManager as it is"
        )
    conf = _omegaconf().OmegaConf
    settings = conf.to_container(_read_config(str(name), ()))
    for change in _checked_changes(overrides):
        _apply(settings, change)
    config: Config = _copied(_resolved(conf.create(settings)), Config)
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
        data: dict[str, Any] = _copied(config, dict)
    except RecursionError as exc:
        raise ConfigError("the configuration holds itself, or is nested too deeply") from exc
    return data


def changed_config(config: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """A configuration in any form as plain data, with changes as for `load_config`."""
    settings = plain_config(config)
    for change in _checked_changes(overrides):
        _apply(settings, change)
    return settings


def _omegaconf() -> Any:
    install = "pip install 'envfleet[llm]'"
    return import_extra("omegaconf", wanted_by="a configuration", install=install)


def _is_of_omegaconf(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "omegaconf"


def _resolved(config: Any) -> Any:
    """An OmegaConf object as plain data, with `${...}` resolved in the blocks that are read here.

    The other blocks may refer to keys that only another program adds.
    """
    found = _omegaconf().OmegaConf.to_container(config)
    if isinstance(found, dict):
        for name in BLOCKS:
            if name in found:
                with _resolving(name):
                    found[name] = _data_of(config[name], name)
    return found


def _data_of(part: Any, block: str) -> Any:
    """A part of an OmegaConf object as plain data, resolved if its block is read here."""
    conf, is_read = _omegaconf().OmegaConf, block in BLOCKS
    if not conf.is_config(part):
        return part
    return conf.to_container(part, resolve=is_read, throw_on_missing=is_read)


@contextlib.contextmanager
def _resolving(block: str) -> Iterator[None]:
    try:
        yield
    except _omegaconf().errors.OmegaConfBaseException as exc:
        key = getattr(exc, "full_key", None) or block
        raise ConfigError(f"{key} cannot be resolved: {_first_line(exc)}") from exc


def _copied(value: Any, kind: type[dict[str, Any]], block: str = "") -> Any:
    """A copy in which every mapping is of this kind, those of OmegaConf included."""
    if _is_of_omegaconf(value):
        with _resolving(block):
            value = _data_of(value, block)
    if isinstance(value, Mapping):
        return kind({key: _copied(one, kind, block or str(key)) for key, one in value.items()})
    return [_copied(one, kind, block) for one in value] if isinstance(value, list) else value


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0].strip()


# ---- files --------------------------------------------------------------------------------------


def _read_config(name: str, above: tuple[str, ...], folder: Path | None = None) -> Any:
    """The OmegaConf object of a file, merged with the files that it builds on."""
    try:
        where = _find_config(name, folder)
    except ConfigError as exc:
        if not above:
            raise
        raise ConfigError(f"{above[-1]} builds on {name!r}, but {exc}") from exc
    if str(where) in above:
        raise ConfigError(f"{where} builds on itself: {' -> '.join([*above, str(where)])}")
    conf = _omegaconf().OmegaConf
    with _errors_of_yaml(str(where)):
        found = conf.create(_config_text(where) or "{}")
    if not conf.is_dict(found):
        raise ConfigError(f"{where} must hold keys with their values, but holds {found!r:.60}")
    bases = conf.to_container(found).get("defaults") or []
    found.pop("defaults", None)
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{where}: defaults must be a list of names, got {bases!r:.60}")
    below = where.parent if isinstance(where, Path) else None
    parts = [_read_config(base, (*above, str(where)), below) for base in bases if base != "_self_"]
    try:
        return conf.merge(*parts, found)
    except (TypeError, _omegaconf().errors.OmegaConfBaseException) as exc:
        raise ConfigError(
            f"{where} cannot be merged with what it builds on: {_first_line(exc)}"
        ) from exc


def _find_config(name: str, folder: Path | None) -> Any:
    """The file of this name: beside the file that names it, as a path, or among the presets."""
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


def _config_text(where: Any) -> str:
    try:
        text: str = where.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{where} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{where} cannot be read: it is not text") from exc
    return text


@contextlib.contextmanager
def _errors_of_yaml(where: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as exc:
        raise ConfigError(f"{where} is nested too deeply") from exc
    except Exception as exc:  # of PyYAML, or of OmegaConf on what PyYAML read
        raise ConfigError(f"{where} is not YAML: {' '.join(str(exc).split())}") from exc


# ---- changes ------------------------------------------------------------------------------------


def _checked_changes(overrides: Any) -> list[str]:
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
    remedy = "" if is_gone else "; a new one is written with a plus in front"
    inner = settings
    for depth, name in enumerate(path, start=1):
        if is_new:
            inner.setdefault(name, {})
        if name not in inner:
            _no_such_config_key(inner, path[:depth], change, remedy)
        found = inner[name]
        if not isinstance(found, dict):
            where = ".".join(path[:depth])
            raise ConfigError(f"{change!r}: {where} is {found!r:.60} and has no keys")
        inner = found
    if not is_new and last not in inner:
        _no_such_config_key(inner, [*path, last], change, remedy)
    if is_gone:
        del inner[last]
    else:
        with _errors_of_yaml(f"the value of {change!r}"):
            conf = _omegaconf().OmegaConf
            inner[last] = conf.to_container(conf.from_dotlist([f"value={text}"]))["value"]


def _no_such_config_key(inner: dict[str, Any], path: list[str], change: str, remedy: str) -> None:
    nearest = did_you_mean(path[-1], map(str, inner)) or remedy
    raise ConfigError(f"{change!r}: there is no key {'.'.join(path)}{nearest}")
