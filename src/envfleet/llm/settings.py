"""The options of an `EnvStateManager` and of a rollout, read from a configuration and checked.

Law: a wrong key or value is one sentence with its full path, before anything is built.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, cast

import numpy as np

from envfleet.engine.options import StartMethod
from envfleet.errors import ConfigError, EnvfleetError, StartError, did_you_mean, level_of_caller
from envfleet.llm.config import BLOCKS, plain_config
from envfleet.llm.parsing import ACTION_SEP, MAX_ACTIONS
from envfleet.llm.registry import EnvType, env_type, env_types
from envfleet.llm.turns import EpisodeFailure
from envfleet.options import (
    Count,
    CountOrZero,
    Must,
    Seconds,
    check,
    from_mapping,
    option_class,
    options_of,
)

ManagerMode = Literal["train", "val"]
UseMultiprocessing = bool | Literal["auto", "threads", "resets"]

_GROUPS = ("env_groups", "group_size", "env_configs")
_TAG = (
    "env_type",
    "max_actions_per_traj",
    "env_config",
    "env_instruction",
    "max_tokens",
    "parallel_friendly",
    "max_workers",
)
"""The last four are for programs that write prompts, and for other managers."""
_MANAGER = (
    "format_penalty",
    "use_multiprocessing",
    "max_workers",
    "sequential_env_types",
    "start_method",
    "step_timeout_s",
    "max_restarts",
    "train",
    "val",
)
_PROXY = (
    "max_turn",
    "action_sep",
    "max_actions_per_turn",
    "enable_think",
    # for programs that make prompts and batches of rollouts
    "max_context_window",
    "context_window_mode",
    "use_turn_scores",
    "reward_normalization",
    "batch_adjust_mode",
    # of rollouts with a model (rollout_options.py)
    "use_parallel_rollout",
    "parallel_n_jobs",
    "parallel_backend",
    "ray_address",
    "rollout_mode",
    "on_failure",
    "max_attempts",
    "max_invalid_turns",
    "reward_functions",
    "prompt",
)
_OF_OTHERS = frozenset(
    (
        # of RAGEN
        "collapse_detection",
        "ctx_manager",
        "enable_response_mask",
        "grpo_advantage_length_weight",
        "log_prob_micro_batch_size_per_gpu",
        "lora",
        "micro_batch_size_per_gpu",
        "model_config",
        "model_info",
        "model_path",
        "output",
        "ppo_mini_batch_size",
        "system",
        "use_critic",
        # of the trainers that RAGEN builds on, and of Hydra
        "actor_rollout_ref",
        "algorithm",
        "critic",
        "custom_reward_function",
        "data",
        "global_profiler",
        "hydra",
        "ray_init",
        "ray_kwargs",
        "reward_model",
        "trainer",
        "transfer_queue",
    )
)
"""Blocks of a configuration for a whole training run, which are not read here."""
_MISSPELT = 0.8
"""How similar a name must be to one of `BLOCKS` to count as a misspelling of it."""


@dataclass(frozen=True, slots=True)
class Tag:
    """One kind of environment in a configuration."""

    name: str
    type_name: str
    env_type: EnvType
    env_config: dict[str, Any] | None
    max_actions_per_traj: int

    def make(self) -> Any:
        """One environment of this kind."""
        try:
            return self.env_type.make(self.env_config)
        except ConfigError as exc:
            raise ConfigError(f"custom_envs.{self.name}: {exc}") from exc
        except EnvfleetError:
            raise
        except (Exception, SystemExit) as exc:  # an environment must not end the program
            raise StartError(
                f"an environment of custom_envs.{self.name} ({self.type_name}) cannot be built: "
                f"{EpisodeFailure.of('the constructor', exc).error}"
            ) from exc


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a manager."""

    mode: ManagerMode
    group_size: int
    groups: tuple[tuple[Tag, int], ...]
    """Tags, each with its number of groups, in order."""
    seed: int | None
    """The first seed of this mode."""
    format_penalty: float
    """Never above zero, as it is added."""
    use_multiprocessing: UseMultiprocessing
    max_workers: int
    sequential_env_types: frozenset[str]
    start_method: StartMethod | None
    step_timeout_s: float | None
    max_restarts: int

    def __post_init__(self) -> None:
        """Refuse a deadline that cannot be kept."""
        if self.use_multiprocessing == "resets" and self.step_timeout_s is not None:
            raise ConfigError(
                "es_manager.step_timeout_s cannot be kept with use_multiprocessing: resets, which "
                "plays turns in this process; leave it out, or set true"
            )

    @property
    def num_groups(self) -> int:
        """Groups of all tags together."""
        return sum(count for _, count in self.groups)


