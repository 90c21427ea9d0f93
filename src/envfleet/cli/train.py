"""``envfleet train``: from an environment's name to a trained policy that can be resumed.

A run is shown as a live view on a terminal and as lines elsewhere. Ctrl-C, SIGTERM or SIGHUP once
finishes the iteration and saves; Ctrl-C or SIGTERM twice ends at once.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envfleet.adapters.names import label
from envfleet.cli.arguments import value_of
from envfleet.cli.command import Context, UsageError
from envfleet.cli.line_view import LineView
from envfleet.cli.live_view import LiveView
from envfleet.cli.report import Block, Report, Text, run_document, where_it_is
from envfleet.cli.terminal import can_redraw
from envfleet.cli.train_args import TrainArgs, add_train_flags, read_resume_args, read_train_args
from envfleet.errors import ConfigError, EnvConstructionFailed, SlotQuarantined
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train import train
from envfleet.learn.train_options import TrainOptions
from envfleet.runs.callbacks import RunCallback, RunOutcome
from envfleet.runs.folder import free_folder
from envfleet.runs.record import INCIDENTS, INCIDENTS_FILE

_EPILOG = """\
examples:
  envfleet train --env CartPole-v1 --n-envs 8
  envfleet train --env Pendulum-v1 --total-steps 2e5 --checkpoint-dir runs/p
  envfleet train --env my_envs.py:Maze --env-kwargs '{"size": 9}'
  envfleet train --env pettingzoo.classic.connect_four_v3:env
  envfleet train --env mpe2.simple_tag_v3:parallel_env --policies per-group
  envfleet train --config run.yaml --seed 7
  envfleet train --resume runs/p
  envfleet train --resume runs/p --total-steps 4e5 --backend serial

