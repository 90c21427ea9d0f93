"""The options of an `EnvStateManager` and of a rollout, read from a configuration and checked.

Law: a wrong key or value is one sentence with its full path, before anything is built.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, TypeGuard, cast

from envfleet.engine.options import StartMethod, one_of
from envfleet.errors import ConfigError, EnvfleetError, StartError, did_you_mean, level_of_caller
from envfleet.llm.config import BLOCKS, plain_config
from envfleet.llm.parsing import ACTION_SEP, MAX_ACTIONS
from envfleet.llm.registry import EnvType, env_type, env_types
from envfleet.llm.turns import EpisodeFailure

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


@dataclass(frozen=True, slots=True)
class AgentProxy:
    """How a model's responses become turns."""

    max_turn: int = 5
    action_sep: str = ACTION_SEP
    max_actions_per_turn: int = MAX_ACTIONS
    enable_think: bool = True
    """Whether a response needs a thought before its answer."""


def read_agent_proxy(config: Any) -> AgentProxy:
    """Read the block `agent_proxy`; keys that are not there have defaults."""
    whole, path = plain_config(config), "agent_proxy."
    if whole.get("agent_proxy") is None:
        return AgentProxy()
    block = _mapping(whole, "agent_proxy")
    _check_keys(block, _PROXY, "agent_proxy")
    action_sep = block.get("action_sep", ACTION_SEP)
    if not isinstance(action_sep, str) or not action_sep.strip():
        raise ConfigError(f"{path}action_sep must be text, got {action_sep!r}")
    enable_think = block.get("enable_think", True)
    if not isinstance(enable_think, bool):
        raise ConfigError(f"{path}enable_think must be true or false, got {enable_think!r}")
    return AgentProxy(
        _count(block, "max_turn", path, AgentProxy().max_turn),
        action_sep,
        _count(block, "max_actions_per_turn", path, MAX_ACTIONS),
        enable_think,
    )


def read_settings(config: Any, mode: str) -> Settings:
    """Read the options of a manager in this mode."""
    if mode not in ("train", "val"):
        raise ConfigError(f"mode must be train or val, got {mode!r}")
    whole = plain_config(config)
    manager = _mapping(whole, "es_manager")
    _check_names(whole)
    block = _mapping(manager, mode, "es_manager.")
    methods = manager.get("start_method")
    if methods is not None:
        one_of("es_manager.start_method", methods, StartMethod)
    return Settings(
        mode=cast(ManagerMode, mode),
        group_size=_count(block, "group_size", f"es_manager.{mode}."),
        groups=_groups(whole, block, f"es_manager.{mode}."),
        seed=_seed(whole, mode),
        **{name: read(manager) for name, read in _CHANGEABLE.items()},
        start_method=methods,
        step_timeout_s=_timeout(manager),
        max_restarts=_count(manager, "max_restarts", "es_manager.", 3, least=0),
    )


def with_option(settings: Settings, name: str, value: Any) -> Settings:
    """The same settings with another value of one of `_CHANGEABLE`."""
    return replace(settings, **{name: _CHANGEABLE[name]({name: value})})


def _use_multiprocessing(manager: Mapping[str, Any]) -> UseMultiprocessing:
    value = manager.get("use_multiprocessing", "auto")
    if not isinstance(value, bool) and value not in ("auto", "threads", "resets"):
        raise ConfigError(
            "es_manager.use_multiprocessing must be true, false, auto, threads or resets, "
            f"got {value!r}"
        )
    return cast(UseMultiprocessing, value)


def _groups(
    whole: Mapping[str, Any], block: Mapping[str, Any], path: str
) -> tuple[tuple[Tag, int], ...]:
    kinds = _mapping(block, "env_configs", path)
    path += "env_configs."
    names, counts = _list(kinds, "tags", path), _list(kinds, "n_groups", path)
    if len(names) != len(counts):
        raise ConfigError(
            f"{path}n_groups must have one number for each of the {len(names)} tags, got {counts}"
        )
    for count in counts:
        if not _is_whole(count) or count < 0:
            raise ConfigError(f"{path}n_groups must hold whole numbers, got {count!r}")
    wanted = _count(block, "env_groups", path.removesuffix("env_configs."))
    if sum(counts) != wanted:
        raise ConfigError(
            f"{path}n_groups must add up to env_groups, but {counts} gives {sum(counts)} and "
            f"env_groups is {wanted}"
        )
    return tuple(
        (_tag(whole, str(name)), int(count)) for name, count in zip(names, counts, strict=True)
    )


