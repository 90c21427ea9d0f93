"""run.json: which run it is, what was asked for, on what it depends, and how to make it again.

Law: what is read has been checked, so that a file which was damaged, edited or written by another
program gives one `CheckpointError` and nothing else.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from envfleet.adapters.names import look_also_in
from envfleet.errors import CheckpointError, ConfigError
from envfleet.observe.jsonl import rewrite
from envfleet.observe.report import OptionValue
from envfleet.runs.job import JobKind, Options

RUN_FILE = "run.json"

# names in run.json that several functions use
JOB = "job"
IDENTITY = "identity"
"""Also in every checkpoint: which run it belongs to."""
BEGUN_IN = "begun_in"
"""The working directory of the first process: a module of the user's may lie there."""
KEPT_BY = "environments_kept_by"
"""The methods by which checkpoints keep the environments; empty if they cannot be kept."""
BEGINS_ANEW = "new_episodes"
"""In the list of resumptions: whether new episodes began, since the old ones were not kept."""
UNDER_WAY = "is_under_way"
"""Whether a process works, or ended without being able to say so."""
HAS_SAVED = "has_kept_checkpoints"
"""Whether there ever was a checkpoint: if there is none now, it was deleted."""
EARLIER = "earlier_lengths"
"""The lengths that the run had before it was made longer."""
FILMING = "is_filming"
"""Whether a video is being made, or was when the process ended."""

_AGAIN = "runs/again"
"""The folder in the command that repeats a run which was made longer."""

_REQUIRED: dict[str, type] = {
    "defaults": dict,
    "title": str,
    "iterations": int,
    "iteration_steps": int,
    "setup": dict,
    "command": str,
    "versions": dict,
    "machine": dict,
}
_OPTIONAL: dict[str, type] = {
    BEGUN_IN: str,
    KEPT_BY: list,
    UNDER_WAY: bool,
    HAS_SAVED: bool,
    FILMING: bool,
    "wandb_id": str,
    "git": dict,
}
_LISTS: dict[str, dict[str, type]] = {
    EARLIER: {"iterations": int},
    "resumed": {"env_steps": int},
}


class RunFile:
    """The run.json of one folder."""

    def __init__(self, folder: Path, kind: JobKind) -> None:
        self._folder, self._kind = folder, kind
        self.path = folder / RUN_FILE

    @property
    def exists(self) -> bool:
        """Whether there is a run in the folder."""
        return self.path.exists()

    def read(self) -> dict[str, Any]:
        """What it says.

        Raises:
            CheckpointError: It is not there, cannot be read, or is not what this version writes.
        """
        try:
            found = json.loads(self.path.read_text())
        except FileNotFoundError as exc:
            raise CheckpointError(
                str(self._folder), f"holds no run: there is no {RUN_FILE}"
            ) from exc
        except OSError as exc:
            problem = f"has a {RUN_FILE} that cannot be read: {exc.strerror}"
            raise CheckpointError(str(self._folder), problem) from exc
        except (ValueError, RecursionError) as exc:
            raise self._foreign(f"{type(exc).__name__}: {exc}") from exc
        if not isinstance(found, dict):
            raise self._foreign(f"it holds a {type(found).__name__}")
        self._check(found)
        return found

    def write(self, about: Mapping[str, Any]) -> None:
        """Replace the file."""
        rewrite(self.path, json.dumps(about, indent=2) + "\n")

    def update(self, **told: Any) -> None:
        """Change some of it."""
        self.write(self.read() | told)

    def options(self) -> dict[str, Any]:
        """The options that the run was started with or last resumed with."""
        about = self.read()
        look_also_in(about.get(BEGUN_IN))
        try:
            return {name: made(**about[name]) for name, made in self._kind.options.items()}
        except Exception as exc:  # the classes of options check as they like
            raise self._foreign(str(exc)) from exc

    def _check(self, about: dict[str, Any]) -> None:
        if about.get(JOB, self._kind.name) != self._kind.name:
            raise CheckpointError(str(self._folder), f"holds a run of another kind: {about[JOB]!r}")
        wanted = {**_REQUIRED, **dict.fromkeys(self._kind.options, dict)}
        for name, type_ in wanted.items():
            if type(about.get(name)) is not type_:
                raise self._foreign(f"{name!r} has to be a {type_.__name__}")
            if name in self._kind.options and type(about["defaults"].get(name)) is not dict:
                raise self._foreign(f"'defaults' has to have {name!r}")
        for name, type_ in _OPTIONAL.items():
            if about.get(name) is not None and type(about[name]) is not type_:
                raise self._foreign(f"{name!r} has to be a {type_.__name__}")
        if min(about["iterations"], about["iteration_steps"]) < 1:
            raise self._foreign("'iterations' and 'iteration_steps' have to be above 0")
        for name, keys in _LISTS.items():
            entries = about.get(name, [])
            for key, type_ in keys.items():
                if not isinstance(entries, list) or any(
                    not isinstance(one, dict) or type(one.get(key)) is not type_ for one in entries
                ):
                    raise self._foreign(f"{name!r} has to be a list of objects with {key!r}")
        if any(not one.keys() >= set(self._kind.lengths) for one in about.get(EARLIER, [])):
            raise self._foreign(f"{EARLIER!r} has to name the lengths")
        if not isinstance(about.get(IDENTITY), str):
            raise CheckpointError(
                str(self._folder),
                f"has a {RUN_FILE} that does not say which run it is, as earlier versions of "
                "envfleet wrote it; start another run",
            )

    def _foreign(self, why: str) -> CheckpointError:
        problem = f"has a {RUN_FILE} that this version of envfleet did not write ({why})"
        return CheckpointError(str(self._folder), problem)


