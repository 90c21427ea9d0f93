"""What crosses between a fleet and its workers: commands, replies, names of work."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from envfleet.engine.answers import in_words, kind_of
from envfleet.engine.infos import Info, Schema


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

    @property
    def phrase(self) -> str:
        """For sentences: "during the constructor"."""
        return {
            Op.IDLE: "idle time",
            Op.BUILD: "the constructor",
            Op.REBUILD: "a restart",
            Op.RESUME: "a restart",
            Op.SET: "set_attr",
            Op.QUEUE: "queue_reset",
        }.get(self, self.name.lower())


def place(op: Op, slot: int) -> int:
    """One word that says what a worker does and for which slot."""
    return (int(op) << 32) | (slot + 1)


def read_place(word: int) -> tuple[Op, int | None]:
    """The inverse of `place`; no slot means between slots."""
    slot = (word & 0xFFFFFFFF) - 1
    return Op(word >> 32), None if slot < 0 else slot


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
class Failure:
    """An exception in an environment, as text: the class itself might not survive the journey."""

    slot: int
    doing: str
    reason: str
    traceback: str
    kind: str

    @classmethod
    def of(cls, slot: int, doing: str, exc: BaseException) -> Failure:
        """Describe `exc`, raised while `doing` something for `slot`."""
        exc = in_words(exc)
        reason = "".join(traceback.format_exception_only(exc)).strip()
        text = "".join(traceback.format_exception(exc))
        return cls(slot, doing, reason, text, kind_of(exc))


@dataclass(slots=True)
class Reply:
    """What did not fit into shared memory; without any of this the bell alone answers."""

    failures: list[Failure] = field(default_factory=list)
    infos: dict[int, Info] = field(default_factory=dict)
    final_infos: dict[int, Info] = field(default_factory=dict)
    spills: dict[int, dict[int, Any]] = field(default_factory=dict)
    final_spills: dict[int, dict[int, Any]] = field(default_factory=dict)
    schemas: list[Schema] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    """Results of CALL and SNAPSHOT by slot."""


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
