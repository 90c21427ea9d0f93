"""Workers as processes of this machine, woken by bells, watched by the kernel.

The parent waits for done-bells, for the control path and for the end of processes in one call, so a
death is an event like any other. What a worker process owns ends with it; what the parent holds for
it (two bells, a socket, a process descriptor, a file for stacks) is given up in `stop`, and nowhere
else.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing import forkserver, resource_tracker
from typing import Any

import cloudpickle
import numpy as np

from envfleet.engine.backends.base import Launch, RowBinding, SharedMemory, WorkerHandle
from envfleet.engine.backends.process.bell import Bell
from envfleet.engine.backends.process.channel import ParentChannel
from envfleet.engine.backends.process.child_processes import end, hold_offspring
from envfleet.engine.backends.process.fast_path import DONE, POSTED, TAKEN, ProcessFastPath
from envfleet.engine.backends.process.launch import GUARD_EXIT as GUARD_EXIT
from envfleet.engine.backends.process.launch import (
    WORKER_NAME,
    ScriptFailed,
    begin,
    changed,
    changed_at_start,
    main_script,
)
from envfleet.engine.backends.process.main import (
    HAS_MESSAGE,
    HAS_REPLY,
    PARTIAL,
    STACK_SIGNAL,
    THREAD_VARIABLES,
    Descriptors,
    NotReady,
    Ready,
    WorkerSpec,
    load_facts,
    main,
    without_watcher,
)
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.machine import open_files, usable_cores
from envfleet.engine.memory import unnamed_file
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply
from envfleet.engine.options import StartMethod
from envfleet.engine.rows import WorkerPort
from envfleet.errors import (
    EnvNotPicklable,
    MainNotImportable,
    MissingMainGuard,
    RemoteTraceback,
    StartError,
    StillInFlight,
    TooManyOpenFiles,
)

FILES_PER_WORKER = 8
"""What the parent holds open for one worker while it is being started."""
_PRELOADED = "envfleet.engine.backends.process.preload"
_STACK_WAIT_S = 0.3


def refuse_unguarded_main() -> None:
    """End this process if it is a worker that is still importing the main script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(GUARD_EXIT)


