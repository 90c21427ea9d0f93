"""Hosts in the calling thread, which carry out their commands when the caller waits for them.

The commands and the rows are the same as elsewhere, so results are the same, and an exception can
be debugged where it happens. A hung environment hangs the caller: deadlines need `thread` or
`process`.

A part of a fleet's slots may live here while worker processes have the others (`JointFastPath`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence, Set
from typing import Any

from envfleet.engine.backends.base import Answer, Backend, Launch, RowBinding, SharedMemory
from envfleet.engine.host import Guard
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply, WorkerStatus
from envfleet.engine.worker import BuildFailed, Worker

SPIN_S = 50e-6
"""Waking this process takes as long. Elsewhere it must not spin, because its core is a worker's;
here it is one of the workers."""


class SerialHandle:
    """One host in this thread."""

    is_dead = False
    pid: int | None = None

    def __init__(self, launch: Launch, shared_memory: SharedMemory) -> None:
        self.worker, self.first, self.count = launch.worker, launch.first, len(launch.env_fns)
        self.facts: list[EnvFacts] | None = None
        self.start_failure: tuple[str, EnvFailure] | None = None
        self._control = shared_memory.control
        self._commands: deque[Command] = deque()
        self._done: list[Reply | None] = []
        self.last = Command(0, Op.IDLE)
        status = shared_memory.control.status[launch.worker]
        self._status: Sequence[int] = status
        try:
            self._worker = Worker(
                launch.first,
                launch.env_fns,
                launch.autoreset,
                status,
                Guard(passes=(KeyboardInterrupt,), has_handlers=True),
            )
        except BuildFailed as exc:
            self.start_failure = ("build", exc.failure)
        else:
            self.facts = self._worker.facts()

    def bind(self, binding: RowBinding) -> None:
        """Give the host its rows."""
        self._worker.bind(self._control, binding.data)

    def post(self, command: Command) -> None:
        """Keep it until the caller waits."""
        self._commands.append(command)
        self.last = command

    def withdraw(self, request: int) -> None:
        """Forget what was posted last, if it is this."""
        if self._commands and self._commands[-1].request == request:
            self._commands.pop()

    @property
    def has_work(self) -> bool:
        """True if `serve` has something to do."""
        return bool(self._commands)

    def serve(self) -> None:
        """Carry out the oldest command."""
        command, num_before = self._commands[0], len(self._done)
        try:
            self._worker.idle()  # not sooner: until now the caller could use the environments too
            self._done.append(self._worker.handle_here(command))
            self._commands.popleft()
        except BaseException as exc:  # Ctrl-C: the command is over all the same
            with uninterrupted:
                if len(self._done) == num_before:  # it is not known how far they got
                    slots = command.slots or range(self.first, self.first + self.count)
                    failures = [EnvFailure.of(slot, command.op.phrase, exc) for slot in slots]
                    self._done.append(Reply(failures=failures))
                if self._commands and self._commands[0] is command:
                    self._commands.popleft()
            raise

    def peek(self) -> Answer:
        """What `take` would find first."""
        if not self._done:
            return Answer.NONE
        return Answer.PLAIN if self._done[0] is None else Answer.SPECIAL

    def take(self) -> list[Reply | None]:
        """The answers to what has been carried out."""
        done, self._done = self._done, []
        return done

    def take_back(self) -> None:
        """Undo a `take` that found one plain answer."""
        self._done.append(None)

    def status(self) -> WorkerStatus:
        """What the host is doing."""
        return WorkerStatus.of_word(self._status[1])

    def exit_code(self) -> int | None:
        """It cannot end."""
        return None

    def stack(self) -> str:
        """It is the caller's own."""
        return "in the calling thread"

    def stop(self) -> None:
        """Let go of the environments and the rows."""
        self._commands.clear()
        self._status = (0, 0)
        for name in ("_worker", "_control"):
            self.__dict__.pop(name, None)


