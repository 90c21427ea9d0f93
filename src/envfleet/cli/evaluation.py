"""``envfleet eval``: play whole episodes with a run's policy."""

from __future__ import annotations

import argparse
import math
import shlex
from pathlib import Path
from typing import Any

from envfleet.adapters.names import label
from envfleet.cli.arguments import add_option, value_of
from envfleet.cli.command import Context, UsageError
from envfleet.cli.report import Report, Text
from envfleet.errors import EnvFailed, EnvfleetError, VideoError, WorkerDied, describe_exit
from envfleet.learn.agent_options import AGENT_JOB
from envfleet.learn.environments import env_fn
from envfleet.learn.evaluate import EVALUATION_SEED, evaluate
from envfleet.learn.load import load_agent
from envfleet.observe import video
from envfleet.options import Count, CountOrZero
from envfleet.runs.record import INCIDENTS_FILE
from envfleet.runs.run_file import job_of

_EPILOG = """\
examples:
  envfleet eval runs/CartPole-v1-seed0
  envfleet eval runs/CartPole-v1-seed0/best.pt --episodes 20 --n-envs 4
  envfleet eval runs/CartPole-v1-seed0 --video
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``eval``."""
    parser.description = (
        "Play whole episodes with a run's policy: its likeliest actions, fixed seeds, environments "
        "of their own."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "run", metavar="RUN", type=value_of(Path), help="a run's folder or a checkpoint in it"
    )
    add_option(parser, "--episodes", "N", Count, "how many", 10)
    add_option(
        parser, "--n-envs", "K", Count, "episodes played side by side, with the same returns", 1
    )
    add_option(parser, "--seed", "N", CountOrZero, "of the first episode", EVALUATION_SEED)
    parser.add_argument(
        "--video", action="store_true", help="record the first episode in the run's folder"
    )


def run(args: argparse.Namespace, context: Context) -> Report:
    """Evaluate."""
    run_dir = args.run if args.run.is_dir() else args.run.parent
    if job_of(run_dir) == AGENT_JOB:
        raise UsageError(
            f"{args.run} has several agents: `envfleet match {shlex.quote(str(args.run))} random` "
            "plays with them"
        )
    options, agent = load_agent(args.run)
    try:
        found = evaluate(
            agent.play,
            env_fn(options),
            episodes=args.episodes,
            max_steps=options.eval_max_steps,
            seed=args.seed,
            n_envs=args.n_envs,
            # an environment that failed before may take its process along, or hang
            in_worker=options.has_deadlines or (run_dir / INCIDENTS_FILE).exists(),
            start_method=options.parallel_start_method,
            step_timeout_s=options.step_timeout_s,
            reset_timeout_s=options.reset_timeout_s,
        )
    except (EnvFailed, WorkerDied) as exc:
        raise NoEpisode(label(options.env), exc) from exc
    document: dict[str, Any] = {
        "env": options.env,
        "mean_return": _in_json(found.mean),
        "std_return": _in_json(found.std),
        "episodes": len(found.returns),
        "returns": [_in_json(one) for one in found.returns],
        "lost": len(found.lost),
    }
    blocks = []
    if found.lost:
        many = "1 episode was" if len(found.lost) == 1 else f"{len(found.lost)} episodes were"
        blocks.append(Text(f"{many} lost, because the environment failed.", "warn"))
    if args.video:
        path = run_dir / "videos" / f"eval_seed{args.seed}.mp4"
        drawn = env_fn(options, render_mode="rgb_array")
        try:
            video.record(agent.play(), drawn, path, seed=args.seed)
            document["video"] = str(path)
            blocks.append(Text(f"The first episode is in {path}."))
        except VideoError as exc:  # what was played counts all the same
            document["video"] = None
            context.say(Text(f"envfleet: {exc}", "warn"))
    told = f"{found.mean:.2f} +- {found.std:.2f} over {len(found.returns)} episodes"
    text = f"{label(options.env)}: {told}"
    return Report(ok=True, document=document, blocks=(Text(text, "ok"), *blocks))


class NoEpisode(EnvfleetError):
    """No episode was completed."""

    def __init__(self, env: str, last: EnvFailed | WorkerDied) -> None:
        super().__init__(env, last)
        self.env, self.last = env, last

    def __str__(self) -> str:
        last = self.last
        how = (
            f"its process died during {last.doing} ({describe_exit(last.exitcode)})"
            if isinstance(last, WorkerDied)
            else f"it failed during {last.doing}: {last.reason}"
        )
        return f"{self.env} completed no episode; in the last one {how}"


def _in_json(number: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return number if math.isfinite(number) else None
