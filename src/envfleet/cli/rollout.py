"""``envfleet rollout``: play text environments, with a model or a policy that needs none."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from envfleet.cli.arguments import add_option
from envfleet.cli.command import Context, UsageError
from envfleet.cli.llm_arguments import CONFIG_NAME, MODE, add_config_arguments, config_of
from envfleet.cli.report import Block, Code, Heading, Report, Table, Text
from envfleet.llm.export import as_json_line
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.manager_types import Cache
from envfleet.llm.metrics import TAG_COLUMNS, TagSummary
from envfleet.llm.policies import POLICIES, make_policy
from envfleet.llm.rollout import RolloutResult, play_rollout
from envfleet.llm.settings import read_agent_proxy
from envfleet.options import literal_of

_EPILOG = """\
examples:
  envfleet rollout --config-name bandit
  envfleet rollout --config-name frozen_lake es_manager.train.group_size=4
  envfleet rollout --config-name mine.yaml --mode val --out rollout.jsonl
  envfleet rollout --config-name mixed --policy llm
  envfleet rollout --config-name base-parallel llm.base_url=http://localhost/v1
  envfleet rollout --resume runs/mixed-seed10000

The policy plays every environment of the configuration once, for as many turns as
agent_proxy.max_turn says. The same seed gives the same rollout, wherever environments live. With
llm a language model plays, and everything is kept in a folder: see docs/llm-rollouts.md.
"""
LLM = "llm"
"""The policy that is a language model."""
_SAMPLE_TURNS = 2
_STATE_LINES, _STATE_WIDTH = 8, 88


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``rollout``."""
    parser.description = (
        "Play the text environments of a configuration with a language model or a simple policy, "
        "and show the results, where each kind was played and why."
    )
    parser.usage = "envfleet rollout [--config-name NAME] [option ...] [key=value ...]"
    parser.epilog = _EPILOG
    add_config_arguments(parser)
    parser.set_defaults(config_name=None, mode=None)  # so that `run` knows what was given
    names = (
        f"the policy: {', '.join(POLICIES)} or {LLM} (default: random; {LLM} if an option of the "
        "block llm is given)"
    )
    add_option(parser, "--policy", "NAME", literal_of(*POLICIES, LLM), names)
    out = (
        f"write every environment's rollout as JSON lines; with {LLM}, the folder of the run "
        "(default: runs/CONFIG-seedN)"
    )
    add_option(parser, "--out", "FILE", Path, out)
    resume = f"go on with the rollout in this folder, which {LLM} began"
    add_option(parser, "--resume", "RUN", Path, resume)


def run(args: argparse.Namespace, context: Context) -> Report:
    """Play one rollout."""
    if args.resume is not None:
        _refuse_with_resume(args)
    args.config_name, args.mode = args.config_name or CONFIG_NAME, args.mode or MODE
    of_llm = [change for change in args.changes if change.lstrip("+~").startswith("llm.")]
    if args.policy not in (None, LLM) and of_llm:
        raise UsageError(
            f"--policy {args.policy} asks no language model; leave out {', '.join(of_llm)}, or say "
            f"--policy {LLM}"
        )
    if args.resume is not None or args.policy == LLM or of_llm:
        # it brings the engines along, which the other policies do without
        from envfleet.cli.rollout_llm import run_llm

        return run_llm(args, context, table_of, _shortened)
    args.policy = args.policy or "random"
    config = config_of(args)
    proxy = read_agent_proxy(config)
    with ExitStack() as stack:
        out = None if args.out is None else stack.enter_context(_opened_file(args.out))
        begun_s = time.perf_counter()
        manager = stack.enter_context(EnvStateManager(config, args.mode))
        built_s = time.perf_counter() - begun_s
        tags = [tag for tag, _ in manager.settings.groups]
        policy = make_policy(args.policy, tags, proxy, _policy_seed(args.seed, manager))
        with context.progress.bar("rollout", proxy.max_turn) as bar:
            bar.note(f"{len(manager.envs)} environments")

            def on_turn(number: int, going_on: int) -> None:
                bar.note(f"{going_on} of {len(manager.envs)} environments go on")
                bar.advance()

            begun_s = time.perf_counter()
            rollout = play_rollout(manager, policy, proxy, seed=args.seed, on_turn=on_turn)
        played_s = time.perf_counter() - begun_s
        if out is not None:
            out.writelines(as_json_line(cache) + "\n" for cache in rollout.caches)
        return _rollout_report(args, manager, rollout, built_s, played_s)


