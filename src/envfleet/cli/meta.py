"""``envfleet meta``: meta-RL from a preset or a YAML file, with runs that can be resumed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from envfleet.cli.arguments import add_option, value_of
from envfleet.cli.command import Context, UsageError
from envfleet.cli.meta_view import MetaView
from envfleet.cli.report import Report, Text, run_document, where_it_is
from envfleet.meta.config import MetaConfig, load_config, preset_names
from envfleet.meta.options import Collect
from envfleet.meta.report import FREE
from envfleet.meta.training import folder_for, resumed_config, train
from envfleet.options import Count, Seed
from envfleet.runs.callbacks import RunOutcome

_EPILOG = """\
examples:
  envfleet meta --cfg point_robot/rl2 --seed 0 --num-parallel-workers 4
  envfleet meta --cfg mine.yaml train.num_iters=500 policy.lr=1e-3
  envfleet meta --cfg point_robot/rnn --collect node --ray-address auto
  envfleet meta --resume runs/PointRobot-v0-rl2-seed0
  envfleet meta --resume runs/PointRobot-v0-rl2-seed0 train.num_iters=400

A configuration has the sections env, train, eval and policy; changes are section.key=value. The
number of workers changes no result. With --resume only that can be changed which the run does not
depend on, and, at its end, train.num_iters to make it longer.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``meta``."""
    parser.description = "Learn on many tasks, with agents that find out which one they are in."
    parser.usage = (
        "envfleet meta --cfg NAME [section.key=value ...]\n       envfleet meta --resume RUN"
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "changes", nargs="*", metavar="section.key=value", help="changes of the configuration"
    )
    names = ", ".join(preset_names())
    parser.add_argument("--cfg", metavar="NAME", help=f"a YAML file, or one of {names}")
    add_option(parser, "--seed", "N", Seed, "in place of the configuration's (which is 0, else)")
    text = "the GPU of the networks, in place of the configuration's (which is -1, the CPU, else)"
    add_option(parser, "--cuda", "N", int, text)
    text = "environments side by side, in place of the configuration's"
    add_option(parser, "--num-parallel-workers", "N", Count, text)
    add_option(parser, "--collect", "WHERE", Collect, "here, or on each node of a Ray cluster")
    address = "of the cluster: host:port, or auto; else that of RAY_ADDRESS, or a new one here"
    add_option(parser, "--ray-address", "ADDRESS", str, address)
    parser.add_argument(
        "--checkpoint-dir", metavar="DIR", type=value_of(Path), help="the folder of the run"
    )
    parser.add_argument(
        "--resume", metavar="RUN", type=value_of(Path), help="go on with the run in this folder"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --resume: open the states of environments in checkpoints that you did not write "
        "on this machine; they are pickles, which can run any code",
    )


def run(args: argparse.Namespace, context: Context) -> Report:
    """Learn, or go on learning."""
    if args.resume is None:
        if args.trust:
            raise UsageError("--trust goes with --resume: a new run has nothing to open")
        config = load_config(
            args.cfg,
            _changes(args),
            seed=args.seed,
            cuda=args.cuda,
            num_parallel_workers=args.num_parallel_workers,
        )
        run_dir = args.checkpoint_dir or folder_for(config)
    else:
        config, run_dir = _resumed(args), args.resume
    stream = sys.stderr if args.json else sys.stdout
    with MetaView(stream, config) as view:
        outcome = train(
            config, run_dir, view, is_resumed=args.resume is not None, is_trusted=args.trust
        )
    return _meta_report(outcome)


def _changes(args: argparse.Namespace) -> list[str]:
    """The changes of the configuration, those by flags included."""
    flags = {"collect": args.collect, "ray_address": args.ray_address}
    more = [f"env.{name}={value}" for name, value in flags.items() if value is not None]
    return [*args.changes, *more]


def _resumed(args: argparse.Namespace) -> MetaConfig:
    """The run's own configuration, with what may be changed."""
    for flag, value in (("--cfg", args.cfg), ("--seed", args.seed), ("--cuda", args.cuda)):
        if value is not None:
            raise UsageError(f"--resume goes on with the run as it was; leave out {flag}")
    if args.checkpoint_dir is not None:
        raise UsageError("--resume goes on in the run's own folder; leave out --checkpoint-dir")
    config = resumed_config(args.resume)
    changes = _changes(args)
    if args.num_parallel_workers is not None:
        changes.append(f"env.num_parallel_workers={args.num_parallel_workers}")
    if not changes:
        return config
    # checked as a configuration of its own, of which the changed options are taken
    asked = load_config(None, [f"env.env_name={config.env.env_name}", *changes])
    for change in changes:
        section, _, rest = change.partition("=")[0].partition(".")
        if rest not in FREE and rest != "num_iters":
            raise UsageError(f"--resume goes on with the run as it was; leave out {change}")
        value = {rest: getattr(getattr(asked, section), rest)}
        config = replace(config, **{section: replace(getattr(config, section), **value)})
    return config


def _meta_report(outcome: RunOutcome) -> Report:
    last = outcome.last_evaluation
    document = run_document(outcome) | {"metrics": {} if last is None else dict(last.figures)}
    best = "not evaluated"
    if outcome.best_return is not None:
        best = f"best return of a trial {outcome.best_return:g}"
    verdict = f" {outcome.verdict[0].upper()}{outcome.verdict[1:]}." if outcome.new_steps else ""
    text = Text(f"{outcome.env_steps:,} steps, {best}.{verdict}", "ok")
    return Report(ok=True, document=document, blocks=(text, *where_it_is(outcome, "meta")))