class ProcessHandle:
    """The parent's end of one worker process."""

    def __init__(
        self, launch: Launch, shared_memory: SharedMemory, context: Any, spec: WorkerSpec
    ) -> None:
        slab_fd = shared_memory.slab.fd
        assert slab_fd is not None
        self.worker, self.first, self.count = launch.worker, launch.first, len(launch.env_fns)
        self.facts: list[EnvFacts] | None = None
        self.start_failure: tuple[str, EnvFailure] | None = None
        self.script_failure: EnvFailure | None = None
        """Why it could not import the main script; it ends with `GUARD_EXIT` then."""
        self.is_dead = False
        self._ring = shared_memory.control.rings[launch.worker]
        self._post_words = shared_memory.control.status[launch.worker]
        self._tickets = shared_memory.control.tickets
        self._post_words[0] = self._post_words[1] = 0
        self._size = len(self._ring) // 3
        counts = np.zeros(3, np.uint64)
        self._counts = counts.data
        """Commands posted, done and taken; a lane counts here too."""
        with contextlib.ExitStack() as undo:
            self.commands = Bell.create(take_waits=True)
            self.done = Bell.create(take_waits=False)
            undo.callback(self.commands.close)
            undo.callback(self.done.close)
            self.channel, theirs = ParentChannel.pair()
            undo.callback(self.channel.close)
            undo.callback(os.close, theirs)
            self._stack_fd = unnamed_file("envfleet-stack")
            descriptors = Descriptors(
                channel=theirs,
                slab=slab_fd,
                commands=self.commands.fd,
                commands_write=self.commands.write_fd,
                done=self.done.write_fd,
                done_read=self.done.fd,
                stack=self._stack_fd,
            )
            undo.callback(os.close, self._stack_fd)
            is_fork = context.get_start_method() == "fork"
            self.process = context.Process(
                target=main if is_fork else begin,
                args=(spec, descriptors) if is_fork else (main_script(), spec, descriptors),
                name=f"{WORKER_NAME}{launch.worker}",
                daemon=True,
            )
            with _one_thread_each(), _interrupts_wait(context.get_start_method()):
                _from_a_lasting_thread(self.process.start)
                undo.callback(self.process.join, 5.0)
                undo.callback(self.process.kill)
            # a fork of this process that ends would end all workers in that list; ours end with us
            multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]
            self.exit_fd, self._owns_exit_fd = _end_of(self.process)
            undo.pop_all()
            os.close(theirs)
        self.pid: int | None = self.process.pid
        self.port: WorkerPort = (
            np.frombuffer(self._ring, np.uint64),
            np.frombuffer(self._post_words, np.uint64),
            counts,
            self.commands.fd,
            self.done.fd,
            self.count,
        )
        """All that a lane needs."""
        self._is_open = True

    def bind(self, binding: RowBinding) -> None:
        """Tell the worker where its rows lie."""
        # plans, not spaces: one registered in this process only would be planned otherwise there
        message = (binding.offset, binding.length, binding.data.space_groups, binding.page_plan)
        self.channel.send(cloudpickle.dumps(message))

    def post(self, command: Command) -> None:
        """Write the ring entry and ring; steps need no message."""
        posted, _, taken = self._counts
        if posted - taken >= self._size:
            raise StillInFlight(
                f"worker {self.worker} has {self._size} unanswered commands; receive some first"
            )
        entry = posted % self._size * 3
        flags = 0
        if command.payload is not None or (command.slots is not None and command.op is not Op.STEP):
            flags = HAS_MESSAGE
            blob = cloudpickle.dumps(command.payload)
            self.channel.send(pickle.dumps((command.slots, blob)))
        elif command.slots is not None:
            flags = PARTIAL
            self._tickets[command.slots] = command.request & 0xFFFFFFFF
        ring = self._ring
        ring[entry], ring[entry + 1], ring[entry + 2] = command.request, command.op, flags
        self._counts[POSTED] = self._post_words[0] = posted + 1
        self.commands.ring()

    @property
    def has_news(self) -> bool:
        """Whether `take` has something that no bell will ring for again."""
        return bool(self._counts[TAKEN] < self._counts[DONE])

    def note_done(self) -> None:
        """Take the done-bell, in case it rings."""
        self._counts[DONE] += self.done.take()

    def take(self) -> list[Reply | None]:
        """Replies in the order of commands; those without anything to say are None."""
        _, done, taken = self._counts
        replies: list[Reply | None] = []
        for number in range(taken, done):
            flags = self._ring[number % self._size * 3 + 2]
            reply = None
            if flags & HAS_REPLY:
                if not self.channel.inbox:
                    self.channel.pump()
                reply = self._decode(self.channel.inbox.popleft())
            replies.append(reply)
            self._counts[TAKEN] = number + 1
        return replies

    def _decode(self, message: bytes) -> Reply:
        try:
            reply: Reply = pickle.loads(message)
        except BaseException as exc:  # it has a class that this process cannot import or rebuild
            failure = EnvFailure.of(self.first, "reading a reply", exc)
            return Reply(failures=[failure])
        return reply

    def note_message(self) -> None:
        """The control path is ready: move bytes, and notice the worker's first message."""
        self.channel.pump()
        if self.facts is None and self.start_failure is None and self.channel.inbox:
            message = pickle.loads(self.channel.inbox.popleft())
            if isinstance(message, Ready):
                self.facts = load_facts(message.facts)
            elif isinstance(message, NotReady):
                self.start_failure = (message.why, message.failure)
            elif isinstance(message, ScriptFailed):
                self.script_failure = message.failure

    def note_end(self) -> None:
        """The process has ended: what it finished before still counts."""
        with contextlib.suppress(OSError):
            self.note_message()
        self.note_done()
        self.is_dead = True

    def exit_code(self) -> int | None:
        """The process's exit code; negative for a signal."""
        self.process.join(1.0)
        code: int | None = self.process.exitcode
        return code

    def stack(self) -> str:
        """What faulthandler wrote when the process crashed, or writes now that it is asked to."""
        if self.process.is_alive() and STACK_SIGNAL is not None and not self.is_dead:
            state = state_of(self.process.pid)
            if state == "T":
                return (
                    "the process is stopped (SIGSTOP, or a debugger); it cannot say where it stands"
                )
            size = os.fstat(self._stack_fd).st_size
            os.kill(self.process.pid, STACK_SIGNAL)
            deadline = time.monotonic() + _STACK_WAIT_S
            while os.fstat(self._stack_fd).st_size == size and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.01)
            return self._read_stack(size)
        return self._read_stack(0)

    def _read_stack(self, start: int) -> str:
        dump = os.pread(self._stack_fd, 1 << 16, start).decode(errors="replace")
        return without_watcher(dump).strip()

    @property
    def _has_closed(self) -> bool:
        """Whether the last that it was asked to do was to close, and it has answered that."""
        posted, _, taken = self._counts
        last = self._ring[(posted - 1) % self._size * 3 + 1] if posted else Op.IDLE
        return bool(posted == taken and last == Op.CLOSE)

    def stop(self) -> None:
        """Kill what still runs, and what that has started; reap it; close every descriptor."""
        if not self._is_open:
            return
        self._is_open = False
        if self.process.is_alive():
            # who has closed its environments has left what it wanted to leave
            offspring = [] if self._has_closed else hold_offspring(self.process.pid)
            self.process.kill()
            end(offspring)
        self.process.join(5.0)
        with contextlib.suppress(ValueError):  # still running after SIGKILL: stuck in the kernel
            self.process.close()
        self.commands.close()
        self.done.close()
        self.channel.close()
        os.close(self._stack_fd)
        if self._owns_exit_fd:
            os.close(self.exit_fd)
        del self._ring, self._post_words, self._tickets, self.port


