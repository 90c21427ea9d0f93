"""The application around the commands: arguments, streams, exit codes, and errors as one sentence.

Law: with ``--json`` stdout carries exactly one JSON document, even if environments, libraries or
worker processes print; progress, warnings and errors go to stderr. A traceback is shown only with
``--traceback``. Exit codes: 0 fine, 1 the thing checked failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, cast

from envfleet.cli.command import CommandModule, Context, UsageError
from envfleet.cli.ctrl_c import exit_on_ctrl_c
from envfleet.cli.parser import Parser
from envfleet.cli.report import Block, Report
from envfleet.cli.screen import PlainScreen, screen_on
from envfleet.cli.terminal import (
    replace_unknown_characters,
    require_rich,
    silence,
    silenced_if_closed,
)
from envfleet.errors import CheckpointError, ConfigError, MissingExtra
from envfleet.observe.progress import Progress, Silent, progress_on


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One command: its name, where it lives, and what it is for in half a line."""

    name: str
    module: str
    summary: str


COMMANDS = tuple(
    CommandEntry(name, f"envfleet.cli.{module}", summary)
    for name, module, summary in (
        ("train", "train", "train a policy by PPO, or resume a run"),
        ("eval", "evaluation", "play episodes with a run's policy"),
        ("match", "match", "let runs with several agents play each other, with Elo"),
        ("meta", "meta", "learn on many tasks, or resume such a run"),
        ("rollout", "rollout", "play text environments, by chance or with a language model"),
        ("view", "view", "read the conversations of a rollout in a browser"),
        ("export", "export", "write a rollout in the form that another program reads"),
        ("bench", "bench", "measure steps per second, side by side with others"),
        ("tune", "tune", "find the fastest setting here and print the line to paste"),
        ("doctor", "doctor", "check this machine, or replay an incident file"),
        ("verify", "verify", "prove that parallel runs equal a plain loop"),
        ("verify train", "verify_train", "prove that training repeats itself"),
        ("verify llm", "verify_llm", "prove that text rollouts repeat themselves"),
    )
)

_EXAMPLES = """\
examples:
  envfleet train --env CartPole-v1          from nothing to a policy
  envfleet bench CartPole-v1 --num-envs 64  how fast is it here?
  envfleet tune CartPole-v1 --num-envs 64   which backend, how many workers?
  envfleet verify my_package:MyEnv          the same in parallel as alone?
  envfleet rollout --config-name bandit     text environments, played by chance
  envfleet doctor                           is this machine set up well?

ENV is a Gymnasium id (CartPole-v1), a class or function (my_package.envs:MyEnv, my_env.py:MyEnv),
or an id that a module registers when it is imported (ale_py:ALE/Pong-v5).

exit codes: 0 fine, 1 the thing checked failed, 2 bad usage
"""


def version() -> str:
    """The version of envfleet."""
    from envfleet import __version__

    return __version__


