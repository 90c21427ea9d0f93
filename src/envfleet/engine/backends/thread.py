"""Workers as threads of this process: for environments that wait or release the GIL.

A thread cannot be killed. One that hangs is abandoned instead: a worker holds its *gate* whenever
it is not inside an environment, and abandoning takes the gate, so an abandoned thread that comes
back finds itself out before it can write a row that is somebody else's by then.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from envfleet.engine.backends.base import FastPath, Launch, RowBinding, SharedMemory, WorkerHandle
from envfleet.engine.host import Guard
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply
from envfleet.engine.worker import BuildFailed, Worker


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
        self._done: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
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
        self._commands.put(command)

    @property
    def has_answers(self) -> bool:
        """Whether `take` has something."""
        return not self._done.empty()

    def take(self) -> list[Reply | None]:
        """What has been served."""
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

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
        self._done.put(worker.handle_here(command))
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


class ThreadBackend:
    """Every worker a daemon thread; one queue brings news of all of them."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._news: queue.SimpleQueue[ThreadHandle] = queue.SimpleQueue()
        self.fast_path: FastPath | None = None

    def launch(self, launch: Launch) -> ThreadHandle:
        """Start a thread that builds the environments."""
        return ThreadHandle(launch, self._shared_memory, self._news)

    def wait(
        self, pending: Sequence[WorkerHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Wait for news, and take in all there is."""
        if any(isinstance(handle, ThreadHandle) and handle.has_answers for handle in pending):
            timeout_s = 0.0  # a signal's handler raised when its news had been taken
        try:
            self._news.get(timeout=timeout_s)
            while not self._news.empty():
                self._news.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Holds nothing."""
