"""What a command module offers, and what it gets from the application.

A command is a module with an ``add_arguments`` and a ``run`` function, named in ``app.COMMANDS``.
It parses nothing itself, prints nothing itself and never exits: it returns a ``Report`` or raises.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from envfleet.cli.report import Block, Report
from envfleet.observe.progress import Progress

__all__ = [
    "Command",
    "Context",
    "Help",
    "Usage",
    "add_pace_arguments",
    "add_worker_arguments",
    "at_least",
    "comma_list",
    "folder",
    "one_of",
    "pace",
    "positive_seconds",
]


T = TypeVar("T")


class Usage(Exception):
    """The user asked for something that cannot be: one sentence, exit code 2."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the application lends a command while it runs."""

    progress: Progress
    say: Callable[[Block], None]
    """Show something at once, on stderr: a warning that has to come before the work, say."""


class Command(Protocol):
    """The shape of a command module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments; ``--json`` and friends are already there."""

    def run(self, args: argparse.Namespace, context: Context) -> Report:
        """Do the work."""


class Help(argparse.HelpFormatter):
    """Wraps paragraphs like argparse, and leaves those with indented lines (examples) alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [
            paragraph.rstrip()
            if "\n  " in paragraph
            else super(Help, self)._fill_text(paragraph, width, indent)
            for paragraph in text.split("\n\n")
        ]
        return "\n\n".join(paragraphs)


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number not below ``minimum``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {number}")
        return number

    return parse


def folder(text: str) -> Path:
    """An argparse type: a path, with ~ for the home of whoever asks."""
    return Path(text).expanduser()


def positive_seconds(text: str) -> float:
    """An argparse type: a number of seconds above zero."""
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return seconds


def comma_list(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """An argparse type: several values with commas between them, each read by ``parse``."""

    def parse_all(text: str) -> tuple[T, ...]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError("needs at least one value")
        return tuple(dict.fromkeys(parse(part) for part in parts))

    return parse_all


def one_of(*choices: str) -> Callable[[str], str]:
    """An argparse type: one of ``choices``, for use inside ``comma_list``."""

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not known here; choose from {', '.join(choices)}"
            )
        return text

    return parse


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare with how many workers, started how, equality is shown."""
    parser.add_argument(
        "--workers",
        type=comma_list(at_least(1)),
        default=(1, 2, 3),
        metavar="W,...",
        help="numbers of workers (default: 1,2,3)",
    )
    methods = multiprocessing.get_all_start_methods()
    parser.add_argument(
        "--start-methods",
        type=comma_list(one_of(*methods)),
        default=tuple(name for name in ("fork", "spawn") if name in methods),
        metavar="M,...",
        help=f"how worker processes start, of {', '.join(methods)} (default: fork,spawn)",
    )


def add_pace_arguments(parser: argparse.ArgumentParser, whom: str) -> None:
    """Declare how long ``whom`` is measured; ``pace`` reads it."""
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        metavar="S",
        help="length of one slice (default: 0.5; with --quick 0.1)",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        metavar="R",
        help=f"slices of each {whom} (default: 7; with --quick 3)",
    )
    parser.add_argument("--quick", action="store_true", help="a rough answer in a few seconds")


def pace(args: argparse.Namespace) -> tuple[int, float]:
    """How many rounds, and how many seconds each slice."""
    rounds, seconds = (3, 0.1) if args.quick else (7, 0.5)
    return args.rounds or rounds, args.seconds or seconds
