"""Options as command-line flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from envfleet.cli.options import Option, options_of

__all__ = ["add_flags", "given"]


def add_flags(
    parser: argparse._ActionsContainer, kind: type[Any], without: frozenset[str] = frozenset()
) -> None:
    """One flag for each field of an option class, except those in `without`."""
    for option in options_of(kind):
        if option.name not in without:
            _add_flag(parser, option)


def given(args: argparse.Namespace, *kinds: type[Any]) -> dict[str, Any]:
    """The options of these classes that were typed, by name."""
    names = [option.name for kind in kinds for option in options_of(kind)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _add_flag(parser: argparse._ActionsContainer, option: Option) -> None:
    told = f"{_in_help(option.help)} (default: {option.shown_default})".strip()
    # SUPPRESS: what was not typed is not there, so that None can be typed
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": told.replace("%", "%%")}
    if option.kind is bool:
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    else:
        parser.add_argument(option.flag, type=_reader(option), metavar=option.metavar, **common)


def _in_help(docstring: str) -> str:
    """A docstring as a line of help: no sentence, and None as it is typed."""
    text = docstring.rstrip(".").replace("None", "none")
    return text[:1].lower() + text[1:]


def _reader(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return option.read(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None

    return read