@option_class
@dataclass(frozen=True, slots=True)
class AgentProxy:
    """How a model's responses become turns."""

    max_turn: Count = 5
    action_sep: Annotated[str, Must("text", lambda text: bool(text.strip()))] = ACTION_SEP
    max_actions_per_turn: Count = MAX_ACTIONS
    enable_think: bool = True
    """Whether a response needs a thought before its answer."""


def read_agent_proxy(config: Any) -> AgentProxy:
    """Read the block `agent_proxy`; keys that are not there have defaults."""
    whole = plain_config(config)
    if whole.get("agent_proxy") is None:
        return AgentProxy()
    block = _settings_mapping(whole, "agent_proxy")
    _check_keys(block, _PROXY, "agent_proxy")
    names = [option.name for option in options_of(AgentProxy) if option.name in block]
    return from_mapping(
        AgentProxy, {name: _python_number(block[name]) for name in names}, "agent_proxy"
    )


_KINDS: dict[str, Any] = {
    "format_penalty": float,
    "use_multiprocessing": UseMultiprocessing,
    "max_workers": Count,
    "sequential_env_types": Sequence[str],
    "start_method": StartMethod | None,
    "step_timeout_s": Seconds | None,
    "max_restarts": CountOrZero,
}
"""What the options in the block `es_manager` must be."""


def read_settings(config: Any, mode: str) -> Settings:
    """Read the options of a manager in this mode."""
    check("mode", mode, ManagerMode)
    whole = plain_config(config)
    manager = _settings_mapping(whole, "es_manager")
    _check_names(whole)
    path = f"es_manager.{mode}"
    block = _settings_mapping(manager, mode, "es_manager")
    return Settings(
        mode=cast(ManagerMode, mode),
        group_size=_setting_value(block, "group_size", Count, path),
        groups=_env_groups(whole, block, path),
        seed=_setting_seed(whole, mode),
        **{name: _option(name, manager.get(name)) for name in _KINDS},
    )


def with_option(settings: Settings, name: str, value: Any) -> Settings:
    """The same settings with another value of one option of `es_manager`; None is its default."""
    return replace(settings, **{name: _option(name, value)})


def _option(name: str, value: Any) -> Any:
    """The value of an option in the block `es_manager`, as it is used; None is its default."""
    defaults: dict[str, Any] = {
        "format_penalty": -0.1,
        "use_multiprocessing": "auto",
        "max_workers": min(8, os.cpu_count() or 1),
        "sequential_env_types": (),
        "max_restarts": 3,
    }
    path = f"es_manager.{name}"
    value = check(
        path, _python_number(defaults.get(name) if value is None else value), _KINDS[name]
    )
    if name == "format_penalty":
        return -abs(value)
    return _type_names(value, path) if name == "sequential_env_types" else value


def _env_groups(
    whole: Mapping[str, Any], block: Mapping[str, Any], path: str
) -> tuple[tuple[Tag, int], ...]:
    kinds = _settings_mapping(block, "env_configs", path)
    wanted = _setting_value(block, "env_groups", Count, path)
    path += ".env_configs"
    names = _setting_value(kinds, "tags", Sequence[Any], path)
    counts = [
        _python_number(count)
        for count in _setting_value(kinds, "n_groups", Sequence[CountOrZero], path)
    ]
    if len(names) != len(counts):
        raise ConfigError(
            f"{path}.n_groups must have one number for each of the {len(names)} tags, got {counts}"
        )
    if sum(counts) != wanted:
        raise ConfigError(
            f"{path}.n_groups must add up to env_groups, but {counts} gives {sum(counts)} and "
            f"env_groups is {wanted}"
        )
    return tuple((_tag(whole, str(name)), count) for name, count in zip(names, counts, strict=True))


