"""Options of a command, declared once: as the fields of dataclasses, each with its docstring.

A field is a flag (``learning_rate`` is ``--learning-rate``) and a key of a configuration file. Its
type says how a value is read, its docstring is the help. Law: a value that cannot be read is
answered by what it must be; an option that was not given has no value, so that what was given can
lie over what was chosen before.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from envfleet.errors import did_you_mean

__all__ = ["ELSEWHERE", "Option", "docstrings", "options_of", "suggestion"]

ELSEWHERE = {
    "lr": "learning_rate",
    "timesteps": "total_steps",
    "total_timesteps": "total_steps",
    "n_timesteps": "total_steps",
    "steps": "total_steps",
    "num_envs": "n_envs",
    "num_steps": "n_steps",
    "minibatch_size": "batch_size",
    "update_epochs": "n_epochs",
    "clip_coef": "clip_range",
    "anneal_lr": "anneal_learning_rate",
    "env_id": "env",
    "normalize": "normalise_obs",
    "normalize_obs": "normalise_obs",
    "norm_obs": "normalise_obs",
    "normalize_reward": "normalise_rewards",
    "normalize_rewards": "normalise_rewards",
    "norm_reward": "normalise_rewards",
    "track": "wandb",
    "capture_video": "video",
    "eval_freq": "eval_every",
    "save_freq": "save_every",
    "n_eval_episodes": "eval_episodes",
}
"""Options by the names that Stable-Baselines3, its RL zoo and CleanRL have for them."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of an option class."""

    name: str
    kind: Any
    """The type of its values, None aside."""
    may_be_none: bool
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """As it is typed on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        """What stands for its value in help."""
        if get_origin(self.kind) is Literal:
            return "|".join(map(str, get_args(self.kind)))
        if get_origin(self.kind) is tuple:
            return "N,N"
        if get_origin(self.kind) is dict:
            return "JSON"
        names = {int: "N", float: "X", Path: "DIR"}
        return names.get(self.kind, self.name.upper().replace("_", "-"))

    @property
    def shown_default(self) -> str:
        """The default in words."""
        if self.default is None or isinstance(self.default, bool):
            return {None: "none", True: "yes", False: "no"}[self.default]
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        if isinstance(self.default, dict):
            return json.dumps(self.default)
        return f"{self.default:,}" if type(self.default) is int else str(self.default)

    def read(self, value: Any) -> Any:
        """A value of the field's type, from text or from what a file holds.

        Raises:
            ValueError: What it must be, as the second half of a sentence.
        """
        is_none = value is None or (isinstance(value, str) and value.lower() == "none")
        if is_none and self.may_be_none:
            return None
        origin = get_origin(self.kind)
        if origin is Literal:
            return _one_of(value, get_args(self.kind))
        if origin is tuple:
            return _tuple(value)
        return _READERS[origin or self.kind](value)


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """The end of a sentence about a flag or a key that does not exist: the one that was meant."""
    names, dashes = list(known), "--" if wrong.startswith("--") else ""
    meant = ELSEWHERE.get(wrong.removeprefix("--").lower().replace("-", "_"), "")
    for name in (f"{dashes}{meant}", f"{dashes}{meant.replace('_', '-')}"):
        if meant and name in names:
            return f"; did you mean {name}?"
    return did_you_mean(wrong, names)


def options_of(kind: type[Any]) -> tuple[Option, ...]:
    """The options that an option class declares."""
    hints, told = get_type_hints(kind), docstrings(kind)
    found = []
    for field in fields(kind):
        inner, may_be_none = _without_none(hints[field.name])
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        found.append(Option(field.name, inner, may_be_none, default, told.get(field.name, "")))
    return tuple(found)


def docstrings(kind: type[Any]) -> dict[str, str]:
    """The docstrings below a class's fields, which Python itself does not keep."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # shipped without its source: help has defaults only
        return {}
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    found = {}
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [one for one in get_args(hint) if one is not type(None)]
        return kinds[0], len(kinds) < len(get_args(hint))
    return hint, False


def _one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def _whole(value: Any) -> int:
    """A whole number, also as 1e6 or 1_000_000."""
    if type(value) is int:
        return value
    number = _as_number(value)
    if number is None or not math.isfinite(number) or number != int(number):
        raise ValueError(f"must be a whole number, got {value}")
    is_digits = isinstance(value, str) and value.strip().lstrip("+-").isdigit()
    return int(value) if is_digits else int(number)


def _number(value: Any) -> float:
    number = _as_number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"must be a number, got {value}")
    return number


def _as_number(value: Any) -> float | None:
    # text too: YAML takes 3e-4, without a point, for a string
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):  # the latter: a whole number of hundreds of digits
        return None


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, got {value}")
    return value


def _path(value: Any) -> Path:
    return Path(_text(value)).expanduser()


def _tuple(value: Any) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        parts = [parts]
    try:
        return tuple(_whole(part) for part in parts if part != "")
    except ValueError:
        raise ValueError(f"must be whole numbers with commas between, got {value}") from None


def _mapping(value: Any) -> dict[str, Any]:
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except json.JSONDecodeError:
            found = None
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object like '{{\"size\": 8}}', got {value}")
    return found


_READERS: dict[Any, Callable[[Any], Any]] = {
    int: _whole,
    float: _number,
    bool: _truth,
    str: _text,
    Path: _path,
    dict: _mapping,
}
