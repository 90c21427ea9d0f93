"""How the values of arguments are read, and arguments that several commands share."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


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


def folder_path(text: str) -> Path:
    """An argparse type: a path, with ~ for the user's home."""
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


def choice_of(*choices: str) -> Callable[[str], str]:
    """An argparse type: one of ``choices``, for use inside ``comma_list``."""

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not known here; choose from {', '.join(choices)}"
            )
        return text

    return parse


def add_option(
    parser: argparse.ArgumentParser,
    flag: str,
    metavar: str,
    read: Callable[[str], Any],
    text: str,
    default: Any = None,
) -> None:
    """Declare a flag whose value ``read`` reads; the help shows its default, if it has one."""
    if default is not None:
        shown = default
        if not isinstance(default, str):
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else f"{default:g}"
        text += f" (default: {shown})"
    parser.add_argument(flag, metavar=metavar, type=read, default=default, help=text)


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how many workers a check uses, and how they start."""
    add_option(
        parser, "--workers", "W,...", comma_list(at_least(1)), "numbers of workers", (1, 2, 3)
    )
    methods = multiprocessing.get_all_start_methods()
    add_option(
        parser,
        "--start-methods",
        "M,...",
        comma_list(choice_of(*methods)),
        f"how worker processes start, of {', '.join(methods)}",
        tuple(name for name in ("fork", "spawn") if name in methods),
    )


def add_pace_arguments(parser: argparse.ArgumentParser, whom: str) -> None:
    """Declare how long ``whom`` is measured; ``read_pace`` reads it."""
    add_option(
        parser,
        "--seconds",
        "S",
        positive_seconds,
        "length of one slice (default: 0.5; with --quick 0.1)",
    )
    add_option(
        parser, "--rounds", "R", at_least(1), f"slices of each {whom} (default: 7; with --quick 3)"
    )
    parser.add_argument("--quick", action="store_true", help="a rough answer in a few seconds")


def read_pace(args: argparse.Namespace) -> tuple[int, float]:
    """How many rounds, and how many seconds each slice."""
    rounds, seconds = (3, 0.1) if args.quick else (7, 0.5)
    return args.rounds or rounds, args.seconds or seconds
