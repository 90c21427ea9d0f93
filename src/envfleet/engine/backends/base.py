"""The seam between a fleet and the places where its workers run.

A backend starts workers, asks them for plain steps and waits for their answers. Everything else is
asked of a worker's handle. A worker answers its commands in the order in which they were posted.

Backends are found by name (`register`, `backend_named`) and say what they can do. No other part of
the engine asks which class a backend is. How to add one: docs/backends.md.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.machine import usable_cores
from envfleet.engine.memory import Control, ControlPlan, Data, PagePlan, Slab
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply, WorkerStatus
from envfleet.engine.options import Autoreset, EnvFn, StartMethod
from envfleet.errors import ConfigError
from envfleet.options import check


@dataclass(frozen=True, slots=True)
class Launch:
    """One worker to be started."""

    worker: int
    first: int
    env_fns: Sequence[EnvFn]
    autoreset: Autoreset


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory of a fleet, as its backend is given it."""

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


class Answer(IntEnum):
    """What a worker has said to the oldest command that it was posted and that was not taken."""

    NONE = 0
    PLAIN = 1
    """It is done, and everything there is to know lies in the rows."""
    SPECIAL = 2
    """There is a reply to be taken."""


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

    @property
    def last(self) -> Command:
        """What was posted last."""

    def bind(self, binding: RowBinding) -> None:
        """Give the worker its rows."""

    def post(self, command: Command) -> None:
        """Hand over a command; does not wait."""

    def peek(self) -> Answer:
        """What `take` would find first."""

    def take(self) -> list[Reply | None]:
        """Replies that have arrived since the last call, in the order of commands.

        None stands for an answer that has nothing to say beyond the rows.
        """

    def take_back(self) -> None:
        """Undo a `take` that found one plain answer."""

    def status(self) -> WorkerStatus:
        """What the worker is doing, for which slot, and whether it is alive."""

    def exit_code(self) -> int | None:
        """How the worker ended, if it did and if that is known."""

    def stack(self) -> str:
        """Where the worker's code stands now, or stood when it crashed."""

    def stop(self) -> None:
        """End the worker now, in the middle of its work if need be. Idempotent.

        Gives up all that is held for the worker.
        """


class FastPath(Protocol):
    """Plain steps: all slots of some workers, with actions and results in their rows.

    The fleet records nothing else of them than `under_way`, which is part of its `Inflight`. To the
    workers it is as if each step had been posted to the handle.
    """

    under_way: bytearray
    """By worker: 0 nothing. Always true, also if a signal handler raises at any time."""

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Start a step of all slots of these workers, which have nothing else to do.

        The observations are also written onto `page`, if it is not 0.
        """

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Wait until `min_slots` slots of these workers, or all that are under way, are done.

        Returns those of the workers that are done, which are then no longer under way. Returns None
        if time is up, or if a worker has died or replied: that is no plain step any more.
        """

    def request_of(self, worker: int) -> int:
        """The identity of what this worker has under way."""

    def page_of(self, worker: int) -> int:
        """The page that this worker has been told to write."""


H = TypeVar("H", bound=WorkerHandle)


