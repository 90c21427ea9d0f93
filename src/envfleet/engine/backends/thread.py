"""Workers as threads of this process: for environments that wait or release the GIL.

A thread cannot be killed. One that hangs is abandoned instead: a worker holds its *gate* whenever
it is not inside an environment, and abandoning takes the gate. An abandoned thread that comes back
ends at the gate, before it can write rows that belong to its successor by then.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from envfleet.engine.backends.base import Answer, Backend, Launch, RowBinding, SharedMemory
from envfleet.engine.host import Guard
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply, WorkerStatus
from envfleet.engine.options import StartMethod
from envfleet.engine.worker import BuildFailed, Worker

_LONGEST_WAIT_S = 1e6
"""Longer ones may be more than the system counts; after eleven days nothing is in a hurry."""


class _Abandoned(BaseException):
    """Unwinds a thread that came back too late."""


class ThreadHandle:
    """One host in a thread of its own."""

    pid: int | None = None

    def __init__(
        self, launch: Launch, shared_memory: SharedMemory, news: queue.SimpleQueue[ThreadHandle]
    ) -> None:
        self.worker, self.first, self.count = launch.worker, launch.first, len(launch.env_fns)
        self.facts: list[EnvFacts] | None = None
        self.start_failure: tuple[str, EnvFailure] | None = None
        self._launch, self._control, self._news = launch, shared_memory.control, news
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._done: deque[Reply | None] = deque()
        self._status: Sequence[int] = shared_memory.control.status[launch.worker]
        self.last = Command(0, Op.IDLE)
        self._gate = threading.Lock()
        self._is_abandoned = False
        self.is_dead = False
        name = f"envfleet-worker-{launch.worker}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def bind(self, binding: RowBinding) -> None:
        """Give the host its rows."""
        self._commands.put(Command(0, Op.BIND, payload=binding))

    def post(self, command: Command) -> None:
        """Hand it over."""
        self.last = command
        self._commands.put(command)

    def peek(self) -> Answer:
        """What `take` would find first."""
        if not self._done:
            return Answer.NONE
        return Answer.PLAIN if self._done[0] is None else Answer.SPECIAL

    def take(self) -> list[Reply | None]:
        """The answers to what has been carried out."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def take_back(self) -> None:
        """Undo a `take` that found one plain answer."""
        self._done.appendleft(None)

    def status(self) -> WorkerStatus:
        """What the thread is doing."""
        return WorkerStatus.of_word(self._status[1], is_alive=not self.is_dead)

    def exit_code(self) -> int | None:
        """Threads have none."""
        return None

    def stack(self) -> str:
        """Where the thread stands."""
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "".join(traceback.format_stack(frame)) if frame else "the thread has ended"

    def stop(self) -> None:
        """Let it go: it ends when its environment comes back, and writes nothing more."""
        with self._gate:
            self._is_abandoned = True
        self._commands.put(Command(0, Op.IDLE))
        if self._thread is not threading.current_thread():
            self._thread.join(0.05)
        self._status = (0, 0)
        self.__dict__.pop("_control", None)

    def _run(self) -> None:
        launch = self._launch
        status = self._control.status[launch.worker]
        try:
            with self._gate:
                try:
                    worker = Worker(
                        launch.first,
                        launch.env_fns,
                        launch.autoreset,
                        status,
                        Guard(self._outside_the_gate, (_Abandoned,)),
                    )
                    self.facts = worker.facts()
                except BuildFailed as exc:
                    self.start_failure = ("build", exc.failure)
                    return
                finally:
                    self._news.put(self)
                while self._serve(worker):
                    pass
        except _Abandoned:
            return
        except BaseException:  # nothing of an environment's gets here: the worker itself is broken
            self.is_dead = True
            self._news.put(self)
            raise

    def _serve(self, worker: Worker) -> bool:
        command = self._outside_the_gate(self._commands.get)()
        if command.op is Op.BIND:
            worker.bind(command.payload.control, command.payload.data)
            return True
        self._done.append(worker.handle_here(command))
        self._news.put(self)
        return command.op is not Op.CLOSE

    def _outside_the_gate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the gate while `function` runs; never come back through it once abandoned."""
        gate = self._gate

        def outside(*args: Any, **kwargs: Any) -> Any:
            gate.release()
            try:
                return function(*args, **kwargs)
            finally:
                gate.acquire()
                if self._is_abandoned:
                    raise _Abandoned

        return outside


class ThreadBackend(Backend[ThreadHandle]):
    """Every worker a daemon thread; one queue brings news of all of them."""

    shares_memory, needs_pickle = True, False
    can_interrupt, survives_crash, has_own_clock = True, False, True

    def __init__(
        self, shared_memory: SharedMemory, num_workers: int, start_method: StartMethod
    ) -> None:
        super().__init__(shared_memory, num_workers, start_method)
        self._news: queue.SimpleQueue[ThreadHandle] = queue.SimpleQueue()

    def launch(self, launch: Launch) -> ThreadHandle:
        """Start a thread that builds the environments."""
        handle = ThreadHandle(launch, self.shared_memory, self._news)
        self.handles[launch.worker] = handle
        return handle

    def wait(
        self, pending: Sequence[ThreadHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Wait for news, and take in all there is; with `want_all` for news of the last."""
        if any(handle.peek() is not Answer.NONE for handle in pending):
            timeout_s = 0.0  # a signal handler raised when its news had been taken
        last = pending[-1] if want_all and pending else None
        if timeout_s is not None and timeout_s > _LONGEST_WAIT_S:
            timeout_s = None
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            while True:
                left_s = None if give_up_s is None else max(give_up_s - time.monotonic(), 0.0)
                handle = self._news.get(timeout=left_s)
                is_plain = handle.peek() is not Answer.SPECIAL and not handle.is_dead
                while not self._news.empty():
                    self._news.get_nowait()
                if last is None or last.peek() is not Answer.NONE or not is_plain:
                    return
