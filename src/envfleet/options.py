"""One way to declare, check and describe options, for every part of the package.

    @option_class
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Deadlines:
        step_s: Seconds | None = None

The annotation says what a value may be, the docstring below the field what it means. A value that
does not fit is a `ConfigError` with the option's name, what it must be, and what it was. Nothing is
asked of annotations that are made of other types than those of `describe`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import math
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from envfleet.errors import ConfigError, did_you_mean

__all__ = [
    "Count",
    "CountOrZero",
    "Must",
    "NotNegative",
    "Option",
    "Positive",
    "Seconds",
    "SecondsOrZero",
    "Seed",
    "Share",
    "check",
    "check_fields",
    "describe",
    "docstrings",
    "from_mapping",
    "literal_of",
    "option_class",
    "options_of",
    "read",
]

T = TypeVar("T")
Test = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Must:
    """What a value of an `Annotated` type must be: the words for it, and the test."""

    be: str
    test: Test
    or_none: str = ""
    """What None means where it is allowed, as the end of "or None"."""


_WAITS = " to wait for ever"
Count = Annotated[int, Must("a whole number of at least 1", lambda number: number >= 1)]
CountOrZero = Annotated[int, Must("a whole number, 0 or more", lambda number: number >= 0)]
Seed = Annotated[int, Must("a whole number from 0 to 2**63 - 1", lambda seed: 0 <= seed < 1 << 63)]
"""What the generators of numpy, PyTorch and environments all take."""
Seconds = Annotated[float, Must("positive seconds", lambda number: number > 0, _WAITS)]
SecondsOrZero = Annotated[float, Must("seconds, 0 or more", lambda number: number >= 0, _WAITS)]
Share = Annotated[float, Must("a number from 0 to 1", lambda number: 0 <= number <= 1)]
Positive = Annotated[float, Must("a finite number above 0", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Must("a finite number, 0 or more", lambda x: 0 <= x < math.inf)]


def literal_of(*choices: Any) -> Any:
    """The kind of a value that is one of these: a Literal whose choices are known at run time."""
    return Literal.__getitem__(choices)


# ---- checking -----------------------------------------------------------------------------------


def check(name: str, value: object, kind: Any) -> Any:
    """Return `value` if it is of this kind (a type annotation).

    Raises:
        ConfigError: It is not.
    """
    if not _test_of(kind)(value):
        raise ConfigError(f"{name} {_complaint(kind, value)}")
    return value


def check_fields(options: Any) -> None:
    """Check every field of a dataclass that differs from its default.

    Raises:
        ConfigError: A field holds a value of another kind.
    """
    for option in options_of(type(options)):
        value = getattr(options, option.name)
        if value is not option.default:
            check(option.name, value, option.kind)


def option_class(kind: type[T]) -> type[T]:
    """Let a dataclass check the values it is made with, and refuse names that it does not have.

    The checks come before the class's own ``__post_init__``, and a list for a tuple becomes one.
    """
    made: Any = kind.__init__
    order = [field.name for field in fields(kind) if field.init and not field.kw_only]  # type: ignore[arg-type]

    @functools.wraps(made)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        given = _checked_values(kind, {**dict(zip(order, args, strict=False)), **kwargs})
        made(self, *args[len(order) :], **given)

    setattr(kind, "__init__", checked)  # noqa: B010 - mypy would refuse the assignment
    return kind


def from_mapping(kind: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Options with the values of a mapping; errors name them by their path.

    Raises:
        ConfigError: A name does not exist, or a value does not fit.
    """
    return kind(**_checked_values(kind, values, path))


