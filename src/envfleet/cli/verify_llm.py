"""``envfleet verify llm``: does a configuration give one rollout, however it is played?"""

from __future__ import annotations

import argparse
from typing import Any

from envfleet.cli.arguments import add_worker_arguments
from envfleet.cli.command import Context
from envfleet.cli.llm_arguments import add_config_arguments, config_of
from envfleet.cli.report import Block, Finding, Findings, Heading, Report, Table, Text
from envfleet.llm.compare import RolloutDifference
from envfleet.llm.settings import read_settings
from envfleet.llm.variants import variants_for
from envfleet.llm.verify import VariantOutcome, Verification, verify

_EPILOG = """\
examples:
  envfleet verify llm --config-name base
  envfleet verify llm --config-name frozen_lake es_manager.train.group_size=2
  envfleet verify llm --config-name mine.yaml --workers 1,4

One seeded policy plays the same rollout in this process and in every other way: in threads, in
workers, in another order, with other random numbers and another hash order around, and with workers
that are killed. All states, actions, rewards, infos, penalties, metrics and statuses have to be
equal. The exit code is 1 when anything differs, or when an environment draws from random numbers
that a whole process shares.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verify llm``."""
    parser.description = (
        "Prove that a configuration of text environments gives one rollout wherever environments "
        "live, even if workers are killed; name the first environment, turn and field that differ."
    )
    parser.usage = "envfleet verify llm [--config-name NAME] [option ...] [key=value ...]"
    parser.epilog = _EPILOG
    add_config_arguments(parser)
    add_worker_arguments(parser)


def run(args: argparse.Namespace, context: Context) -> Report:
    """Play in every way and compare."""
    config = config_of(args)
    settings = read_settings(config, args.mode)
    seed = args.seed if args.seed is not None else settings.seed or 0
    total = len(variants_for(args.workers, args.start_methods, settings.use_multiprocessing)) + 2
    with context.progress.bar("verify llm", total) as bar:
        begun: list[str] = []

        def on_variant(name: str) -> None:
            if begun:
                bar.advance()
            begun.append(name)
            bar.note(name)

        found = verify(
            config,
            mode=args.mode,
            seed=seed,
            workers=args.workers,
            start_methods=args.start_methods,
            on_variant=on_variant,
        )
    return _llm_report(args, seed, found)


def _llm_report(args: argparse.Namespace, seed: int, found: Verification) -> Report:
    document = {
        "config": args.config_name,
        "changes": list(args.changes),
        "mode": args.mode,
        "seed": seed,
        "num_envs": found.num_envs,
        "num_turns": found.num_turns,
        "num_failures": found.num_failures,
        "digest": found.digest,
        "ways": [_llm_json(one) for one in found.outcomes],
        "global_random": found.global_random,
        "conclusion": found.conclusion,
    }
    blocks: list[Block] = [
        Heading(
            f"{args.config_name}, {args.mode}: {found.num_envs} environments, {found.num_turns} "
            f"turns, seeds from {seed}, digest {found.digest}"
        ),
        _llm_table(found),
    ]
    differing = [
        Finding(one.variant.name, "bad", one.error or str(one.difference))
        for one in found.outcomes
        if not one.is_equal
    ]
    if differing:
        blocks.append(Findings(tuple(differing[:3])))
    checks = [
        Finding("global random numbers", "ok", "not used")
        if found.global_random is None
        else Finding("global random numbers", "bad", found.global_random)
    ]
    if found.num_failures:
        text = f"{found.num_failures} of {found.num_envs} environments failed, everywhere alike"
        checks.append(Finding("failures", "warn", text))
    blocks += [Findings(tuple(checks)), Text(found.conclusion, "ok" if found.ok else "bad")]
    return Report(ok=found.ok, document=document, blocks=tuple(blocks))


def _llm_table(found: Verification) -> Table:
    return Table(
        columns=("way", "rollout", "digest", "seconds"),
        rows=tuple(
            (one.variant.name, _word(one), one.digest or "", f"{one.seconds:.2f}")
            for one in found.outcomes
        ),
        right=frozenset({"seconds"}),
        levels=tuple("info" if one.is_equal else "bad" for one in found.outcomes),
    )


def _word(one: VariantOutcome) -> str:
    if one.error is not None:
        return "FAILED"
    return "equal" if one.difference is None else "DIFFERS"


def _llm_json(one: VariantOutcome) -> dict[str, Any]:
    return {
        "way": one.variant.name,
        "use_multiprocessing": one.variant.use_multiprocessing,
        "max_workers": one.variant.max_workers,
        "start_method": one.variant.start_method,
        "equal": one.is_equal,
        "digest": one.digest,
        "seconds": round(one.seconds, 3),
        "difference": None if one.difference is None else _difference_json(one.difference),
        "error": one.error,
    }


def _difference_json(difference: RolloutDifference) -> dict[str, Any]:
    """For scripts; the values as text, because they may be anything."""
    return {
        "env_id": difference.env_id,
        "tag": difference.tag,
        "turn": difference.turn,
        "field": difference.field,
        "expected": repr(difference.expected)[:500],
        "got": repr(difference.got)[:500],
        "text": str(difference),
    }