def _tag(whole: Mapping[str, Any], name: str) -> Tag:
    known = _mapping(whole, "custom_envs")
    if name not in known:
        nearest = did_you_mean(name, known) or f"; there are {', '.join(map(str, known))}"
        raise ConfigError(f"custom_envs has no environment {name!r}{nearest}")
    entry, path = _mapping(known, name, "custom_envs."), f"custom_envs.{name}."
    if "env_type" not in entry:
        raise ConfigError(f"{path}env_type is missing")
    type_name, settings = str(entry["env_type"]), entry.get("env_config")
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"{path}env_config must be a mapping or null, got {settings!r}")
    try:
        kind = env_type(type_name)
        kind.config(settings)
    except ConfigError as exc:
        raise ConfigError(f"{path.rstrip('.')}: {exc}") from exc
    except (TypeError, ValueError, AttributeError) as exc:  # a value of the wrong type
        raise ConfigError(f"{path}env_config {settings!r:.100} cannot be used: {exc}") from exc
    most = _count(entry, "max_actions_per_traj", path)
    return Tag(name, type_name, kind, None if settings is None else dict(settings), most)


def _seed(whole: Mapping[str, Any], mode: str) -> int | None:
    seeds = whole.get("seed")
    if seeds is None:
        return None
    if not isinstance(seeds, Mapping):
        raise ConfigError(f"seed must be a mapping with train and val, got {seeds!r}")
    if seeds.get(mode) is None:
        return None
    return _count(seeds, mode, "seed.", least=0)


def _timeout(manager: Mapping[str, Any]) -> float | None:
    if manager.get("step_timeout_s") is None:
        return None
    seconds = _number(manager, "step_timeout_s", "es_manager.", 0.0)
    if seconds <= 0:
        raise ConfigError(f"es_manager.step_timeout_s must be above 0 seconds, got {seconds}")
    return seconds


_CHANGEABLE: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "format_penalty": lambda es: -abs(_number(es, "format_penalty", "es_manager.", -0.1)),
    "use_multiprocessing": _use_multiprocessing,
    "max_workers": lambda es: _count(es, "max_workers", "es_manager.", min(8, os.cpu_count() or 1)),
    "sequential_env_types": lambda es: _type_names(es, "sequential_env_types", "es_manager."),
}
"""Options that can be changed while a manager runs, with the functions that read them."""


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


def _mapping(block: Mapping[str, Any], key: str, path: str = "") -> Mapping[str, Any]:
    if key not in block:
        raise ConfigError(f"the configuration has no {path}{key}")
    if not isinstance(block[key], Mapping):
        raise ConfigError(f"{path}{key} must be a mapping, got {block[key]!r:.60}")
    return cast(Mapping[str, Any], block[key])


def _list(block: Mapping[str, Any], key: str, path: str) -> list[Any]:
    value = block.get(key)
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(f"{path}{key} must be a list, got {value!r:.60}")
    return list(value)


def _type_names(block: Mapping[str, Any], key: str, path: str) -> frozenset[str]:
    names, known = _list({key: [], **block}, key, path), env_types()
    for name in names:
        if name not in known:
            nearest = did_you_mean(str(name), known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{path}{key}: there is no environment type {name!r}{nearest}")
    return frozenset(names)


def _count(
    block: Mapping[str, Any], key: str, path: str, default: int | None = None, *, least: int = 1
) -> int:
    value = block.get(key, default)
    if value is None and key not in block:
        raise ConfigError(f"the configuration has no {path}{key}")
    if value is None:
        value = default
    if not _is_whole(value) or value < least:
        raise ConfigError(f"{path}{key} must be a whole number from {least}, got {value!r}")
    return int(value)


def _is_whole(value: Any) -> TypeGuard[Integral]:
    """Whether it is a whole number, numpy's included."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(block: Mapping[str, Any], key: str, path: str, default: float) -> float:
    value = block.get(key, default)
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{path}{key} must be a number, got {value!r}")
    return float(value)
