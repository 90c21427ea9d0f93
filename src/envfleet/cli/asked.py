"""What a user asks to be trained: a recipe, over it a configuration file, over that the flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from envfleet.adapters.names import find
from envfleet.cli.command import Usage
from envfleet.cli.config import read_config
from envfleet.cli.flags import add_flags, given
from envfleet.cli.options import options_of
from envfleet.learn.load import resumed_options
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.recipes import RECIPES
from envfleet.learn.train_options import FREE, LENGTHS, TrainOptions

__all__ = ["Asked", "StartOptions", "add_train_flags", "ask", "ask_to_go_on"]

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What a run starts from, and where it is kept."""

    recipe: bool = True
    """Start from the settings that are known to work for the environment, where there are any."""
    checkpoint_dir: Path | None = None
    """The run's folder; none makes runs/ENV-seedN, numbered if that is taken."""


@dataclass(frozen=True, slots=True)
class Asked:
    """All of it."""

    start: StartOptions
    options: TrainOptions
    ppo: PPOOptions
    has_recipe: bool = False
    """Whether it lies over a recipe."""
    said: frozenset[str] = frozenset()
    """The names of the options that a file or a flag set."""


_KINDS: tuple[type[Any], ...] = (StartOptions, TrainOptions, PPOOptions)


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say what to train."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="YAML with any of the options below, as `learning_rate: 3e-4`; flags go before it",
    )
    add_flags(parser, StartOptions)
    group = parser.add_argument_group("the run")
    add_flags(group, TrainOptions, without=frozenset({"env"}))
    add_flags(parser.add_argument_group("PPO"), PPOOptions)


def ask(args: argparse.Namespace) -> Asked:
    """Put together what was asked for.

    Raises:
        Usage: Nobody said what to train on, or how long is said twice.
        ConfigError: Something that was said cannot be.
    """
    said = {} if args.config is None else read_config(args.config, *_KINDS)
    flags = given(args, *_KINDS)
    _check_one_length(said, f"{args.config} sets total_steps and num_episodes")
    _check_one_length(flags)
    if flags.keys() & set(LENGTHS):  # one way to say how long goes before the other, too
        said = {name: value for name, value in said.items() if name not in LENGTHS}
    said |= flags
    if said.get("env") is None:
        raise Usage("say what to train on: --env CartPole-v1")
    said["env"] = find(said["env"]).name
    start = _over(StartOptions(), said)
    recipe = RECIPES.get(said["env"]) if start.recipe else None
    options, ppo = TrainOptions(said["env"]), PPOOptions()
    if recipe is not None:
        options = replace(options, n_envs=recipe.n_envs, total_steps=recipe.total_steps)
        ppo = recipe.options
    chosen = _over(options, said), _over(ppo, said)
    return Asked(start, *chosen, has_recipe=recipe is not None, said=frozenset(said))


def ask_to_go_on(args: argparse.Namespace) -> Asked:
    """What the run was asked for, with the flags that a run may go on by.

    Raises:
        Usage: A flag would make it another run.
        ConfigError: Something that was said cannot be.
    """
    flags = given(args, *_KINDS)
    fixed = [] if args.config is None else ["--config"]
    for name, value in flags.items():
        if name not in FREE and name not in LENGTHS:
            fixed.append(f"--{'no-' if value is False else ''}{name.replace('_', '-')}")
    if fixed:
        raise Usage(
            f"--resume goes on with the run as it was, in its own folder; leave out "
            f"{', '.join(fixed)}"
        )
    _check_one_length(flags)
    options, ppo = resumed_options(args.resume)
    if "total_steps" in flags:
        flags["num_episodes"] = None
    return Asked(StartOptions(), _over(options, flags), ppo)


def _check_one_length(
    said: dict[str, Any], both: str = "--total-steps and --num-episodes were both given"
) -> None:
    if said.keys() >= set(LENGTHS) and said["num_episodes"] is not None:
        raise Usage(f"{both}, and each says how long to train; leave out one of them")


def _over(options: Options, said: dict[str, Any]) -> Options:
    """These options, with what was said in the place of their own."""
    names = {option.name for option in options_of(type(options))}
    return replace(options, **{name: said[name] for name in names & said.keys()})  # type: ignore[type-var]