def job_of(folder: Path) -> str | None:
    """The kind of the run in a folder; None if there is none that can be read."""
    try:
        found = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    job = found.get(JOB) if isinstance(found, dict) else None
    return job if isinstance(job, str) else None


def new_identity() -> str:
    """Tells a run from all others, also from those with the same options."""
    return secrets.token_hex(8)


def check_identity(identity: str, state: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another run."""
    theirs = state.get(IDENTITY)
    if theirs != identity:
        whose = "does not say of which run it is" if theirs is None else f"is of run {theirs}"
        raise ConfigError(f"it {whose}, and {RUN_FILE} is of run {identity}")


def as_json(options: Any) -> dict[str, Any]:
    """Options as they come back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    return found


def defaults_of(options: Any) -> dict[str, Any]:
    """The same options with all defaults; what has none keeps its value."""
    needed = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.default is MISSING and field.default_factory is MISSING
    }
    return as_json(type(options)(**needed))


def check_same(kind: JobKind, folder: Path, about: Mapping[str, Any], options: Options) -> None:
    """Refuse to go on with options that would make it another run."""
    asked = {name: value for one in options.values() for name, value in as_json(one).items()}
    for owner in kind.options:
        for name, value in about[owner].items():
            if name in kind.free or name in kind.lengths or asked.get(name) == value:
                continue
            raise ConfigError(
                f"{folder} holds a run with {name}={value}, which is a part of it; got "
                f"{name}={asked.get(name)}. For that start another run in another folder"
            )


def option_values(kind: JobKind, about: Mapping[str, Any]) -> dict[str, list[OptionValue]]:
    """Every option in a run.json, by the heading of its table."""
    plain = about["defaults"]
    return {
        kind.titles.get(owner, owner): [
            OptionValue(name, value, plain.get(owner, {}).get(name))
            for name, value in about[owner].items()
        ]
        for owner in kind.options
    }


def command(kind: JobKind, about: Mapping[str, Any]) -> str:
    """The line that makes the same run again, also after recipes have changed."""
    values = {name: value for owner in kind.options for name, value in about[owner].items()}
    earlier: list[dict[str, Any]] = about.get(EARLIER, [])
    values |= {name: earlier[0][name] for name in kind.lengths} if earlier else {}
    plain = {name: one for owner in kind.options for name, one in about["defaults"][owner].items()}
    needed = [name for name in values if name in _required(kind)]
    unusual = [name for name in values if name not in needed and values[name] != plain.get(name)]
    for other in kind.lengths[:-1]:  # the last one wins over the others
        if kind.lengths[-1] in unusual and other in unusual:
            unusual.remove(other)
    owners = {name: owner for owner in kind.options for name in about[owner]}

    def typed(names: Sequence[str]) -> list[str]:
        return [word for name in names for word in kind.words(owners[name], name, values[name])]

    words = [*typed(needed), *kind.flags, *typed(unusual)]
    lines = [[*kind.command, *words]]
    if earlier:
        lines[0] += ["--checkpoint-dir", _AGAIN]
        for length in [*earlier[1:], _lengths(kind, about)]:
            name = next(
                (one for one in reversed(kind.lengths) if length[one] is not None), kind.lengths[0]
            )
            said = kind.words(owners[name], name, length[name])
            lines.append([*kind.command, "--resume", _AGAIN, *said])
    return " && ".join(shlex.join(line) for line in lines)


def lengthened(
    kind: JobKind, about: Mapping[str, Any], iterations: int, made: int
) -> list[dict[str, Any]]:
    """The earlier lengths of a run that is now to have `iterations`, of which `made` are done."""
    before: list[dict[str, Any]] = about.get(EARLIER, [])
    if iterations == about["iterations"]:
        return before
    before = [*before, _lengths(kind, about) | {"iterations": about["iterations"]}]
    # a length by which no iteration was made never counted
    return [one for one in before if one["iterations"] <= min(made, iterations - 1)]


def _lengths(kind: JobKind, about: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for owner in kind.options for name, value in about[owner].items()}
    return {name: values[name] for name in kind.lengths}


def _required(kind: JobKind) -> set[str]:
    return {
        field.name
        for made in kind.options.values()
        for field in fields(made)
        if field.default is MISSING and field.default_factory is MISSING
    }
