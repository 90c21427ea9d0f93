"""Options as command-line flags: ``learning_rate`` is ``--learning-rate``.

Law: an option that was not typed has no value, so that flags can be laid over a file or a recipe.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from envfleet.cli.arguments import value_of
from envfleet.errors import did_you_mean
from envfleet.options import Option, options_of

ELSEWHERE = {
    "lr": "learning_rate",
    "timesteps": "total_steps",
    "total_timesteps": "total_steps",
    "n_timesteps": "total_steps",
    "steps": "total_steps",
    "num_envs": "n_envs",
    "num_steps": "n_steps",
    "minibatch_size": "batch_size",
    "update_epochs": "n_epochs",
    "clip_coef": "clip_range",
    "anneal_lr": "anneal_learning_rate",
    "env_id": "env",
    "normalize": "normalise_obs",
    "normalize_obs": "normalise_obs",
    "norm_obs": "normalise_obs",
    "normalize_reward": "normalise_rewards",
    "normalize_rewards": "normalise_rewards",
    "norm_reward": "normalise_rewards",
    "track": "wandb",
    "capture_video": "video",
    "eval_freq": "eval_every",
    "save_freq": "save_every",
    "n_eval_episodes": "eval_episodes",
}
"""Options by the names that Stable-Baselines3, its RL zoo and CleanRL have for them."""


def add_flags(
    parser: argparse._ActionsContainer, kind: type[Any], without: frozenset[str] = frozenset()
) -> None:
    """One flag for each field of an option class, except those in `without`."""
    for option in options_of(kind):
        if option.name not in without:
            _add_flag(parser, option)


def given_flags(args: argparse.Namespace, *kinds: type[Any]) -> dict[str, Any]:
    """The options of these classes that were typed, by name."""
    names = [option.name for kind in kinds for option in options_of(kind)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """The end of a sentence about a flag or a key that does not exist: the one that was meant."""
    names, dashes = list(known), "--" if wrong.startswith("--") else ""
    meant = ELSEWHERE.get(wrong.removeprefix("--").lower().replace("-", "_"), "")
    for name in (f"{dashes}{meant}", f"{dashes}{meant.replace('_', '-')}"):
        if meant and name in names:
            return f"; did you mean {name}?"
    return did_you_mean(wrong, names)


def _add_flag(parser: argparse._ActionsContainer, option: Option) -> None:
    text = option.help.rstrip(".").replace("None", "none")
    text = f"{text[:1].lower()}{text[1:]} (default: {_shown_default(option.default)})".strip()
    flag = f"--{option.name.replace('_', '-')}"
    # SUPPRESS: what was not typed is not there, so that None can be typed
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if option.base is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    else:
        parser.add_argument(flag, type=value_of(option.kind), metavar=_metavar(option), **common)


def _metavar(option: Option) -> str:
    """What stands for the value in help."""
    if get_origin(option.base) is Literal:
        return "|".join(map(str, get_args(option.base)))
    names = {int: "N", float: "X", Path: "DIR", tuple: "N,N", dict: "JSON"}
    kind = get_origin(option.base) or option.base
    return names.get(kind, option.name.upper().replace("_", "-"))


def _shown_default(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "none", True: "yes", False: "no"}[default]
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, dict):
        return json.dumps(default)
    return f"{default:,}" if type(default) is int else str(default)
