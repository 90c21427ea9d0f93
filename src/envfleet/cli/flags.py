"""Command-line flags from the fields of option classes, and the other way round.

A flag is named after its field (``learning_rate`` is ``--learning-rate``), is unset unless it was
typed, and is read by the field's type.
"""

from __future__ import annotations

import argparse
import math
import types
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["add_flags", "overridden", "typed"]

Options = TypeVar("Options")


def add_flags(parser: argparse._ArgumentGroup, kind: type[Any], without: frozenset[str]) -> None:
    """One flag for each field of an option class, except those in `without`."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name in without:
            continue
        flag, hint = f"--{field.name.replace('_', '-')}", _inner(hints[field.name])
        default = f"default: {_shown(field.default)}"
        if hint is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=None, help=default)
        else:
            parser.add_argument(flag, type=_reader(hint), metavar=_name(hint), help=default)


def typed(args: argparse.Namespace, *kinds: type[Any]) -> list[str]:
    """The flags of these option classes that were typed."""
    names = [field.name for kind in kinds for field in fields(kind)]
    return [
        f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None) is not None
    ]


def overridden(options: Options, args: argparse.Namespace) -> Options:
    """These options, with what was typed in the place of their own."""
    names = [field.name for field in fields(options)]  # type: ignore[arg-type]
    given = {name: getattr(args, name, None) for name in names}
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(options, **chosen)  # type: ignore[type-var]


def _inner(hint: Any) -> Any:
    """The type of a value that may also be None."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(one for one in get_args(hint) if one is not type(None))
    return hint


def _reader(hint: Any) -> Callable[[str], Any]:
    return _numbers if get_origin(hint) is tuple else _whole if hint is int else hint


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return tuple(_whole(part) for part in text.split(",") if part.strip())


def _whole(text: str) -> int:
    """A whole number, also as 1e6 or 1_000_000."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(number) or number != int(number):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text}")
    return int(text) if text.lstrip("+-").isdigit() else int(number)


def _name(hint: Any) -> str:
    return {int: "N", float: "X", str: "NAME"}.get(hint, "N,N")


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
