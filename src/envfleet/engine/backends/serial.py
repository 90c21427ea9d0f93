"""Workers that are no workers: hosts in the calling thread, served when somebody waits for them.

The same commands and the same shared rows as elsewhere, so results are the same, and an exception
can be debugged where it happens. A hung environment hangs the caller: deadlines need `thread` or
`process`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from envfleet.engine.backends import Binding, Ground, Launch, WorkerHandle
from envfleet.engine.guard import Guard
from envfleet.engine.messages import Command, EnvFacts, Failure, Op, Reply
from envfleet.engine.servant import BuildFailed, Servant


class SerialHandle:
    """One host in this thread."""

    is_dead = False
    pid: int | None = None

    def __init__(self, launch: Launch, ground: Ground) -> None:
        self.worker, self.first, self.count = launch.worker, launch.first, len(launch.env_fns)
        self.facts: list[EnvFacts] | None = None
        self.start_failure: tuple[str, Failure] | None = None
        self._control = ground.control
        self._commands: deque[Command] = deque()
        self._done: list[Reply | None] = []
        self.last = Command(0, Op.IDLE)
        """What was posted last."""
        self.served = 0
        """The identity of what was served last."""
        post = ground.control.posts[launch.worker]
        try:
            self._servant = Servant(
                launch.first,
                launch.env_fns,
                launch.autoreset,
                post,
                Guard(passes=(KeyboardInterrupt,)),
            )
        except BuildFailed as exc:
            self.start_failure = ("build", exc.failure)
        else:
            self.facts = self._servant.facts()

    def bind(self, binding: Binding) -> None:
        """Give the host its rows."""
        self._servant.bind(self._control, binding.data)

    def post(self, command: Command) -> None:
        """Keep it until somebody waits."""
        self._commands.append(command)
        self.last = command

    @property
    def has_work(self) -> bool:
        """True if `serve` has something to do."""
        return bool(self._commands)

    def serve(self) -> None:
        """Carry out the oldest command."""
        command = self._commands.popleft()
        try:
            self._servant.idle()  # no sooner: until now the environments were their caller's too
            reply = self._servant.handle(command)
        except BaseException as exc:  # Ctrl-C: the command is over all the same
            slot = self.first if command.slots is None else command.slots[0]
            self._done.append(Reply(failures=[Failure.of(slot, command.op.phrase, exc)]))
            self.served = command.request
            raise
        self._done.append(reply)
        self.served = command.request

    def take(self) -> list[Reply | None]:
        """What has been served."""
        done, self._done = self._done, []
        return done

    def note_lost(self) -> None:
        """Something was asked of it that it neither has to do nor has done: say so."""
        exc = InterruptedError("a signal's handler raised before its answer was kept")
        self._done.append(Reply(failures=[Failure.of(self.first, "answering", exc)]))

    @property
    def has_answers(self) -> bool:
        """Whether `take` has something."""
        return bool(self._done)

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
        self.__dict__.pop("_servant", None)
        self.__dict__.pop("_control", None)


class SerialLane:
    """Plain steps are served while somebody collects them."""

    def __init__(self, num_workers: int) -> None:
        self._handles: dict[int, SerialHandle] = {}
        self._requests = [0] * num_workers
        """What each was asked last."""
        self.under_way = bytearray(num_workers)

    def add(self, handle: SerialHandle) -> None:
        """One more worker, or the successor of one."""
        self._handles[handle.worker] = handle

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Keep it until somebody collects."""
        for worker in workers:
            # in this order a signal's handler may raise in between: it is then said to be lost
            self._requests[worker] = request
            self.under_way[worker] = 1
            self._handles[worker].post(Command(request, Op.STEP, page=page))

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
                elif not handle.has_answers and handle.served != self._requests[worker]:
                    handle.note_lost()  # else it was done, and its answer taken
                if handle.has_replies:
                    return None
                done.append(handle)
                min_slots -= handle.count
        return done

    def take(self, done: Sequence[SerialHandle]) -> None:
        """What these have done is no longer under way."""
        for handle in done:
            handle.take()
            self.under_way[handle.worker] = 0

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
            self._requests[worker] = self._handles[worker].last.request
            self.under_way[worker] = 1
        return True


class SerialBackend:
    """Everything in the calling thread."""

    def __init__(self, ground: Ground, num_workers: int) -> None:
        self._ground = ground
        self.lane = SerialLane(num_workers)

    def launch(self, launch: Launch) -> SerialHandle:
        """Build the environments here and now."""
        handle = SerialHandle(launch, self._ground)
        self.lane.add(handle)
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
        for handle in handles:
            if not handle.has_answers:
                handle.note_lost()

    def close(self) -> None:
        """Holds nothing."""
