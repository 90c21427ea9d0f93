"""Workers that are no workers: hosts in the calling thread, served when somebody waits for them.

The same commands and the same shared rows as elsewhere, so results are the same, and an exception
can be debugged where it happens. A hung environment hangs the caller: deadlines need `thread` or
`process`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from envfleet.engine.backends.base import Launch, RowBinding, SharedMemory, WorkerHandle
from envfleet.engine.host import Guard
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply
from envfleet.engine.worker import BuildFailed, Worker


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
        """What was posted last."""
        status = shared_memory.control.status[launch.worker]
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
        """Keep it until somebody waits."""
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
            self._worker.idle()  # no sooner: until now the environments were their caller's too
            self._done.append(self._worker.handle_here(command))
            self._commands.popleft()
        except BaseException as exc:  # Ctrl-C: the command is over all the same
            with uninterrupted:
                if len(self._done) == num_before:  # who knows how far they got
                    slots = command.slots or range(self.first, self.first + self.count)
                    failures = [EnvFailure.of(slot, command.op.phrase, exc) for slot in slots]
                    self._done.append(Reply(failures=failures))
                if self._commands and self._commands[0] is command:
                    self._commands.popleft()
            raise

    def take(self) -> list[Reply | None]:
        """What has been served."""
        done, self._done = self._done, []
        return done

    def take_back(self) -> None:
        """What was done last, about which there was nothing to say, has not been taken."""
        if not self._done:
            self._done.append(None)

    @property
    def has_replies(self) -> bool:
        """Whether there is anything to say about what has been served."""
        return any(reply is not None for reply in self._done)

    def exit_code(self) -> int | None:
        """It cannot end."""
        return None

    def stack(self) -> str:
        """It is the caller's own."""
        return "in the calling thread"

    def stop(self) -> None:
        """Nothing to end; let go of the rows."""
        self._commands.clear()
        self.__dict__.pop("_worker", None)
        self.__dict__.pop("_control", None)


class SerialFastPath:
    """Plain steps are served while somebody collects them."""

    def __init__(self, num_workers: int) -> None:
        self._handles: dict[int, SerialHandle] = {}
        self.under_way = bytearray(num_workers)

    def add(self, handle: SerialHandle) -> None:
        """One more worker, or the successor of one."""
        self._handles[handle.worker] = handle

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Keep it until somebody collects."""
        try:
            for worker in workers:
                self.under_way[worker] = 1
                self._handles[worker].post(Command(request, Op.STEP, page=page))
        except BaseException:  # a signal's handler: all of it is posted, or nothing
            with uninterrupted:
                for worker in workers:
                    self._handles[worker].withdraw(request)
                    self.under_way[worker] = 0
            raise

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Serve one worker after another."""
        done = self.serve(workers, min_slots, limit_s)
        if done is None:
            return None
        self.take(done)
        return tuple(handle.worker for handle in done)

    def serve(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> list[SerialHandle] | None:
        """Let workers do what is under way; what one does takes as long as it takes.

        Returns those that are done, until they are taken; None as `collect` does.
        """
        done: list[SerialHandle] = []
        give_up_s = time.perf_counter() + limit_s
        for worker in workers:
            handle = self._handles[worker]
            if self.under_way[worker] and min_slots > 0:
                if done and time.perf_counter() >= give_up_s:
                    return None
                if handle.has_work:
                    handle.serve()
                if handle.has_replies:
                    return None
                done.append(handle)
                min_slots -= handle.count
        return done

    def take(self, done: Sequence[SerialHandle]) -> None:
        """What these have done is no longer under way."""
        try:
            for handle in done:
                handle.take()
                self.under_way[handle.worker] = 0
        except BaseException:  # a signal's handler: all of it is taken, or nothing
            with uninterrupted:
                for handle in done:
                    handle.take_back()
                    self.under_way[handle.worker] = 1
            raise

    def request_of(self, worker: int) -> int:
        """The identity of what this worker has under way."""
        return self._handles[worker].last.request

    def page_of(self, worker: int) -> int:
        """Where what this worker has under way is put as well."""
        return self._handles[worker].last.page

    def can_resume(self, workers: tuple[int, ...]) -> bool:
        """Whether nothing of it has been done."""
        return all(self._handles[worker].has_work for worker in workers)

    def resume(self, workers: tuple[int, ...]) -> bool:
        """Nothing is done before somebody collects."""
        if not self.can_resume(workers):
            return False
        for worker in workers:
            self.under_way[worker] = 1
        return True


class SerialBackend:
    """Everything in the calling thread."""

    def __init__(self, shared_memory: SharedMemory, num_workers: int) -> None:
        self._shared_memory = shared_memory
        self.fast_path = SerialFastPath(num_workers)

    def launch(self, launch: Launch) -> SerialHandle:
        """Build the environments here and now."""
        handle = SerialHandle(launch, self._shared_memory)
        self.fast_path.add(handle)
        return handle

    def wait(
        self, pending: Sequence[WorkerHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Serve one command of the first worker that has any."""
        handles = [handle for handle in pending if isinstance(handle, SerialHandle)]
        for handle in handles:
            if handle.has_work:
                handle.serve()
                return

    def close(self) -> None:
        """Holds nothing."""