class ProcessBackend:
    """Worker processes under one start method."""

    def __init__(
        self, shared_memory: SharedMemory, start_method: StartMethod, num_workers: int
    ) -> None:
        self._shared_memory, self.start_method = shared_memory, start_method
        self._context = multiprocessing.get_context(start_method)
        self._may_spin = num_workers <= usable_cores()
        self._num_workers = num_workers
        self._watch = _Watch()
        self._handles: dict[int, ProcessHandle] = {}
        self._check_files()
        self.fast_path = ProcessFastPath.open(num_workers, self._watch.urgent_fd)

    def launch(self, launch: Launch) -> ProcessHandle:
        """Start a process that builds the environments."""
        spec = WorkerSpec(
            worker=launch.worker,
            first=launch.first,
            env_fns=_pickled(launch),
            autoreset=launch.autoreset,
            control=self._shared_memory.plan,
            parent_pid=os.getpid(),
            may_spin=self._may_spin,
            is_from_server=self.start_method == "forkserver",
        )
        try:
            handle = ProcessHandle(launch, self._shared_memory, self._context, spec)
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                raise self._too_many_files() from exc
            raise
        self._watch.add(handle)
        self._handles[launch.worker] = handle
        if self.fast_path is not None:
            self.fast_path.ports[launch.worker] = handle.port
        return handle

    def wait(
        self, pending: Sequence[WorkerHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Wait for a bell, a message or an end."""
        if any(isinstance(handle, ProcessHandle) and handle.has_news for handle in pending):
            timeout_s = 0.0  # a lane has taken their bells
        last = pending[-1] if want_all and pending else None
        if not isinstance(last, ProcessHandle):
            self._watch.wait(None, timeout_s)
            return
        self._watch.wait(last, timeout_s)
        with uninterrupted:
            for handle in pending:  # the others were most likely done before the last one
                if handle is not last and isinstance(handle, ProcessHandle):
                    handle.note_done()

    def forget(self, handle: ProcessHandle) -> None:
        """Stop watching a worker; to be called before it is stopped."""
        self._watch.remove(handle)
        self._handles.pop(handle.worker, None)

    def guard_error(self) -> StartError:
        """What to raise for a worker that ended with `GUARD_EXIT`."""
        script = getattr(sys.modules.get("__main__"), "__file__", None) or "the main script"
        for handle in self._handles.values():
            if (failure := handle.script_failure) is not None:
                error = MainNotImportable(script, self.start_method, failure.reason)
                error.__cause__ = RemoteTraceback(failure.traceback)
                return error
        return MissingMainGuard(script, self.start_method)

    def close(self) -> None:
        """Give up the watch."""
        self._watch.close()

    def _check_files(self) -> None:
        used, allowed = open_files()
        if used + self._num_workers * FILES_PER_WORKER > allowed:
            self._watch.close()
            raise self._too_many_files()

    def _too_many_files(self) -> TooManyOpenFiles:
        used, allowed = open_files()
        need = self._num_workers * FILES_PER_WORKER
        return TooManyOpenFiles(allowed, used, need, self._num_workers)


class _Watch:
    """One place to wait for all workers: their bells, and (as one nested set) messages and ends.

    Waiting for one worker's bell alone, with messages and ends of all, is what lock-step needs: the
    parent then sleeps until the last worker is done instead of being woken by each.
    """

    def __init__(self) -> None:
        self._urgent, self._all = _new_set(), _new_set()
        self._is_nested = hasattr(self._urgent, "fileno")
        if self._is_nested:
            self._all.register(self._urgent.fileno(), select.POLLIN)
        self.urgent_fd: int | None = self._urgent.fileno() if self._is_nested else None
        """Readable when there is a message or an end, where these can be watched as one."""
        self._by_fd: dict[int, tuple[ProcessHandle, str]] = {}
        self._alone: dict[int, Any] = {}

    def add(self, handle: ProcessHandle) -> None:
        done, channel = handle.done.fd, handle.channel
        for fd, what in ((channel.fd, "message"), (handle.exit_fd, "end")):
            self._by_fd[fd] = (handle, what)
            self._urgents.register(fd, select.POLLIN)
        self._by_fd[done] = (handle, "done")
        self._all.register(done, select.POLLIN)
        if self._is_nested:
            alone = select.poll()
            alone.register(done, select.POLLIN)
            alone.register(self._urgent.fileno(), select.POLLIN)
            self._alone[done] = alone

        def watch_for_room(has_backlog: bool) -> None:
            mask = select.POLLIN | (select.POLLOUT if has_backlog else 0)
            if channel.fd in self._by_fd:
                self._urgents.modify(channel.fd, mask)

        channel.on_backlog = watch_for_room

    def remove(self, handle: ProcessHandle) -> None:
        for fd in (handle.channel.fd, handle.exit_fd):
            self._ignore(fd)
        if self._by_fd.pop(handle.done.fd, None) is not None:
            self._all.unregister(handle.done.fd)
        self._alone.pop(handle.done.fd, None)

    def wait(self, last: ProcessHandle | None, timeout_s: float | None) -> None:
        alone = self._alone.get(last.done.fd) if last is not None else None
        ready = []
        if alone is not None:
            ready = alone.poll(None if timeout_s is None else timeout_s * 1000)
            timeout_s = 0.0
        if not ready:  # nobody named, or time is up: whoever is done counts
            ready = _poll(self._all, timeout_s)
        with uninterrupted:
            for fd, _ in ready:
                self._take_in(fd)

    def _take_in(self, fd: int) -> None:
        known = self._by_fd.get(fd)
        if known is None:
            for urgent, _ in _poll(self._urgent, 0):
                self._attend(urgent)
        elif known[1] == "done":
            known[0].note_done()
        else:
            self._attend(fd)

    def close(self) -> None:
        for watched in (self._urgent, self._all):
            if hasattr(watched, "close"):
                watched.close()

    @property
    def _urgents(self) -> Any:
        return self._urgent if self._is_nested else self._all

    def _attend(self, fd: int) -> None:
        handle, what = self._by_fd[fd]
        if what == "end":
            handle.note_end()
            self._ignore(fd)  # it stays readable and would end every later wait at once
        else:
            handle.note_message()
            if handle.channel.is_broken:
                self._ignore(fd)

    def _ignore(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._urgents.unregister(fd)


def _new_set() -> Any:
    return select.epoll() if hasattr(select, "epoll") else select.poll()


def _poll(watched: Any, timeout_s: float | None) -> list[tuple[int, int]]:
    in_seconds = hasattr(watched, "fileno")
    timeout = timeout_s if in_seconds or timeout_s is None else timeout_s * 1000
    ready: list[tuple[int, int]] = watched.poll(timeout)
    return ready


def _pickled(launch: Launch) -> bytes:
    try:
        blob: bytes = cloudpickle.dumps(list(launch.env_fns))
        return blob
    except Exception as whole:
        for slot, env_fn in enumerate(launch.env_fns, launch.first):
            try:
                cloudpickle.dumps(env_fn)
            except Exception as exc:
                name = getattr(env_fn, "__qualname__", repr(env_fn))
                raise EnvNotPicklable(slot, name, str(exc) or type(exc).__name__) from exc
        raise EnvNotPicklable(launch.first, "its env_fn", str(whole)) from whole


def _one_thread_each() -> contextlib.AbstractContextManager[None]:
    """Start-up environment of a worker: numpy's BLAS reads these once, when it is loaded."""
    return changed({name: "1" for name in THREAD_VARIABLES if name not in os.environ})


def _from_a_lasting_thread(start: Callable[[], None]) -> None:
    """Start a process from a thread that ends no sooner than this process: workers die with it."""
    if threading.current_thread() is threading.main_thread():
        start()
        return
    with _launcher_lock:
        if not _launchers or not _launchers[0].is_alive():
            _launchers[:] = [_Launcher()]
    _launchers[0].run_there(start)


class _Launcher(threading.Thread):
    """Does what it is given, one thing after another, until the process ends."""

    def __init__(self) -> None:
        super().__init__(name="envfleet-launcher", daemon=True)
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self.start()

    def run_there(self, function: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._work.put((function, done))
        done.result()

    def run(self) -> None:
        while True:
            function, done = self._work.get()
            try:
                done.set_result(function())
            except BaseException as exc:
                done.set_exception(exc)


_launcher_lock = threading.Lock()
_launchers: list[_Launcher] = []


def _end_of(process: Any) -> tuple[int, bool]:
    """What is readable when the process has ended, and whether that is ours to close."""
    if hasattr(os, "pidfd_open"):
        # one from the fork server, which reaps it, may be gone already
        with contextlib.suppress(ProcessLookupError):
            return os.pidfd_open(process.pid), True
    return process.sentinel, False


@contextlib.contextmanager
def _interrupts_wait(start_method: str) -> Iterator[None]:
    """Hold Ctrl-C back while a process starts: a worker shall not see it before it ignores it."""
    with (
        uninterrupted
    ):  # the mask is only this thread's, and a handler runs whichever thread is told
        if start_method != "fork":  # started within, the tracker would open the mask again
            resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            if start_method == "forkserver":
                _ensure_server()
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ensure_server() -> None:
    """Start the fork server, if there is none yet, with the engine loaded in it."""
    server: Any = forkserver._forkserver
    asked = server._preload_modules
    server._preload_modules = [*asked, _PRELOADED]
    # it shall find this very engine, wherever this process has it from
    paths = {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), "PYTHONSAFEPATH": "1"}
    try:
        with changed_at_start(paths):
            forkserver.ensure_running()
    finally:
        server._preload_modules = asked


def state_of(pid: int | None) -> str:
    """The kernel's letter for what a process is doing; empty where it does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
