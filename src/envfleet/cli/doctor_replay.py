"""``envfleet doctor replay FILE``: run the environment of an incident file again.

Exceptions are replayed in this process. An environment that killed or hung its worker would do the
same to this process, so those run in a child, unless ``--in-process`` is given (for a debugger).
Law: the warning is shown before the file is read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from envfleet.cli.arguments import add_option
from envfleet.cli.command import Context, UsageError
from envfleet.cli.report import Block, Code, Heading, Report, Text, plural
from envfleet.engine.incident import Incident, ReplayResult
from envfleet.errors import ConfigError
from envfleet.options import Seconds

WARNING = (
    "warning: an incident file contains pickled code, which runs when the file is read. Replay "
    "only files from people you trust."
)
INCOMPLETE = (
    "This incident cannot be replayed as it was: its episode was too long for all of its actions "
    "to be kept, or began without a seed from a generator whose state cannot be kept (only that of "
    "numpy's PCG64 can). That it did not happen again says nothing."
)

_EPILOG = """\
examples:
  envfleet doctor replay slot-3.incident
  python -m pdb -m envfleet doctor replay slot-3.incident --in-process

The exit code is 0 when the failure happened again and 1 when it did not.
"""


def add_parser(actions: Any) -> None:
    """Declare ``replay`` below ``doctor``."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "replay",
        help="run the environment of an incident file again",
        description="Build the environment, reset it with the same seed and options, and give it "
        "the same actions. Incident files contain pickled code: replay only files you trust.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="an incident file")
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="replay deaths and hangs in this process too, where a debugger can see them",
    )
    add_option(parser, "--timeout", "S", Seconds, "how long a death or hang is waited for", 60.0)
    # the switches of doctor itself, so that `doctor replay FILE --json` works. SUPPRESS, because a
    # default here would overwrite what was given before the word replay
    for switch in ("--json", "--plain", "--traceback"):
        parser.add_argument(
            switch, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def run(args: argparse.Namespace, context: Context) -> Report:
    """Load, replay and report."""
    path: Path = args.file
    if not path.is_file():
        raise UsageError(f"there is no file {path}; incidents are written with incident.save(path)")
    context.say(Text(WARNING, "warn"))
    try:
        incident = Incident.load(path)
    except ConfigError:
        raise
    except Exception as exc:
        raise UsageError(f"{path} cannot be read: {type(exc).__name__}: {exc}") from exc
    in_process = args.in_process or incident.kind == "exception"
    if in_process:
        result = incident.replay()
        text = replay_verdict(result)
    else:
        result, text = replay_in_child(path, incident.kind, args.timeout)
    if not incident.is_complete and not result.reproduced:
        text = INCOMPLETE
    blocks: list[Block] = [Heading(f"incident: {' '.join(str(incident).split())}")]
    if result.exception:
        blocks.append(Code(tuple(result.exception.strip().splitlines())))
    blocks.append(Text(text, "ok" if result.reproduced else "warn"))
    return Report(
        ok=result.reproduced,
        document={
            "file": str(path),
            "incident": str(incident),
            "kind": incident.kind,
            "in_process": in_process,
            "reproduced": result.reproduced,
            "steps": result.steps,
            "exception": result.exception,
            "conclusion": text,
        },
        blocks=tuple(blocks),
    )


def replay_verdict(result: ReplayResult) -> str:
    """What a replay in this process showed, in one sentence."""
    steps = plural(result.steps, "step")
    lines = (result.exception or "").strip().splitlines()
    if result.reproduced:
        return f"It happened again after {steps}{f': {lines[-1]}' if lines else ''}."
    if lines:
        return f"Something else happened after {steps}: {lines[-1]}."
    return (
        f"It did not happen again: {steps} went well. The cause is not in seed and actions but in "
        "memory, time, files, or something random that the seed does not control (envfleet verify "
        "finds that)."
    )


def replay_in_child(path: Path, kind: str, timeout_s: float) -> tuple[ReplayResult, str]:
    """Replay in a process that may die or hang."""
    command = [sys.executable, "-X", "faulthandler", "-m", "envfleet.cli.doctor_replay_child"]
    child = subprocess.Popen(
        [*command, str(os.getpid()), str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)},
    )
    hung = False
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        hung = True
        # faulthandler answers SIGABRT with the stacks of all threads
        child.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            output, errors = child.communicate(timeout=5)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
    return child_verdict(kind, None if hung else child.returncode, timeout_s, output, errors)


def child_verdict(
    kind: str, exitcode: int | None, timeout_s: float, output: str, errors: str
) -> tuple[ReplayResult, str]:
    """What a replay in a child showed.

    Args:
        kind: What the incident was: "death" or "timeout".
        exitcode: How the child ended; None if it had to be stopped.
        timeout_s: How long it was waited for.
        output: Its stdout: a JSON document if it ended by itself.
        errors: Its stderr: the stacks if it died or was stopped.
    """
    last_words = errors.replace(WARNING, "").strip() or None
    if exitcode is None:
        text = f"It hung: no end after {timeout_s:g} s; where it stood is shown above."
        return ReplayResult(kind == "timeout", 0, last_words), text
    try:
        document = json.loads(output)
        result = ReplayResult(False, int(document["steps"]), document["exception"])
    except (ValueError, KeyError, TypeError):
        reproduced = kind == "death"
        again = "It happened again" if reproduced else "Something else happened"
        text = f"{again}: the process ended with {exit_words(exitcode)}."
        return ReplayResult(reproduced, 0, last_words), text
    return result, replay_verdict(result)


def exit_words(exitcode: int) -> str:
    """An exit code in words."""
    if exitcode < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
