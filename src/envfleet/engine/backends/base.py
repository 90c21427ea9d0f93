"""How workers are started, woken and watched: the seam between a fleet and its places.

A backend launches workers and waits for news of them; everything else a fleet needs is asked of the
handle. `post` and `take` are in order: the n-th reply belongs to the n-th command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envfleet.engine.memory import Control, ControlPlan, Data, PagePlan, Slab
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Reply
from envfleet.engine.options import Autoreset, EnvFn


@dataclass(frozen=True, slots=True)
class Launch:
    """One worker to be started."""

    worker: int
    first: int
    env_fns: Sequence[EnvFn]
    autoreset: Autoreset


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The shared memory of a fleet, as its workers are given it."""

    slab: Slab
    plan: ControlPlan
    control: Control


@dataclass(frozen=True, slots=True)
class RowBinding:
    """The planned part of the slab: the bound views, and how another process binds its own."""

    control: Control
    data: Data
    offset: int
    length: int
    page_plan: PagePlan


class WorkerHandle(Protocol):
    """The parent's end of one worker."""

    worker: int
    first: int
    count: int
    pid: int | None
    """The worker's process, if it has one."""
    facts: list[EnvFacts] | None
    """Known once the environments are built."""
    start_failure: tuple[str, EnvFailure] | None
    """("import" | "build", what happened) if the worker could not come up."""

    @property
    def is_dead(self) -> bool:
        """True once the worker has ended without being asked to."""

    def bind(self, binding: RowBinding) -> None:
        """Give the worker its rows."""

    def post(self, command: Command) -> None:
        """Hand over a command; does not wait."""

    def take(self) -> list[Reply | None]:
        """Replies that have arrived since the last call, in the order of commands."""

    def exit_code(self) -> int | None:
        """How the worker ended, if it did and if that is known."""

    def stack(self) -> str:
        """Where the worker's code stands now, or stood when it crashed."""

    def stop(self) -> None:
        """End the worker now, whatever it does, and give up its resources. Idempotent."""


class FastPath(Protocol):
    """The shortest way for the most common work: plain steps of all slots of some workers.

    No books are kept of what is under way here, other than `under_way`, so whoever wants to do
    anything else enters it there first; to the workers it is as if it had been posted.
    """

    under_way: bytearray
    """By worker: 0 nothing. Always true, also if a signal's handler raises at any time."""

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Start a step of all their slots, onto a page; they have nothing else to do."""

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Wait until `min_slots` slots of these workers, or all that are under way, are done.

        Returns those of the workers that are done, which are then no longer under way; or None, if
        time is up or somebody has something to say: that is no plain step, it has to be entered.
        """

    def request_of(self, worker: int) -> int:
        """The identity of what this worker has under way."""

    def page_of(self, worker: int) -> int:
        """Where what this worker has under way is put as well."""

    def resume(self, workers: tuple[int, ...]) -> bool:
        """What these have been posted is under way here again, unless one has news already."""


class Backend(Protocol):
    """Starts workers and waits for news of them."""

    @property
    def fast_path(self) -> FastPath | None:
        """The shortest way, if it has one."""

    def launch(self, launch: Launch) -> WorkerHandle:
        """Start one worker; returns before its environments are built."""

    def wait(
        self, pending: Sequence[WorkerHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Wait until one of `pending` has news: a reply, a start, an end.

        With `want_all` news of one may come late while others are busy, which saves wake-ups.
        """

    def close(self) -> None:
        """Give up what the backend itself holds. Its workers have been stopped."""
