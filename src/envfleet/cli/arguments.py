"""How the values of arguments are read, and arguments that several commands share."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from typing import Any

from envfleet.options import Count, Seconds, literal_of, read


def value_of(kind: Any) -> Callable[[str], Any]:
    """An argparse type: a value of a kind that ``envfleet.options`` can read, such as ``Count``."""

    def parse(text: str) -> Any:
        try:
            return read(text, kind)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None

    return parse


def values_of(kind: Any) -> Callable[[str], tuple[Any, ...]]:
    """An argparse type: several values of a kind, with commas between them."""

    def parse(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError("needs at least one value")
        return tuple(dict.fromkeys(map(value_of(kind), parts)))

    return parse


def add_option(
    parser: argparse.ArgumentParser,
    flag: str,
    metavar: str,
    kind: Any,
    text: str,
    default: Any = None,
) -> None:
    """Declare a flag with a value; the help shows its default, if it has one.

    A flag whose ``metavar`` ends with ``,...`` takes several values.
    """
    is_many = metavar.endswith(",...")
    if default is not None:
        text += f" (default: {','.join(map(str, default)) if is_many else default})"
    read_value = values_of(kind) if is_many else value_of(kind)
    parser.add_argument(flag, metavar=metavar, type=read_value, default=default, help=text)


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how many workers a check uses, and how they start."""
    add_option(parser, "--workers", "W,...", Count, "numbers of workers", (1, 2, 3))
    methods = multiprocessing.get_all_start_methods()
    text = f"how worker processes start, of {', '.join(methods)}"
    default = tuple(name for name in ("fork", "spawn") if name in methods)
    add_option(parser, "--start-methods", "M,...", literal_of(*methods), text, default)


def add_pace_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare how long ``what`` is measured; ``read_pace`` reads it."""
    length = "length of one slice (default: 0.5; with --quick 0.1)"
    add_option(parser, "--seconds", "S", Seconds, length)
    slices = f"slices of each {what} (default: 7; with --quick 3)"
    add_option(parser, "--rounds", "R", Count, slices)
    parser.add_argument("--quick", action="store_true", help="a rough answer in a few seconds")


def read_pace(args: argparse.Namespace) -> tuple[int, float]:
    """How many rounds, and how many seconds each slice."""
    rounds, seconds = (3, 0.1) if args.quick else (7, 0.5)
    return args.rounds or rounds, args.seconds or seconds