class SerialBackend(Backend[SerialHandle]):
    """Everything in the calling thread."""

    shares_memory, needs_pickle = True, False
    can_interrupt = survives_crash = has_own_clock = False

    def launch(self, launch: Launch) -> SerialHandle:
        """Build the environments here and now."""
        handle = self.handles[launch.worker] = SerialHandle(launch, self.shared_memory)
        return handle

    def wait(
        self, pending: Sequence[SerialHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Carry out one command of the first worker that has any."""
        for handle in pending:
            if handle.has_work:
                handle.serve()
                return

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Keep the steps until this process collects them."""
        try:
            for worker in workers:
                self.under_way[worker] = 1
                self.handles[worker].post(Command(request, Op.STEP, page=page))
        except BaseException:  # a signal handler raised: all of it is posted, or nothing
            with uninterrupted:
                for worker in workers:
                    self.handles[worker].withdraw(request)
                    self.under_way[worker] = 0
            raise

    def wait_for_steps(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Step the hosts of one worker after another; a step that has begun is not cut short."""
        done: list[int] = []
        give_up_s = time.perf_counter() + limit_s
        for worker in workers:
            if self.under_way[worker] and min_slots > 0:
                handle = self.handles[worker]
                if done and time.perf_counter() >= give_up_s:
                    return None
                if handle.has_work:
                    handle.serve()
                if handle.peek() is Answer.SPECIAL:
                    return None
                done.append(worker)
                min_slots -= handle.count
        return tuple(done)


class JointFastPath:
    """Plain steps where some workers run beside this process and the others are hosts in it.

    It is one `FastPath` over two backends; each knows its own workers. The workers beside begin
    first; while they step, this process steps its own.
    """

    def __init__(self, away: Backend[Any], here: Backend[Any], workers_here: Set[int]) -> None:
        self._away, self._here, self._workers_here = away, here, frozenset(workers_here)
        self.under_way = here.under_way = away.under_way
        away.spin_s = SPIN_S
        self._splits: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Start the others; what is to be done here waits for `collect`."""
        here, away = self._split(workers)
        with uninterrupted:
            self._away.post(away, request, page)
            self._here.post(here, request, page)

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Do what is to be done here, unless the others are enough; then wait for the others."""
        here, away = self._split(workers)
        give_up_s = time.perf_counter() + limit_s
        if min_slots <= self._num_slots(self._away, away):
            done_away = self._away.collect(away, min_slots, 0.0)
            if done_away is not None:
                return done_away
        done_here = self._here.wait_for_steps(here, min_slots, limit_s)
        if done_here is None:
            return None
        num_missing = max(min_slots - self._num_slots(self._here, done_here), 0)
        left_s = max(give_up_s - time.perf_counter(), 0.0)
        done_away = self._away.collect(away, num_missing, left_s)
        if done_away is None:
            return None  # those here keep what they have done until it is collected again
        self._here.take_steps(done_here)
        done = (*done_here, *done_away)
        return done if len(done) == 1 else tuple(sorted(done))

    def request_of(self, worker: int) -> int:
        """The identity of what this worker has under way."""
        return self._of(worker).request_of(worker)

    def page_of(self, worker: int) -> int:
        """The page that this worker has been told to write."""
        return self._of(worker).page_of(worker)

    def _of(self, worker: int) -> Backend[Any]:
        return self._here if worker in self._workers_here else self._away

    def _num_slots(self, backend: Backend[Any], workers: tuple[int, ...]) -> int:
        """How many slots of these workers are under way."""
        return sum([backend.handles[worker].count for worker in workers if self.under_way[worker]])

    def _split(self, workers: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The workers in this process, and the others."""
        split = self._splits.get(workers)
        if split is None:
            here = tuple(worker for worker in workers if worker in self._workers_here)
            away = tuple(worker for worker in workers if worker not in self._workers_here)
            split = self._splits[workers] = here, away
        return split