class Backend(ABC, Generic[H]):
    """Starts workers, steps them and waits for their answers.

    A subclass says what it can do and has `launch` and `wait`. The steps are those of `FastPath`,
    by means of the handles; a backend that knows a faster way overrides `post` and `collect`.
    """

    shares_memory: ClassVar[bool]
    """Workers see the rows of the fleet; else commands carry actions and replies carry rows."""
    needs_pickle: ClassVar[bool]
    """What goes to workers and comes back is pickled."""
    can_interrupt: ClassVar[bool]
    """A worker that hangs can be given up, so that deadlines can be kept."""
    survives_crash: ClassVar[bool]
    """A worker that crashes leaves this process alone."""
    has_own_clock: ClassVar[bool]
    """Workers work by themselves; else only while this process waits for them."""
    options_class: ClassVar[type | None] = None
    """What `backend_options` are for this backend, which is then given them as `options`."""

    def __init__(
        self, shared_memory: SharedMemory, num_workers: int, start_method: StartMethod
    ) -> None:
        self.shared_memory, self.num_workers = shared_memory, num_workers
        self.start_method: StartMethod = start_method
        self.handles: dict[int, H] = {}
        """By worker; `launch` adds to it."""
        self.under_way = bytearray(num_workers)
        self.spin_s = 0.0
        """How long `collect` may look again and again before it sleeps, where it can do that."""

    @abstractmethod
    def launch(self, launch: Launch) -> H:
        """Start one worker, or the successor of one; returns before its environments are built."""

    @abstractmethod
    def wait(self, pending: Sequence[H], timeout_s: float | None, *, want_all: bool) -> None:
        """Wait until one of `pending` has news: a reply, a start, an end.

        With `want_all` news of one may come late while others are busy, which saves wake-ups.

        What other workers have said is taken in as well: the first words of one that is starting
        are waited for by no one, and its fleet goes on only once `facts` are there.
        """

    @classmethod
    @contextlib.contextmanager
    def place(cls, options: Any, num_workers: int | None) -> Iterator[tuple[int, str]]:
        """For how many workers there is room, and in words, while a fleet is planned and opened.

        `num_workers` is what was asked for, if that was said.
        """
        cores = usable_cores()
        yield cores, f"{cores} cores are usable"

    def round_trip_s(self) -> float | None:
        """How long an empty command takes, where that is long enough to be told to the user."""
        return None

    def death_at_start(self, handle: H) -> Exception | None:
        """Why a worker died before it was up, if the backend knows more than its exit code says."""
        return None

    def close(self) -> None:
        """Give up what the backend itself holds. Its workers have been stopped."""

    # ---- steps ----------------------------------------------------------------------------------

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Start a step of all slots of these workers."""
        with uninterrupted:  # all of them are asked, or none
            for worker in workers:
                self.handles[worker].post(Command(request, Op.STEP, page=page))
                self.under_way[worker] = 1

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Wait until `min_slots` slots, or all that are under way, are done."""
        done = self.wait_for_steps(workers, min_slots, limit_s)
        return None if done is None else self.take_steps(done)

    def wait_for_steps(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """The first half of `collect`: the workers that are done, still under way."""
        give_up_s, has_waited = time.perf_counter() + limit_s, False
        while True:
            done: list[int] = []
            coming: list[H] = []
            num_done = num_coming = 0
            for worker in workers:
                if not self.under_way[worker]:
                    continue
                handle = self.handles[worker]
                answer = handle.peek()
                if answer is Answer.SPECIAL or handle.is_dead:
                    return None
                if answer is Answer.PLAIN:
                    done.append(worker)
                    num_done += handle.count
                else:
                    coming.append(handle)
                    num_coming += handle.count
            is_enough = num_done >= min_slots
            if not coming or (is_enough and has_waited):
                return tuple(done)
            # with enough of them too: a worker that has died must not go unnoticed
            left_s = 0.0 if is_enough else give_up_s - time.perf_counter()
            if has_waited and left_s <= 0:
                return None
            needs_all = num_done + num_coming - coming[-1].count < min_slots
            self.wait(coming, max(left_s, 0.0), want_all=needs_all and not is_enough)
            has_waited = True

    def take_steps(self, done: tuple[int, ...]) -> tuple[int, ...]:
        """The second half of `collect`: what these workers have done is no longer under way."""
        try:
            for worker in done:
                self.handles[worker].take()
                self.under_way[worker] = 0
        except BaseException:  # a signal handler raised: all of it is taken, or nothing
            with uninterrupted:
                for worker in done:
                    if self.handles[worker].peek() is Answer.NONE:
                        self.handles[worker].take_back()
                    self.under_way[worker] = 1
            raise
        return done

    def request_of(self, worker: int) -> int:
        """The identity of what this worker has under way."""
        return self.handles[worker].last.request

    def page_of(self, worker: int) -> int:
        """The page that this worker has been told to write."""
        return self.handles[worker].last.page


def made(
    kind: type[Backend[Any]],
    shared_memory: SharedMemory,
    num_workers: int,
    start_method: StartMethod,
    options: Any,
) -> Backend[Any]:
    """A backend of this kind, with its options if there are any; `check_options` has seen them."""
    own = {} if options is None else {"options": options}
    return kind(shared_memory, num_workers, start_method, **own)


def check_options(name: str, options: Any) -> None:
    """An error unless these are what the backend of this name takes."""
    wanted = backend_named(name, "auto").options_class if name != "auto" else None
    if options is not None and (wanted is None or not isinstance(options, wanted)):
        takes = f"takes {wanted.__name__}" if wanted else "takes none"
        raise ConfigError(f"backend_options: backend={name!r} {takes}, got {options!r}")


_factories: dict[str, type[Backend[Any]] | str] = {
    "serial": "envfleet.engine.backends.serial:SerialBackend",
    "thread": "envfleet.engine.backends.thread:ThreadBackend",
    "process": "envfleet.engine.backends.process.backend:ProcessBackend",
    "ray": "envfleet.engine.backends.ray.backend:RayBackend",
}


def register(name: str, factory: type[Backend[Any]] | str) -> None:
    """Make a backend known by name: its class, or "module:Class", imported when it is asked for."""
    _factories[name] = factory


def backend_named(name: object, *others: str) -> type[Backend[Any]]:
    """The class of the backend of this name; an error that lists them if there is none.

    `others` are names that the caller takes as well, for that list.
    """
    known: Any = Literal[(*others, *_factories)]
    checked: str = check("backend", name, known)
    factory = _factories[checked]
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        factory = _factories[checked] = getattr(importlib.import_module(module), attribute)
    return factory
