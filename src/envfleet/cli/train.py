"""``envfleet train``: from an environment's name to a trained policy that can be resumed.

Owns the flags, the lines on the way, and Ctrl-C: once finishes the iteration and saves, twice ends
at once. What a run is lives in ``learn/train.py``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.cli.command import Context, Usage
from envfleet.cli.environments import find
from envfleet.cli.flags import add_flags, overridden, typed
from envfleet.cli.report import Report, Text
from envfleet.learn.evaluate import Evaluation
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.recipes import RECIPES, Recipe
from envfleet.learn.train import Iteration, Outcome, TrainOptions, Watcher, resumed_options, train

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  envfleet train --env CartPole-v1 --n-envs 8
  envfleet train --env Pendulum-v1 --total-steps 2e5 --checkpoint-dir runs/p
  envfleet train --resume runs/p

Environments with a known recipe start from it; any flag overrides it, and
--no-recipe leaves it out. Ctrl-C finishes the iteration, saves and ends; twice
ends at once.
"""
_ANNOUNCE_EVERY = 10
"""Iterations between the lines that are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``train``."""
    parser.description = "Train a policy by PPO on a fleet of environments."
    parser.epilog = _EPILOG
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--env", metavar="ENV", help="a Gymnasium id")
    what.add_argument(
        "--resume", metavar="DIR", type=Path, help="go on with the run in this folder"
    )
    parser.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        type=Path,
        help="the run's folder (default: runs/ENV-seedN, numbered if it is taken)",
    )
    parser.add_argument("--no-recipe", action="store_true", help="plain PPO defaults")
    add_flags(parser.add_argument_group("the run"), TrainOptions, frozenset({"env"}))
    add_flags(parser.add_argument_group("PPO"), PPOOptions, frozenset())


def run(args: argparse.Namespace, context: Context) -> Report:
    """Train, or go on training."""
    if args.resume is not None:
        others = typed(args, TrainOptions, PPOOptions)
        if others:
            raise Usage(f"--resume goes on with the run as it was; leave out {', '.join(others)}")
        options, ppo = resumed_options(args.resume)
        run_dir = args.resume
    else:
        options, ppo = _options(args)
        run_dir = args.checkpoint_dir or _free_folder(options)
    lines = _Lines(sys.stdout)
    if args.resume is None and args.env in RECIPES and not args.no_recipe:
        lines.say(f"Recipe for {args.env}: {_told(ppo)}")
    with lines.minding_interrupts():
        outcome = train(options, ppo, run_dir, lines, is_resumed=args.resume is not None)
    return _report(outcome)


def _options(args: argparse.Namespace) -> tuple[TrainOptions, PPOOptions]:
    find(args.env)  # one sentence, with the nearest name, if there is no such environment
    if args.env not in gymnasium.registry:
        raise Usage(f"train takes a registered Gymnasium id for now, got {args.env!r}")
    recipe = RECIPES.get(args.env)
    if recipe is None or args.no_recipe:
        recipe = Recipe(8, 100_000, PPOOptions())
    base = TrainOptions(args.env, n_envs=recipe.n_envs, total_steps=recipe.total_steps)
    return overridden(base, args), overridden(recipe.options, args)


def _free_folder(options: TrainOptions) -> Path:
    """A folder that no run has yet."""
    first = Path("runs") / f"{options.env.replace('/', '_')}-seed{options.seed}"
    number, folder = 2, first
    while folder.exists():
        folder = first.with_name(f"{first.name}-{number}")
        number += 1
    return folder


def _told(ppo: PPOOptions) -> str:
    plain = asdict(PPOOptions())
    return ", ".join(f"{key}={value}" for key, value in asdict(ppo).items() if value != plain[key])


def _report(outcome: Outcome) -> Report:
    document: dict[str, Any] = {
        "run_dir": str(outcome.run_dir),
        "env_steps": outcome.env_steps,
        "seconds": round(outcome.seconds, 3),
        "env_steps_per_second": round(outcome.env_steps_per_second, 1),
        "best_return": outcome.best_return,
        "verdict": outcome.verdict,
        "shares": {name: round(share, 4) for name, share in outcome.shares.items()},
        "incidents": outcome.incidents,
        "is_stopped": outcome.is_stopped,
    }
    best = (
        "not evaluated" if outcome.best_return is None else f"best return {outcome.best_return:g}"
    )
    text = (
        f"{outcome.env_steps:,} steps, {best}, {outcome.env_steps_per_second:,.0f} steps/s. "
        f"The run is in {outcome.run_dir}. {outcome.verdict[0].upper()}{outcome.verdict[1:]}."
    )
    if outcome.is_stopped:
        text += f" Go on with: envfleet train --resume {outcome.run_dir}"
    return Report(ok=True, document=document, blocks=(Text(text, "ok"),))


class _Lines(Watcher):
    """Prints what happens, a few lines at a time."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_interrupted = False
        self._num_envs = 0

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def begun(self, envs: FleetVectorEnv, start_steps: int) -> None:
        self._num_envs = envs.num_envs
        self.say(f"Using {envs.num_envs} parallel environments for training")
        self.say(f"   {envs.plan}")
        if start_steps:
            self.say(f"   Going on from {start_steps:,} steps")

    def iterated(self, iteration: Iteration) -> None:
        if iteration.number % _ANNOUNCE_EVERY and iteration.number != iteration.of:
            return
        self.say(f"Episode {iteration.number}/{iteration.of}  ({iteration.env_steps:,} steps)")
        if iteration.episodes:
            value, length = iteration.episodes[-1]
            self.say(
                f"  Reward: {value:8.2f}  |  Length: {length:5d}  |  "
                f"Mean(100): {iteration.mean_return:8.2f}"
            )
        self.say(f"  n_completed_episodes: {len(iteration.episodes)}  |  n_envs: {self._num_envs}")

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        self.say(f"Evaluation at {env_steps:,}: {evaluation.mean:.2f} +- {evaluation.std:.2f}")

    def should_stop(self) -> bool:
        return self._is_interrupted

    @contextmanager
    def minding_interrupts(self) -> Iterator[None]:
        """The first Ctrl-C asks for an end, the second one makes it."""

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True
            self.say("Finishing this iteration; press Ctrl-C again to end at once")

        before = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
