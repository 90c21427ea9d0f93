"""Decisions that a job takes by itself while it runs, each with its reason: an `Event`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "EventKind"]

EventKind = Literal["joined", "left", "lost", "again", "fewer", "moved", "slow"]


@dataclass(frozen=True, slots=True)
class Event:
    """One decision about where work is done."""

    kind: EventKind
    """joined: a place takes part from now on; left: it does not any more; lost: work on it was
    lost; again: that work is done elsewhere; fewer: less is started there than was asked for;
    moved: work has another place from now on; slow: a place takes much longer than the others."""
    where: str
    """The place: a node, usually."""
    why: str
    """The reason, as half a sentence."""

    def __str__(self) -> str:
        return f"{self.where} {self.kind}: {self.why}"