def _refuse_with_resume(args: argparse.Namespace) -> None:
    """Refuse flags that would make it another rollout."""
    names = ("config_name", "mode", "seed", "policy", "out")
    fixed = [f"--{one.replace('_', '-')}" for one in names if getattr(args, one) is not None]
    if fixed:
        raise UsageError(
            f"--resume goes on with the rollout as it was, in its own folder; leave out "
            f"{', '.join(fixed)}"
        )


def _policy_seed(asked: int | None, manager: EnvStateManager) -> int:
    return asked if asked is not None else manager.settings.seed or 0


def _opened_file(path: Path) -> TextIO:
    """Open the file before anything is played, so that a wrong path fails at once."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"--out {path} cannot be written: {exc.strerror}") from exc


def _rollout_report(
    args: argparse.Namespace,
    manager: EnvStateManager,
    rollout: RolloutResult,
    built_s: float,
    played_s: float,
) -> Report:
    num_turns = sum(len(cache["history"]) - 1 for cache in rollout.caches)
    first_seed = manager.envs[0]["status"].seed
    document = {
        "config": args.config_name,
        "changes": list(args.changes),
        "mode": args.mode,
        "policy": args.policy,
        "seed": first_seed,
        "num_envs": len(manager.envs),
        "num_turns": num_turns,
        "plan": manager.plan.splitlines(),
        "tags": [asdict(one) for one in rollout.tags],
        "metrics": rollout.metrics,
        "built_s": round(built_s, 4),
        "played_s": round(played_s, 4),
        "out": None if args.out is None else str(args.out),
    }
    blocks: list[Block] = [
        Heading(
            f"{args.config_name}, {args.mode}: {len(manager.envs)} environments in groups of "
            f"{manager.group_size}, seeds from {first_seed}, played by {args.policy}"
        ),
        table_of(rollout.tags, manager.plan.splitlines()),
        Text(f"A sample, environment 0 ({rollout.caches[0]['tag']}):"),
        Code(tuple(sample_lines(rollout.caches[0]))),
        Text(
            f"{num_turns} turns in {played_s:.2f} s, after {built_s:.2f} s for building "
            f"{len(manager.envs)} environments."
        ),
    ]
    if args.out is not None:
        blocks.append(Text(f"Every environment's rollout is a line of {args.out}."))
    failed = [cache for cache in rollout.caches if "failure" in cache]
    if failed:
        first = failed[0]
        blocks.append(
            Text(
                f"{len(failed)} of {len(manager.envs)} environments failed; the first, environment "
                f"{first['env_id']}, in {first['failure']['doing']}: {first['failure']['error']}",
                "bad",
            )
        )
    return Report(ok=not failed, document=document, blocks=tuple(blocks))


def table_of(tags: Sequence[TagSummary], plan: Iterable[str]) -> Table:
    """One row per tag, and below it where its environments live."""
    return Table(
        columns=TAG_COLUMNS,
        rows=tuple(one.cells for one in tags),
        right=frozenset(TAG_COLUMNS[1:]),
        levels=tuple("bad" if one.num_failures else "info" for one in tags),
        notes=tuple(plan),
    )


def sample_lines(cache: Cache) -> list[str]:
    """The first turns of a rollout, shortened."""
    lines: list[str] = []
    for number, turn in enumerate(cache["history"][:_SAMPLE_TURNS], start=1):
        is_answered = "llm_response" in turn
        when = f"turn {number}" if is_answered else "in the end"
        lines += [f"{when}, {turn['actions_left']} actions left"]
        lines += [f"  {line}" for line in _shortened(turn["state"])]
        if is_answered:
            lines += [f"  > {line}" for line in _shortened(turn["llm_response"])]
            lines += [f"  actions {turn['actions']}, reward {turn['reward']:.3g}"]
    more = len(cache["history"]) - 1 - _SAMPLE_TURNS
    return [*lines, f"and {more} more turn{'' if more == 1 else 's'}"] if more > 0 else lines


def _shortened(text: str) -> list[str]:
    """A text of any length as a few lines that fit, without control characters."""
    begin = text[: _STATE_LINES * _STATE_WIDTH * 2]
    plain = "".join(one if one == "\n" or one.isprintable() else " " for one in begin)
    lines = [
        line.rstrip()
        for part in plain.split("\n")
        for line in textwrap.wrap(part, _STATE_WIDTH, drop_whitespace=False) or [""]
    ]
    return lines if len(lines) <= _STATE_LINES else [*lines[:_STATE_LINES], "..."]
