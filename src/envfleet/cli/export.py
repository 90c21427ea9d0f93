"""``envfleet export``: a rollout in the form that another program reads."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import get_args

from envfleet.cli.arguments import add_option
from envfleet.cli.command import Context, UsageError
from envfleet.cli.report import Block, Report, Text, plural
from envfleet.errors import JournalError
from envfleet.llm.export import FORMS, write_export
from envfleet.llm.export.advantages import Normalisation
from envfleet.llm.export.files import write_trace
from envfleet.llm.journal import JOURNAL_FILE, damage_told, read_header, read_journal
from envfleet.options import literal_of

_EPILOG = """\
forms:
  openai    lines of JSON with the messages of each conversation
  ragen     lines of JSON with RAGEN's caches
  rows      lines of JSON with token ids, masks, log-probs and advantages
  parquet   the same rows as a table
  datasets  the same rows as a folder for Hugging Face datasets
  trace     where the time went, for chrome://tracing and ui.perfetto.dev

examples:
  envfleet export runs/frozen_lake-1 --form openai --out chats.jsonl
  envfleet export runs/frozen_lake-1 --form parquet --out rows.parquet
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``export``."""
    parser.description = "Write a rollout in the form that another program reads."
    parser.usage = "envfleet export RUN --form FORM --out FILE [--advantage METHOD]"
    parser.epilog = _EPILOG
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a rollout")
    forms = (*FORMS, "trace")
    add_option(parser, "--form", "FORM", literal_of(*forms), f"one of {', '.join(forms)}")
    add_option(parser, "--out", "FILE", Path, "where to write it")
    methods = get_args(Normalisation)
    text = f"how advantages of rows are normalised in their group, of {', '.join(methods)}"
    add_option(parser, "--advantage", "METHOD", literal_of(*methods), text, "mean_std")


def run(args: argparse.Namespace, context: Context) -> Report:
    """Read the journal and write the file."""
    for flag in ("form", "out"):
        if getattr(args, flag) is None:
            raise UsageError(f"--{flag} is missing; see envfleet export --help")
    journal = read_journal(args.run)
    if journal.damaged:
        read_header(args.run)  # without it, the rollout cannot go on
        resume = shlex.join(["envfleet", "rollout", "--resume", str(args.run)])
        raise JournalError(
            str(args.run / JOURNAL_FILE),
            f"is damaged in {damage_told(journal.damaged)}, so that turns are missing; nothing was "
            "exported. Restore the file from a copy, or have what is lost played again, and "
            f"export then: {resume}",
        )
    trajectories = journal.trajectories
    if args.form == "trace":
        told = write_trace(trajectories, args.out)
    else:
        told = write_export(trajectories, args.form, args.out, advantage=args.advantage)
    what = "event" if args.form == "trace" else "row"
    num_told = plural(told.num_trajectories, "trajectory").replace("trajectorys", "trajectories")
    blocks: list[Block] = [Text(f"{told.path}: {plural(told.num_rows, what)} of {num_told}.", "ok")]
    if told.num_left_out:
        blocks.append(
            Text(f"{told.num_left_out} left out: masked, not over yet, or without an answer.")
        )
    if told.num_cut:
        blocks.append(
            Text(
                f"{plural(told.num_cut, 'row')} {'begins' if told.num_cut == 1 else 'begin'} in "
                "mid-conversation, because the prompt of a turn did not begin with the tokens so "
                "far: the conversation was written anew, or the context window cut it.",
                "warn",
            )
        )
    if told.num_untold:
        blocks.append(
            Text(
                f"{plural(told.num_untold, 'turn')} left out, because the engine could not report "
                "every token of the answer.",
                "warn",
            )
        )
    return Report(
        ok=True,
        document={
            "run": str(args.run),
            "form": args.form,
            "out": str(told.path),
            "num_rows": told.num_rows,
            "num_trajectories": told.num_trajectories,
            "num_left_out": told.num_left_out,
            "num_cut": told.num_cut,
            "num_untold": told.num_untold,
        },
        blocks=tuple(blocks),
    )
