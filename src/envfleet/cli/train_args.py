"""What to train: the options of a recipe, overridden by a configuration file, then by flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from envfleet.adapters.names import find
from envfleet.cli.command import UsageError
from envfleet.cli.config_file import read_config
from envfleet.cli.flags import add_flags, given_flags
from envfleet.learn.agent_options import AGENT_FREE, AGENT_JOB, AgentOptions
from envfleet.learn.load import resumed_options
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.recipes import Recipe, recipe_for
from envfleet.learn.train_options import LENGTHS, TrainOptions
from envfleet.options import options_of
from envfleet.runs.run_file import RunFile, job_of

Options = TypeVar("Options")
Form = Literal["turns", "team"]
"""Whether agents act in turn (PettingZoo's AEC) or at the same time (Parallel)."""


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What a run starts from, and where it is kept."""

    recipe: bool = True
    """Start from the settings that are known to work for the environment, where there are any."""
    checkpoint_dir: Path | None = None
    """The run's folder; none makes runs/ENV-seedN, numbered if that is taken."""


@dataclass(frozen=True, slots=True)
class TrainArgs:
    """All options of a run."""

    start: StartOptions
    options: TrainOptions
    ppo: PPOOptions
    recipe: Recipe | None = None
    """The recipe that was used."""
    said: frozenset[str] = frozenset()
    """The names of the options that a file or a flag set."""
    agents: AgentOptions | None = None
    """How several agents learn; None if the environment has one."""


_KINDS: tuple[type[Any], ...] = (StartOptions, TrainOptions, AgentOptions, PPOOptions)


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a run."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="YAML with any of the options below, as `learning_rate: 3e-4`; flags override it",
    )
    add_flags(parser, StartOptions)
    group = parser.add_argument_group("the run")
    add_flags(group, TrainOptions, without=frozenset({"env"}))
    add_flags(parser.add_argument_group("several agents (PettingZoo)"), AgentOptions)
    add_flags(parser.add_argument_group("PPO"), PPOOptions)


def read_train_args(args: argparse.Namespace) -> TrainArgs:
    """The options of a new run.

    Raises:
        UsageError: No environment is named, or two lengths are given.
        ConfigError: An option has a value that cannot be.
    """
    said = {} if args.config is None else read_config(args.config, *_KINDS)
    flags = given_flags(args, *_KINDS)
    _check_one_length(said, f"{args.config} sets total_steps and num_episodes")
    _check_one_length(flags)
    if flags.keys() & set(LENGTHS):  # a length as a flag overrides either length of the file
        said = {name: value for name, value in said.items() if name not in LENGTHS}
    said |= flags
    if said.get("env") is None:
        raise UsageError("say what to train on: --env CartPole-v1")
    said["env"] = find(said["env"]).name
    if said.get("wrapper") is not None:
        said["wrapper"] = _wrapper(said["wrapper"])
    start = _over(StartOptions(), said)
    form = _agent_form(said["env"], said.get("env_kwargs", {}))
    if form is None:
        _refuse_agents(said, said["env"])
    elif said.get("wrapper") is not None:
        raise UsageError("--wrapper is for environments with one agent; wrap these in --env")
    recipe = _recipe(said["env"], form) if start.recipe else None
    options, ppo = TrainOptions(said["env"]), PPOOptions()
    if recipe is not None:
        options = replace(
            options,
            n_envs=recipe.n_envs,
            total_steps=recipe.total_steps,
            eval_episodes=recipe.eval_episodes,
            env_kwargs=dict(recipe.env_kwargs),
            wrapper=recipe.wrapper,
        )
        ppo = recipe.options
    if "env_kwargs" in said:
        said["env_kwargs"] = {**options.env_kwargs, **said["env_kwargs"]}
    chosen = _over(options, said), _over(ppo, said)
    agents = None if form is None else _over(AgentOptions(), said)
    names = frozenset(said)
    return TrainArgs(start, *chosen, recipe=recipe, said=names, agents=agents)


def read_resume_args(args: argparse.Namespace) -> TrainArgs:
    """The options of an earlier run, with those flags that may change when it goes on.

    Raises:
        UsageError: A flag would make it another run.
        ConfigError: An option has a value that cannot be.
    """
    flags = given_flags(args, *_KINDS)
    fixed = [] if args.config is None else ["--config"]
    for name, value in flags.items():
        if name not in AGENT_FREE and name not in LENGTHS:
            fixed.append(f"--{'no-' if value is False else ''}{name.replace('_', '-')}")
    if fixed:
        raise UsageError(
            f"--resume goes on with the run as it was, in its own folder; leave out "
            f"{', '.join(fixed)}"
        )
    _check_one_length(flags)
    if "total_steps" in flags:
        flags["num_episodes"] = None
    if job_of(args.resume) == AGENT_JOB:
        from envfleet.multiagent.agent_train import AGENT_KIND

        kept = RunFile(args.resume, AGENT_KIND).options()
        chosen = _over(kept["options"], flags), kept["ppo"]
        return TrainArgs(StartOptions(), *chosen, agents=_over(kept["agents"], flags))
    options, ppo = resumed_options(args.resume)
    _refuse_agents(flags, options.env)
    return TrainArgs(StartOptions(), _over(options, flags), ppo)


def _recipe(env: str, form: Form | None) -> Recipe | None:
    """The settings that are known to work, if there are any."""
    if form is None:
        return recipe_for(env)
    from envfleet.multiagent.agent_recipes import AGENT_RECIPES, DEFAULTS

    return AGENT_RECIPES.get(env, DEFAULTS[form])


def _wrapper(name: str) -> str:
    """The full name of a wrapper, which can be found."""
    if ":" not in name:
        raise UsageError(f"--wrapper is module:function or file.py:function, got {name!r}")
    return find(name).name


def _refuse_agents(said: Mapping[str, Any], env: str) -> None:
    """Refuse options of several agents where there is one."""
    wrong = [option.name for option in options_of(AgentOptions) if option.name in said]
    if wrong:
        raise UsageError(
            f"--{wrong[0].replace('_', '-')} is for environments with several agents (PettingZoo), "
            f"and {env} has one"
        )


def _check_one_length(
    said: dict[str, Any], both: str = "--total-steps and --num-episodes were both given"
) -> None:
    if said.keys() >= set(LENGTHS) and said["num_episodes"] is not None:
        raise UsageError(f"{both}, and each says how long to train; leave out one of them")


def _over(options: Options, said: dict[str, Any]) -> Options:
    """These options, with the given values in place of their own."""
    names = {option.name for option in options_of(type(options))}
    return replace(options, **{name: said[name] for name in names & said.keys()})  # type: ignore[type-var]


def _agent_form(name: str, kwargs: dict[str, Any]) -> Form | None:
    """How the agents of an environment act; None if it is none of PettingZoo's.

    Functions are called to find out; classes and ids tell without. PettingZoo is not imported. What
    cannot be built is left to those who will say why.
    """
    source: Any = find(name).source
    if isinstance(source, str):
        return None
    kind = source
    if not isinstance(source, type):
        try:
            built = source(**kwargs)
        except Exception:
            return None
        kind = type(built)
        close = getattr(built, "close", None)
        if callable(close):
            close()
    package = sys.modules.get("pettingzoo")
    if package is None:  # then nothing of it was built
        return None
    if issubclass(kind, package.AECEnv):
        return "turns"
    return "team" if issubclass(kind, package.ParallelEnv) else None