def _checked_values(kind: type[Any], values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Named values, each checked by the field of its name; lists for tuples are tuples."""
    known = {option.name: option.kind for option in options_of(kind)}
    found = {}
    for name, value in values.items():
        if name not in known:
            nearest = did_you_mean(str(name), known) or f"; it has {', '.join(known)}"
            raise ConfigError(f"{path or kind.__name__} has no option {name!r}{nearest}")
        check(f"{path}.{name}" if path else name, value, known[name])
        is_list = get_origin(_base(known[name])) is tuple and value is not None
        found[name] = tuple(value) if is_list else value
    return found


_PLAIN: dict[Any, tuple[str, Test]] = {
    bool: ("true or false", lambda value: isinstance(value, bool | np.bool_)),
    int: ("a whole number", lambda value: _is_whole(value)),
    float: ("a finite number", lambda value: _is_real(value) and _is_finite(value)),
    str: ("text", lambda value: isinstance(value, str)),
    Path: ("a path", lambda value: isinstance(value, Path)),
    types.NoneType: ("None", lambda value: value is None),
}
_MANY = {bool: "truths", int: "whole numbers", float: "finite numbers", str: "texts"}


@functools.cache
def _test_of(kind: Any) -> Test:
    """Whether a value is of this kind; cached, because some checks run at every step."""
    if kind in _PLAIN:
        return _PLAIN[kind][1]
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        of_type: Test = _is_real if inner[0] is float else _test_of(inner[0])
        (must,) = (one for one in inner[1:] if isinstance(one, Must))
        return lambda value: of_type(value) and must.test(value)
    if origin in (Union, types.UnionType):
        first, *others = (_test_of(one) for one in inner)
        return lambda value: first(value) or any(test(value) for test in others)
    if origin is Literal:
        return lambda value: isinstance(value, str | int) and value in inner
    if origin is Callable:
        return callable
    if _is_a(origin, Mapping):
        of_values = _test_of_all(inner[1:])
        return lambda value: isinstance(value, Mapping) and of_values(value.values())
    if _is_a(origin, Sequence):
        of_items = _test_of_all(inner)
        return lambda value: _is_list(value) and of_items(value)
    return lambda value: True


def _test_of_all(inner: tuple[Any, ...]) -> Test:
    """Whether all items are of the one kind that the annotation names."""
    kinds = {one for one in inner if one is not ...}
    if len(kinds) != 1 or _base(next(iter(kinds))) not in _PLAIN:
        return lambda values: True
    test = _test_of(kinds.pop())
    return lambda values: all(map(test, values))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_a(origin: Any, kind: type[Any]) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not _is_bool(value))


def _is_real(value: Any) -> bool:
    return type(value) is float or (isinstance(value, Real) and not _is_bool(value))


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number larger than every float
        return False


# ---- describing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One field of an option class."""

    name: str
    kind: Any
    """Its annotation."""
    default: Any
    help: str

    @property
    def base(self) -> Any:
        """Its type, without None and without bounds."""
        return _base(self.kind)


def options_of(kind: type[Any]) -> tuple[Option, ...]:
    """The options that a dataclass declares."""
    key: Any = kind  # for mypy, to which a class is not hashable
    return _declared(key)


@functools.cache
def _declared(kind: Any) -> tuple[Option, ...]:
    try:
        hints = get_type_hints(kind, include_extras=True)
    except Exception:  # names that exist for type checkers only: nothing can be asked
        hints = {}
    helps = docstrings(kind)
    found = []
    for field in fields(kind):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        hint = hints.get(field.name, Any)
        found.append(Option(field.name, hint, default, helps.get(field.name, "")))
    return tuple(found)


def docstrings(kind: type[Any]) -> dict[str, str]:
    """The docstrings below a class's fields, which Python itself does not keep."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        (body,) = (node.body for node in parsed.body if isinstance(node, ast.ClassDef))
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}  # no source, or none that can be read apart: help shows defaults only
    found = {}
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def describe(kind: Any, shown: Callable[[Any], str] = repr) -> str:
    """What a value of this kind is, in words; `shown` writes the choices, if there are any."""
    if kind in _PLAIN:
        return _PLAIN[kind][0]
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return next(one.be for one in inner[1:] if isinstance(one, Must))
    if origin in (Union, types.UnionType):
        kinds = [one for one in inner if one is not type(None)]
        words = " or ".join(dict.fromkeys(describe(one, shown) for one in kinds))
        if len(kinds) == len(inner):
            return words
        musts = [one for kind in kinds for one in get_args(kind)[1:] if isinstance(one, Must)]
        return f"{words}, or None{musts[0].or_none if musts else ''}"
    if origin is Literal:
        return f"one of {', '.join(map(shown, inner))}"
    if origin is Callable:
        return "a function"
    if _is_a(origin, Mapping):
        return f"a mapping{_described_items(inner[1:])}"
    if _is_a(origin, Sequence):
        return f"a list{_described_items(inner)}"
    return getattr(kind, "__name__", str(kind))


def _described_items(inner: tuple[Any, ...]) -> str:
    if not inner or _base(inner[0]) not in _MANY:
        return ""
    one, many = _PLAIN[_base(inner[0])][0], _MANY[_base(inner[0])]
    return f" of {describe(inner[0]).replace(one, many)}"


def _complaint(kind: Any, value: Any, shown: Callable[[Any], str] = repr) -> str:
    words = describe(kind, shown)
    is_to_be_read = shown is str  # else text is not split into numbers
    if is_to_be_read and isinstance(value, str) and get_origin(_base(kind)) in _WRITTEN:
        words = _WRITTEN[get_origin(_base(kind))]
    is_list = words.startswith("one of ") or ", or None" in words
    return f"must be {words}{';' if is_list else ','} got {shown(value):.100}"


@functools.cache
def _base(kind: Any) -> Any:
    """A kind without None and without bounds."""
    if get_origin(kind) in (Union, types.UnionType):
        return _base(next(one for one in get_args(kind) if one is not type(None)))
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


# ---- reading text -------------------------------------------------------------------------------


def read(value: Any, kind: Any) -> Any:
    """A value of this kind from text, or from what a file holds.

    Raises:
        ValueError: It does not fit; the text is the second half of a sentence.
    """
    may_be_none = type(None) in get_args(kind)
    if may_be_none and (value is None or str(value).lower() == "none"):
        return None
    base = _base(kind)
    try:
        found = _READERS.get(get_origin(base) or base, _as_is)(value)
        if _test_of(kind)(found):
            return found
    except (ValueError, TypeError, OverflowError):
        pass
    raise ValueError(_complaint(kind, value, shown=str))


def _as_is(value: Any) -> Any:
    return value


def _whole(value: Any) -> int:
    """A whole number, also as 1e6 or 1_000_000."""
    if type(value) is int:
        return value
    number = _number(value)
    is_digits = isinstance(value, str) and value.strip().lstrip("+-").isdigit()
    if number != int(number):
        raise ValueError
    return int(value) if is_digits else int(number)


def _number(value: Any) -> float:
    # text too: YAML takes 3e-4, without a point, for a string
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise TypeError
    return Path(value).expanduser()


def _whole_numbers(value: Any) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        parts = [parts]
    return tuple(_whole(part) for part in parts if part != "")


def _mapping(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


_READERS: dict[Any, Callable[[Any], Any]] = {
    int: _whole,
    float: _number,
    Path: _path,
    tuple: _whole_numbers,
    dict: _mapping,
}
_WRITTEN = {
    tuple: "whole numbers with commas between",
    dict: "a JSON object like '{\"size\": 8}'",
}
"""How lists and mappings are written in one word of a command line."""