def build_parser(wanted: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The argument parser with every command in it.

    Args:
        wanted: The arguments about to be parsed. Only commands named there are imported and get
            their own arguments; the others show as one line. All of them when left out.
    """
    parser = Parser(
        prog="envfleet",
        description="Run reinforcement-learning environments in parallel: train, measure, check.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"envfleet {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for entry in COMMANDS:
        command = commands.add_parser(entry.name, help=entry.summary)
        if wanted is None or entry.name in wanted:
            load_command(entry).add_arguments(command)
            add_output_arguments(command)
    return parser


def load_command(entry: CommandEntry) -> CommandModule:
    """Import a command's module."""
    try:
        with exit_on_ctrl_c():
            return cast(CommandModule, import_module(entry.module))
    except ModuleNotFoundError as exc:
        raise MissingExtra(
            f"`envfleet {entry.name}` needs {exc.name}: pip install 'envfleet[train]'"
        ) from exc


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """The options every command has."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print one JSON document on stdout and nothing else"
    )
    group.add_argument(
        "--plain", action="store_true", help="no colours, no drawing, no progress bar"
    )
    group.add_argument(
        "--traceback", action="store_true", help="show the whole traceback when something fails"
    )


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, run and show one command; returns the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed when this process began
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    given = join_command_words(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        replace_unknown_characters(stream)
    try:
        args = build_parser(given).parse_args(given)
        if not (args.json or args.plain) and (sys.stdout.isatty() or sys.stderr.isatty()):
            require_rich()
    except SystemExit as exc:  # argparse has written help or the version
        return exc.code if isinstance(exc.code, int) else 2
    except (UsageError, MissingExtra) as exc:
        print_error(str(exc))
        if "--json" in given:
            print_json(sys.stdout, failure_document(None, type(exc).__name__, str(exc)))
        return 2
    entry = next(entry for entry in COMMANDS if entry.name == args.command)
    context = Context(progress=choose_progress(args), say=say)
    with claimed_stdout(args.json) as stdout, short_warnings():
        try:
            report = load_command(entry).run(args, context)
            return show_report(stdout, entry.name, report, args)
        except KeyboardInterrupt:
            print_error("stopped")
            return 130
        # SystemExit too: an environment that calls sys.exit must not end this silently
        except (Exception, SystemExit) as exc:
            is_usage = isinstance(exc, UsageError | ConfigError | MissingExtra)
            if args.traceback:
                with silenced_if_closed(sys.stderr):
                    traceback.print_exc()
            message = one_sentence(exc)
            says_all = is_usage or isinstance(exc, CheckpointError)
            print_error(message if says_all or args.traceback else message + traceback_hint(exc))
            if args.json:
                with silenced_if_closed(stdout):
                    print_json(stdout, failure_document(entry.name, type(exc).__name__, message))
            return 2 if is_usage else 1


def join_command_words(given: list[str]) -> list[str]:
    """The arguments, with a command of two words as one."""
    first = " ".join(given[:2])
    return [first, *given[2:]] if first in {entry.name for entry in COMMANDS} else given


def show_report(stdout: TextIO, command: str, report: Report, args: argparse.Namespace) -> int:
    """Print a report the way the user asked for; returns the exit code."""
    code = 0 if report.ok else 1
    try:
        if args.json:
            head = {"command": command, "envfleet": version(), "ok": report.ok}
            print_json(stdout, head | report.document)
        else:
            screen_on(stdout, plain=args.plain).show(report.blocks)
    except OSError as exc:
        silence(stdout)
        # the reader (head, less) went away, or the terminal was closed: the work is done
        if isinstance(exc, BrokenPipeError) or exc.errno == errno.EIO:
            return code
        print_error(f"the report cannot be printed: {exc.strerror}")
        return 1 if args.json else code  # a script has nothing but the document
    return code


def failure_document(command: str | None, kind: str, message: str) -> dict[str, Any]:
    """The JSON document of a command that could not do its work."""
    return {
        "command": command,
        "envfleet": version(),
        "ok": False,
        "error": {"type": kind, "message": message},
    }


def print_json(stream: TextIO, document: dict[str, Any]) -> None:
    """Write one document as one line; NaN is refused because it is not JSON."""
    stream.write(json.dumps(document, allow_nan=False) + "\n")
    stream.flush()


def one_sentence(exc: BaseException) -> str:
    """The text of an error, with its type unless it is one of ours."""
    text = " ".join(str(exc).split())
    if isinstance(exc, UsageError | ConfigError) or type(exc).__module__.startswith("envfleet"):
        return text
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def traceback_hint(exc: BaseException) -> str:
    """How to see more, for errors whose sentence may not be enough."""
    end = "" if str(exc).rstrip().endswith((".", "!", "?")) else "."
    return f"{end} Run again with --traceback to see where."


def print_error(message: str) -> None:
    """One line on stderr."""
    with silenced_if_closed(sys.stderr):
        sys.stderr.write(f"envfleet: {message}\n")
        sys.stderr.flush()


def say(block: Block) -> None:
    """Show a block on stderr at once."""
    with silenced_if_closed(sys.stderr):
        PlainScreen(sys.stderr).show([block])


def choose_progress(args: argparse.Namespace) -> Progress:
    """Bars on a terminal, nothing for scripts."""
    if args.json or args.plain:
        return Silent()
    return progress_on(sys.stderr)


@contextmanager
def claimed_stdout(claimed: bool) -> Iterator[TextIO]:
    """Give stdout; when claimed, all other output to it goes to stderr meanwhile.

    Environments and their C libraries print to file descriptor 1, and worker processes inherit it,
    so replacing ``sys.stdout`` alone would not keep a JSON document clean.
    """
    real = sys.stdout
    if not claimed:
        yield real
        return
    real.flush()
    is_fd = False
    with suppress(OSError, ValueError):  # a captured stdout has no file descriptor
        is_fd = real.fileno() == 1
    if not is_fd:
        sys.stdout = sys.stderr
        try:
            yield real
        finally:
            sys.stdout = real
        return
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(saved, "w", encoding="utf-8", closefd=False) as clean:
            yield clean
    finally:
        with silenced_if_closed(sys.stderr):
            real.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def short_warnings() -> Iterator[None]:
    """Warnings as one line, without our file names."""

    def one_line(message: Warning | str, category: type[Warning], *_: object, **__: object) -> str:
        text = " ".join(str(message).replace("\x1b[33m", "").replace("\x1b[0m", "").split())
        return f"envfleet: warning: {text.removeprefix('WARN: ')}\n"

    original = warnings.formatwarning
    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = original
