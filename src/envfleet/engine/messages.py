"""What crosses between a fleet and its workers: commands, replies, names of work."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from envfleet.engine.infos import Info, Schema
from envfleet.errors import (
    EnvFailed,
    EnvfleetError,
    NoSuchAttribute,
    RemoteTraceback,
    SnapshotError,
)

OLD_API = "environments of the old Gym API need a wrapper, such as shimmy's GymV21CompatibilityV0"
_WANTED = {
    "2": "reset must return two values (obs, info)",
    "5": "step must return five values (obs, reward, terminated, truncated, info)",
}
_UNPACKING = re.compile(r"values to unpack \(expected ([25])(?:, got (\d+))?\)")
_OLD_RESET = re.compile(r"\breset\(\) got an unexpected keyword argument '(seed|options)'")
_SEEKERS = (
    *("gymnasium.core", "gymnasium.vector", "envfleet.engine."),
    "envfleet.multiagent.slot_envs",
)
"""Where attributes are looked up by name; a method that is found may lack things of its own."""
_UNPACKERS = ("envfleet.engine.", "gymnasium.wrappers.")
"""Where environments' answers are unpacked; an environment may unpack things of its own."""


def read_reset(answer: Any) -> tuple[Any, dict[str, Any]]:
    """The observation and the info, if these are what `reset` returned."""
    is_tuple = isinstance(answer, tuple | list)
    if is_tuple and len(answer) == 2:
        obs, info = answer
        return obs, info
    got = len(answer) if is_tuple else f"1 of type {type(answer).__name__}"
    raise TypeError(f"{_WANTED['2']}, got {got}; {OLD_API}")


def in_words(exc: BaseException) -> BaseException:
    """`exc`; if the old Gym API raised it, an error that says so, caused by it."""
    if isinstance(exc, TypeError) and _OLD_RESET.search(str(exc)):
        old = TypeError(f"{exc}; {OLD_API}")
        old.__cause__ = exc
        return old
    found = _UNPACKING.search(str(exc)) if isinstance(exc, ValueError) else None
    if found is None or not _raised_in(exc).startswith(_UNPACKERS):
        return exc
    expected, got = found.groups()
    error = TypeError(f"{_WANTED[expected]}, got {got or 'another number of them'}; {OLD_API}")
    error.__cause__ = exc
    return error


def error_type_of(exc: BaseException) -> str:
    """The name of its class; "AttributeError" only of what was looked up by name and not found."""
    if isinstance(exc, AttributeError) and not _raised_in(exc).startswith(_SEEKERS):
        return Exception.__name__
    return type(exc).__name__


def _raised_in(exc: BaseException) -> str:
    """The module that raised `exc`."""
    step = exc.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return "" if step is None else str(step.tb_frame.f_globals.get("__name__", ""))


class Op(IntEnum):
    """What a worker can be asked to do; also what it says it is doing."""

    IDLE = 0
    BUILD = 1
    STEP = 2
    RESET = 3
    REBUILD = 4
    CALL = 5
    QUEUE = 6
    SNAPSHOT = 7
    RESTORE = 8
    BIND = 9
    CLOSE = 10
    SET = 11
    RESUME = 12
    GET = 13
    APPLY = 14
    REHEARSE = 15

    @property
    def phrase(self) -> str:
        """For sentences: "during the constructor"."""
        return {
            Op.IDLE: "idle time",
            Op.BUILD: "the constructor",
            Op.REBUILD: "a restart",
            Op.RESUME: "a replay",
            Op.REHEARSE: "the trial of a replay",
            Op.SET: "set_attr",
            Op.QUEUE: "queue_reset",
        }.get(self, self.name.lower())


def status_word(op: Op, slot: int, count: int = 0) -> int:
    """One word that says what a worker does and for which slot.

    `count` tells one action of a replay from the next: each may take as long as a step may.
    """
    return ((count & 0xFFFFFF) << 40) | (int(op) << 32) | (slot + 1)


def read_status_word(word: int) -> tuple[Op, int | None]:
    """The inverse of `status_word`; no slot means between slots."""
    slot = (word & 0xFFFFFFFF) - 1
    return Op((word >> 32) & 0xFF), None if slot < 0 else slot


class WorkerStatus(NamedTuple):
    """What a worker is doing now, as far as its handle knows."""

    op: Op
    slot: int | None
    """None between slots, or if it is not known."""
    is_alive: bool = True
    replayed: int = 0
    """The number of the action in a replay: a worker that makes progress is not silent."""

    @classmethod
    def of_word(cls, word: int, *, is_alive: bool = True) -> WorkerStatus:
        """What a `status_word` says."""
        return cls(*read_status_word(word), is_alive, word >> 40)


class Command(NamedTuple):
    """One piece of work for one worker; `request` is its identity."""

    request: int
    op: Op
    slots: Sequence[int] | None = None
    """None means all slots of the worker."""
    payload: Any = None
    page: int = 0
    """Where the observations are put as well."""


@dataclass(frozen=True, slots=True)
class EnvFailure:
    """An exception in an environment, as text: the class itself might not survive the journey."""

    slot: int
    doing: str
    reason: str
    traceback: str
    kind: str

    @classmethod
    def of(cls, slot: int, doing: str, exc: BaseException) -> EnvFailure:
        """Describe `exc`, raised while `doing` something for `slot`."""
        exc = in_words(exc)
        reason = "".join(traceback.format_exception_only(exc)).strip()
        text = "".join(traceback.format_exception(exc))
        return cls(slot, doing, reason, text, error_type_of(exc))

    def as_error(self, slots: Sequence[int] = ()) -> EnvfleetError:
        """The error for the caller, with the remote traceback as its cause.

        `slots` are all that the environment fills, if they are several.
        """
        error: EnvfleetError = EnvFailed(self.slot, self.doing, self.reason, slots)
        if self.kind == "AttributeError" and self.doing.startswith(("call", "get", "set_attr")):
            error = NoSuchAttribute(self.slot, self.reason)
        elif self.kind == SnapshotError.__name__:
            error = SnapshotError(self.reason.partition(": ")[2])
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


@dataclass(slots=True)
class Reply:
    """What did not fit into shared memory; without any of this the bell alone answers."""

    failures: list[EnvFailure] = field(default_factory=list)
    infos: dict[int, Info] = field(default_factory=dict)
    final_infos: dict[int, Info] = field(default_factory=dict)
    spills: dict[int, dict[int, Any]] = field(default_factory=dict)
    final_spills: dict[int, dict[int, Any]] = field(default_factory=dict)
    schemas: list[Schema] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    """Results of CALL, GET, APPLY, SNAPSHOT and REHEARSE by slot."""


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What a worker tells about one slot's environment once it is built."""

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any
    native: bool
    together: range | None = None
    """The slots of the natively vectorised environment that this one's is a share of."""
