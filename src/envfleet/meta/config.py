"""Configurations of meta-RL runs: YAML files in sections, presets, and `section.key=value` changes.

Law: every mistake is one sentence that names the file or the change, the key, and the nearest right
key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from envfleet.errors import ConfigError, MissingExtra, did_you_mean
from envfleet.meta.agents.options import policy_options
from envfleet.meta.options import (
    EnvOptions,
    EvalOptions,
    LearnerOptions,
    RL2TrainOptions,
    RunOptions,
    check_tasks,
)
from envfleet.options import from_mapping, options_of
from envfleet.runs.yaml_limit import check_size

__all__ = ["RL2", "MetaConfig", "load_config", "preset_names", "read_config"]

SECTIONS = ("env", "train", "eval", "policy")
OF_RUN = tuple(option.name for option in options_of(RunOptions))
KEYS = (*SECTIONS, *OF_RUN)
RL2 = "rl2"
"""The `algo_name` of a policy that learns by PPO; the other options of its section are PPO's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaConfig:
    """What a run is asked for, checked."""

    run: RunOptions
    env: EnvOptions
    train: LearnerOptions | RL2TrainOptions
    eval: EvalOptions
    policy: Any
    """`PolicyOptions`, or `PPOOptions` for RL²."""

    @property
    def is_rl2(self) -> bool:
        """Whether it learns by PPO with a memory."""
        return isinstance(self.train, RL2TrainOptions)


def preset_names() -> list[str]:
    """The configurations that come with the package."""
    folder = resources.files("envfleet.meta") / "presets"
    return sorted(
        f"{env.name}/{one.name.removesuffix('.yaml')}"
        for env in folder.iterdir()
        if env.is_dir()
        for one in env.iterdir()
        if one.name.endswith(".yaml")
    )


def load_config(
    name: str | Path | None = None,
    changes: Sequence[str] = (),
    *,
    seed: int | None = None,
    cuda: int | None = None,
    num_parallel_workers: int | None = None,
) -> MetaConfig:
    """Read a configuration.

    Args:
        name: A preset, or the path of a YAML file; None begins with nothing.
        changes: Like "train.num_iters=50".
        seed: In place of the file's.
        cuda: In place of the file's.
        num_parallel_workers: In place of the file's.
    """
    found = {} if name is None else _read_preset(str(name))
    for change in changes:
        key, equals, text = change.partition("=")
        section, dot, option = key.partition(".")
        if not (equals and dot and option):
            raise ConfigError(f"{change!r} is no change; write section.key=value")
        if section not in SECTIONS:
            raise ConfigError(f"there is no section {section!r}{did_you_mean(section, SECTIONS)}")
        block = found.setdefault(section, {})
        *path, last = option.split(".")
        for part in path:
            block = block.setdefault(part, {})
        block[last] = _config_value(text, change)
    found |= {name: value for name, value in (("seed", seed), ("cuda", cuda)) if value is not None}
    if num_parallel_workers is not None:
        found.setdefault("env", {})["num_parallel_workers"] = num_parallel_workers
    return read_config(found, "" if name is None else str(name))


def read_config(found: Mapping[str, Any], source: str = "") -> MetaConfig:
    """Check a configuration that is plain data: sections with their options."""
    where = f"{source}: " if source else ""
    for name in found:
        if name not in KEYS:
            nearest = did_you_mean(str(name), KEYS) or f"; it has {', '.join(KEYS)}"
            raise ConfigError(f"{where}there is no section {name!r}{nearest}")
    blocks = {name: _with_numbers(found.get(name) or {}) for name in SECTIONS}
    for name, block in blocks.items():
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where}{name} must hold options with their values, got {block!r}")
    try:
        return _checked_config(blocks, {name: found[name] for name in OF_RUN if name in found})
    except ConfigError as exc:
        raise ConfigError(f"{where}{exc}") from exc


def _checked_config(blocks: dict[str, Any], of_run: dict[str, Any]) -> MetaConfig:
    if "env_name" not in blocks["env"]:
        raise ConfigError(
            "no environment was named: give env.env_name, or a preset, one of "
            f"{', '.join(preset_names())}"
        )
    policy: Any
    train: LearnerOptions | RL2TrainOptions
    if blocks["policy"].get("algo_name") == RL2:
        from envfleet.learn.options import PPOOptions

        rest = {name: value for name, value in blocks["policy"].items() if name != "algo_name"}
        policy = from_mapping(PPOOptions, rest, "policy")
        train = from_mapping(RL2TrainOptions, blocks["train"], "train")
    else:
        policy = policy_options(blocks["policy"])
        train = from_mapping(LearnerOptions, blocks["train"], "train")
    env = from_mapping(EnvOptions, blocks["env"], "env")
    check_tasks(env)
    return MetaConfig(
        run=from_mapping(RunOptions, of_run),
        env=env,
        train=train,
        eval=from_mapping(EvalOptions, blocks["eval"], "eval"),
        policy=policy,
    )


def words(owner: str, name: str, value: Any) -> list[str]:
    """An option as it is typed after `envfleet meta`."""
    if owner == "run":
        return [f"--{name}", str(value)]
    text = value if isinstance(value, str) else json.dumps(value)
    return [f"{owner}.{name}={text}"]


def _read_preset(name: str) -> dict[str, Any]:
    path = Path(name)
    text: str
    if path.suffix in (".yaml", ".yml"):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"{name} cannot be read: {exc.strerror}") from exc
    else:
        known = preset_names()
        if name not in known:
            nearest = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"there is no preset {name!r}{nearest}, or name a .yaml file")
        text = (resources.files("envfleet.meta") / "presets" / f"{name}.yaml").read_text("utf-8")
    # guides write three dots for the options that they leave out
    found = _parsed_config(re.sub(r"(?m)^[ \t]+\.\.\.[ \t]*$", "", text), name)
    if not isinstance(found, dict):
        raise ConfigError(f"{name} must hold sections: {', '.join(SECTIONS)}")
    return found


def _config_value(text: str, change: str) -> Any:
    return _with_numbers(_parsed_config(text, f"the value of {change!r}"))


def _parsed_config(text: str, what: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as exc:
        raise MissingExtra("configurations need PyYAML: pip install 'envfleet[train]'") from exc
    try:
        check_size(yaml.compose(text, yaml.SafeLoader), what)
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(
            f"{what} is not YAML{line}: {' '.join(str(getattr(exc, 'problem', exc)).split())}"
        ) from exc


def _with_numbers(value: Any) -> Any:
    """YAML takes 3e-4, without a point, for text."""
    if isinstance(value, Mapping):
        return {str(key): _with_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_numbers(one) for one in value]
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() and "e-" not in value.lower() else number
    return value
