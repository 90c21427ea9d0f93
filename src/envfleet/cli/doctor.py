"""``envfleet doctor``: is this machine set up to run environments in parallel, and what to change.

``envfleet doctor replay FILE`` runs an incident again in this process. Owns the order of the
checks and the summary; ``doctor_probe.py`` asks the machine and
``doctor_checks.py`` says what the answers mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from envfleet.cli import doctor_replay
from envfleet.cli.command import Context
from envfleet.cli.report import Finding, Findings, Heading, Report, Text

_EPILOG = """\
examples:
  envfleet doctor
  envfleet doctor --json
  envfleet doctor --ray-address auto
  envfleet doctor replay slot-3.incident

Each line is ok, warn (it will run, but slower or with less room) or bad (it will not run); the line
below says what to change. The exit code is 1 when anything is bad.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``doctor``."""
    parser.description = "Check this machine: cores, memory, limits, start methods, versions."
    parser.epilog = _EPILOG
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="check a Ray cluster and each of its nodes too; auto is the one of this machine",
    )
    actions = parser.add_subparsers(dest="action", metavar="[replay FILE]")
    doctor_replay.add_parser(actions)


def run(args: argparse.Namespace, context: Context) -> Report:
    """Check everything, or replay."""
    if args.action == "replay":
        return doctor_replay.run(args, context)
    from envfleet.cli.doctor_probe import CHECKS

    found: list[Finding] = []
    with ExitStack() as while_checked:
        checks = list(CHECKS)
        if args.ray_address is not None:
            from envfleet.cli.doctor_ray import ray_checks

            checks += while_checked.enter_context(ray_checks(args.ray_address))
        bar = while_checked.enter_context(context.progress.bar("doctor", len(checks)))
        for name, check in checks:
            bar.note(name)
            try:
                found.append(check())
            except Exception as exc:
                # a check that fails must not hide the others
                text = f"could not be checked: {type(exc).__name__}: {exc}"
                found.append(Finding(name, "warn", text))
            bar.advance()
    text, ok = summary(found)
    return Report(
        ok=ok,
        document={"findings": [asdict(finding) for finding in found], "summary": text},
        blocks=(
            Heading("envfleet doctor"),
            Findings(tuple(found)),
            Text(text, "ok" if ok and "warn" not in {one.level for one in found} else "warn"),
        ),
    )


def summary(found: Sequence[Finding]) -> tuple[str, bool]:
    """One sentence about all findings, and whether the machine will do."""
    bad = [one.name for one in found if one.level == "bad"]
    warn = [one.name for one in found if one.level == "warn"]
    if bad:
        return f"This will not work here until you change: {', '.join(bad)}.", False
    if warn:
        return f"This machine will do; worth a look: {', '.join(warn)}.", True
    return "This machine is ready.", True