def _tag(whole: Mapping[str, Any], name: str) -> Tag:
    known = _settings_mapping(whole, "custom_envs")
    if name not in known:
        nearest = did_you_mean(name, known) or f"; there are {', '.join(map(str, known))}"
        raise ConfigError(f"custom_envs has no environment {name!r}{nearest}")
    entry, path = _settings_mapping(known, name, "custom_envs"), f"custom_envs.{name}"
    if "env_type" not in entry:
        raise ConfigError(f"{path}.env_type is missing")
    type_name, settings = str(entry["env_type"]), entry.get("env_config")
    check(f"{path}.env_config", settings, Mapping[str, Any] | None)
    try:
        kind = env_type(type_name)
        kind.config(settings)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    except (TypeError, ValueError, AttributeError) as exc:  # a value of the wrong type
        raise ConfigError(f"{path}.env_config {settings!r:.100} cannot be used: {exc}") from exc
    most = _setting_value(entry, "max_actions_per_traj", Count, path)
    return Tag(name, type_name, kind, None if settings is None else dict(settings), most)


def _setting_seed(whole: Mapping[str, Any], mode: str) -> int | None:
    seeds = check("seed", whole.get("seed"), Mapping[str, Any] | None)
    if seeds is None or seeds.get(mode) is None:
        return None
    return cast(int, _setting_value(seeds, mode, CountOrZero, "seed"))


# ---- names --------------------------------------------------------------------------------------


def _check_names(whole: Mapping[str, Any]) -> None:
    """Refuse every unknown key, even in blocks that this mode does not use.

    Values are checked only where they are used: an environment that is not played may need packages
    that are not installed.
    """
    _check_blocks(whole)
    for path, known in {
        "seed": ("train", "val"),
        "agent_proxy": _PROXY,
        "es_manager": _MANAGER,
        "es_manager.train": _GROUPS,
        "es_manager.val": _GROUPS,
        "es_manager.train.env_configs": ("tags", "n_groups"),
        "es_manager.val.env_configs": ("tags", "n_groups"),
        **{f"custom_envs.{name}": _TAG for name in _block(whole, "custom_envs")},
    }.items():
        _check_keys(_block(whole, path), known, path)


def _check_blocks(whole: Mapping[str, Any]) -> None:
    for key in whole:
        if key in BLOCKS or key in _OF_OTHERS:
            continue
        meant = get_close_matches(str(key).lower(), BLOCKS, n=1, cutoff=_MISSPELT)
        if meant:
            raise ConfigError(f"the configuration has no block {key!r}; did you mean {meant[0]}?")
        warnings.warn(
            f"{key!r} of the configuration is ignored; EnvStateManager reads {', '.join(BLOCKS)}",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )


def _block(whole: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The mapping under this path, or an empty one."""
    found: Any = whole
    for name in path.split(".", maxsplit=1 if path.startswith("custom_envs.") else -1):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


# ---- values -------------------------------------------------------------------------------------


def _check_keys(block: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for key in block:
        if key not in known:
            nearest = did_you_mean(str(key), known) or f"; it has {', '.join(known)}"
            raise ConfigError(f"{path} has no key {key!r}{nearest}")


def _settings_mapping(block: Mapping[str, Any], key: str, path: str = "") -> Mapping[str, Any]:
    return cast(Mapping[str, Any], _setting_value(block, key, Mapping[str, Any], path))


def _setting_value(block: Mapping[str, Any], key: str, kind: Any, path: str) -> Any:
    """What a block must have under this key, checked."""
    whole_path = f"{path}.{key}" if path else key
    if key not in block:
        raise ConfigError(f"the configuration has no {whole_path}")
    return check(whole_path, _python_number(block[key]), kind)


def _python_number(value: Any) -> Any:
    """A number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def _type_names(names: Sequence[str], path: str) -> frozenset[str]:
    known = env_types()
    for name in names:
        if name not in known:
            nearest = did_you_mean(str(name), known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{path}: there is no environment type {name!r}{nearest}")
    return frozenset(names)