The defaults are plain PPO's. Environments with a known recipe start from it, and it is printed; a
file overrides the recipe, flags override both. A PettingZoo environment is recognised: its agents
learn by self-play, or as a team if they act at the same time. With --resume only those flags can be
given that do not change what the run learns (where it runs, what it saves and shows), and a new
length. Ctrl-C or SIGTERM finishes the iteration, or cuts an evaluation off, saves and ends; twice
ends at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``train``."""
    parser.description = "Train a policy by PPO on a fleet of environments."
    parser.usage = "envfleet train ENV [option ...]\n       envfleet train --resume RUN"
    parser.epilog = _EPILOG
    what = parser.add_mutually_exclusive_group()
    text = "a Gymnasium id, module:Class, module:function, file.py:Class or module:Id"
    what.add_argument("env", metavar="ENV", nargs="?", default=argparse.SUPPRESS, help=text)
    what.add_argument("--env", metavar="ENV", default=argparse.SUPPRESS, help="the same as a flag")
    what.add_argument(
        "--resume", metavar="RUN", type=value_of(Path), help="go on with the run in this folder"
    )
    parser.add_argument(
        "--live-verdict",
        action="store_true",
        help="say while training, too, what takes the time and what could be done about it",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --resume: open the states of environments in checkpoints that you did not write "
        "on this machine; they are pickles, which can run any code",
    )
    add_train_flags(parser)


def run(args: argparse.Namespace, context: Context) -> Report:
    """Train, or go on training."""
    is_resumed = args.resume is not None
    if args.trust and not is_resumed:
        raise UsageError("--trust goes with --resume: a new run has nothing to open")
    if is_resumed:
        asked, run_dir = read_resume_args(args), args.resume
    else:
        asked = read_train_args(args)
        run_dir = asked.start.checkpoint_dir or _free_folder(asked.options)
    # standard output is a script's with --json: what a person reads goes to standard error
    stream = sys.stderr if args.json else sys.stdout
    display: LiveView | LineView
    if not args.plain and can_redraw(stream):
        display = LiveView(
            stream, asked.options, asked.ppo, run_dir, shows_verdict=args.live_verdict
        )
    else:
        display = LineView(stream, asked.options, shows_verdict=args.live_verdict)
    if asked.recipe is not None:
        note = f"; {asked.recipe.note}" if asked.options.wrapper == asked.recipe.wrapper else ""
        text = f"{_recipe_text(asked.ppo)}{note if asked.recipe.note else ''}"
        display.say(f"Recipe for {label(asked.options.env)}: {text}")
    try:
        with display:
            outcome = _trained(asked, run_dir, display, is_resumed, args.trust)
    except EnvConstructionFailed as exc:  # the place where it was tried does not matter here
        kwargs = asked.options.env_kwargs
        _refuse_without_spaces(asked.options.env, exc.reason)
        raise ConfigError(
            f"{asked.options.env} cannot be built{f' with {kwargs}' if kwargs else ''}: "
            f"{exc.reason}"
        ) from exc
    except AttributeError as exc:
        _refuse_without_spaces(asked.options.env, str(exc))
        raise
    except SlotQuarantined as exc:
        raise TooManyFailures(exc, run_dir, asked.options.env) from exc
    return _train_report(outcome)


def _trained(
    asked: TrainArgs, run_dir: Path, display: RunCallback, is_resumed: bool, is_trusted: bool
) -> RunOutcome:
    how: dict[str, Any] = {"is_resumed": is_resumed, "is_trusted": is_trusted}
    if asked.agents is None:
        return train(asked.options, asked.ppo, run_dir, display, **how)
    from envfleet.multiagent.agent_train import train_agents

    return train_agents(asked.options, asked.agents, asked.ppo, run_dir, display, **how)


def _refuse_without_spaces(env: str, reason: str) -> None:
    if found := re.search(r"has no attribute '((?:observation|action)_space)'", reason):
        raise ConfigError(
            f"{env} has no {found[1]}; set observation_space and action_space in its class or its "
            "__init__: the policy is made by them"
        )


class TooManyFailures(SlotQuarantined):
    """The same error, with the files of a run instead of Python objects."""

    def __init__(self, failed: SlotQuarantined, run_dir: Path, env: str) -> None:
        super().__init__(*failed.args)
        self._run_dir, self._env = run_dir, env

    def __str__(self) -> str:
        if not (self._run_dir / INCIDENTS_FILE).exists():  # it did not get as far as a first step
            return (
                f"{label(self._env)} cannot be used: its reset failed, and so it did when it was "
                f"tried again, {self.restarts} times in all ({self.last.partition(': ')[2]}). It "
                "has to be reset(self, *, seed=None, options=None), and to return an observation "
                "that fits observation_space, and a dict"
            )
        folder = self._run_dir / INCIDENTS
        first = min(folder.glob("*.incident"), default=folder / "FILE")
        return (
            f"{self.what_happened}. All are in {self._run_dir / INCIDENTS_FILE}, "
            f"and `envfleet doctor replay {shlex.quote(str(first))}` shows the first of them in "
            "one process. If such failures are to be lived with, raise --max-restarts"
        )


def _free_folder(options: TrainOptions) -> Path:
    return free_folder(Path("runs"), f"{label(options.env)}-seed{options.seed}")


def _recipe_text(ppo: PPOOptions) -> str:
    plain = asdict(PPOOptions())
    return ", ".join(f"{key}={value}" for key, value in asdict(ppo).items() if value != plain[key])


def _train_report(outcome: RunOutcome) -> Report:
    failed = outcome.failed_evaluations
    best = (
        f"best return {outcome.best_return:g}"
        if outcome.best_return is not None
        else ("no evaluation was completed" if failed else "not evaluated")
    )
    if outcome.new_steps:
        text = (
            f"{outcome.env_steps:,} steps, {best}, {outcome.env_steps_per_second:,.0f} steps/s. "
            f"{outcome.verdict[0].upper()}{outcome.verdict[1:]}."
        )
    elif outcome.is_stopped:
        text = f"{outcome.env_steps:,} steps, {best}; its last evaluation has not been made yet."
    elif outcome.last_evaluation is not None or failed:
        text = f"{outcome.env_steps:,} steps, {best}. The evaluation that was due has been made."
    else:
        text = (
            f"There was nothing left to do: the run had made all its {outcome.env_steps:,} steps "
            f"({best}). To make it longer, give its whole length by --total-steps or "
            "--num-episodes."
        )
    blocks: list[Block] = [Text(text, "ok")]
    if failed:
        many = "1 evaluation" if failed == 1 else f"{failed} evaluations"
        blocks.append(Text(f"{many} failed: the report says why", "warn"))
    if outcome.incidents:
        many = "1 incident" if outcome.incidents == 1 else f"{outcome.incidents:,} incidents"
        blocks.append(Text(f"{many}: see {outcome.run_dir / INCIDENTS_FILE}", "warn"))
    blocks += where_it_is(outcome, "train")
    return Report(ok=True, document=run_document(outcome), blocks=tuple(blocks))
