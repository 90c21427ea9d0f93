"""How the values of arguments are read, and arguments that several commands share."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = [
    "add_pace_arguments",
    "add_worker_arguments",
    "at_least",
    "choice_of",
    "comma_list",
    "folder_path",
    "positive_seconds",
    "read_pace",
]

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


def choice_of(*choices: str) -> Callable[[str], str]:
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
        type=comma_list(choice_of(*methods)),
        default=tuple(name for name in ("fork", "spawn") if name in methods),
        metavar="M,...",
        help=f"how worker processes start, of {', '.join(methods)} (default: fork,spawn)",
    )


def add_pace_arguments(parser: argparse.ArgumentParser, whom: str) -> None:
    """Declare how long ``whom`` is measured; ``read_pace`` reads it."""
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


def read_pace(args: argparse.Namespace) -> tuple[int, float]:
    """How many rounds, and how many seconds each slice."""
    rounds, seconds = (3, 0.1) if args.quick else (7, 0.5)
    return args.rounds or rounds, args.seconds or seconds
