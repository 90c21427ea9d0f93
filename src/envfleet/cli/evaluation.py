"""``envfleet eval``: play whole episodes with what a run has learned."""

from __future__ import annotations

import argparse
from pathlib import Path

from envfleet.cli.command import Context, at_least
from envfleet.cli.report import Report, Text
from envfleet.learn.evaluate import EVALUATION_SEED, evaluate
from envfleet.learn.train import env_fn, load_agent

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  envfleet eval runs/CartPole-v1-seed0
  envfleet eval runs/CartPole-v1-seed0/best.pt --episodes 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``eval``."""
    parser.description = (
        "Play whole episodes with a run's policy, likeliest actions, one environment, fixed seeds."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="a run's folder or a checkpoint in it"
    )
    parser.add_argument("--episodes", type=at_least(1), default=10, metavar="N")
    parser.add_argument(
        "--seed",
        type=int,
        default=EVALUATION_SEED,
        help="of the first episode (default: %(default)s)",
    )


def run(args: argparse.Namespace, context: Context) -> Report:
    """Evaluate."""
    options, agent = load_agent(args.run)
    found = evaluate(agent.play, env_fn(options), episodes=args.episodes, seed=args.seed)
    document = {
        "env": options.env,
        "mean_return": found.mean,
        "std_return": found.std,
        "episodes": len(found.returns),
        "returns": list(found.returns),
    }
    text = f"{options.env}: {found.mean:.2f} +- {found.std:.2f} over {len(found.returns)} episodes"
    return Report(ok=True, document=document, blocks=(Text(text, "ok"),))
