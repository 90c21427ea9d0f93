"""Workers as processes of this machine, woken by bells, watched by the kernel.

The parent waits for done-bells, for messages and for the end of processes in one call, so a death
is an event like any other. Plain steps are posted, awaited and collected by the compiled functions,
where there are any.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import select
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from envfleet.engine.backends.base import Answer, Backend, Launch, SharedMemory
from envfleet.engine.backends.encoding import encode_env_fns
from envfleet.engine.backends.process.bell import HAS_EVENTFD
from envfleet.engine.backends.process.handle import ProcessHandle, StackDumps
from envfleet.engine.backends.process.launch import ForkServerStopped
from envfleet.engine.backends.process.main import GUARD_EXIT, PAGE_SHIFT, WorkerSpec
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.machine import NO_CHILDREN, may_have_children, open_files, usable_cores
from envfleet.engine.messages import Op
from envfleet.engine.options import StartMethod
from envfleet.engine.rows import WorkerPort, collect_steps, post_steps
from envfleet.engine.rows_python import HAS_FUTEX
from envfleet.errors import (
    ConfigError,
    MainNotImportable,
    MissingMainGuard,
    NoNewProcess,
    RemoteTraceback,
    TooManyOpenFiles,
    WorkerDied,
)

FILES_PER_WORKER = 3 if HAS_FUTEX else 4
"""What the parent holds open for one worker."""
UNKNOWN_EXIT = 255
"""What multiprocessing gives for a process whose fork server has ended."""
_LONGEST_WAIT_S = 1e6
"""The kernel does not take 25 days; what waits longer waits again."""
_HOW_TO_GET_PROCESSES = (
    "This user or container may have no more processes and threads (ulimit -u, pids.max) or no "
    "more memory: use fewer workers (num_workers=), end other programs, or use backend='thread'"
)
SPARE_FILES = 16
"""What it holds for all of them, and opens for a moment while one is started."""


class ProcessBackend(Backend[ProcessHandle]):
    """Worker processes under one start method."""

    shares_memory = needs_pickle = can_interrupt = survives_crash = has_own_clock = True

    def __init__(
        self, shared_memory: SharedMemory, num_workers: int, start_method: StartMethod
    ) -> None:
        if not may_have_children():
            raise ConfigError(f"backend='process' cannot be: {NO_CHILDREN}. Use backend='thread'")
        super().__init__(shared_memory, num_workers, start_method)
        self._context = multiprocessing.get_context(start_method)
        self._may_spin = num_workers <= usable_cores()
        self._check_files()
        with self._naming_the_limit():
            self._watch, self._stack_dumps = _ProcessWait(), StackDumps()
        self._ports: list[WorkerPort] = [()] * num_workers  # type: ignore[list-item]
        """What the compiled steps need of each worker, once it is launched."""
        self._urgent_fd = self._watch.urgent_fd if HAS_EVENTFD else None
        """None where plain steps go by the handles."""

    def launch(self, launch: Launch) -> ProcessHandle:
        """Start a process that builds the environments."""
        spec = WorkerSpec(
            worker=launch.worker,
            first=launch.first,
            env_fns=encode_env_fns(launch),
            autoreset=launch.autoreset,
            control=self.shared_memory.plan,
            parent_pid=os.getpid(),
            may_spin=self._may_spin,
            is_from_server=self.start_method == "forkserver",
            mark=os.urandom(8).hex(),
        )
        slots = range(launch.first, launch.first + len(launch.env_fns))
        try:
            with self._naming_the_limit():
                handle = ProcessHandle(
                    launch, self.shared_memory, self._context, spec, self._stack_dumps
                )
        except ForkServerStopped as exc:
            (pid,) = exc.args
            reason, remedy = f"the fork server (process {pid}) is stopped", f"kill -CONT {pid}"
            raise NoNewProcess(launch.worker, slots, reason, f"Continue it: {remedy}") from None
        except (EOFError, ConnectionError) as exc:
            ended = "The fork server ended before it had started the worker."
            raise WorkerDied(
                launch.worker, slots, UNKNOWN_EXIT, "start-up", ended, restart_helps=False
            ) from exc
        except (OSError, RuntimeError) as exc:
            if isinstance(exc, OSError) and exc.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            if isinstance(exc, RuntimeError) and "start new thread" not in str(exc):
                raise
            raise NoNewProcess(launch.worker, slots, str(exc), _HOW_TO_GET_PROCESSES) from exc
        self._watch.add(handle)
        handle.on_stop = partial(self._watch.remove, handle)
        self.handles[launch.worker] = handle
        self._ports[launch.worker] = handle.port
        return handle

    def wait(
        self, pending: Sequence[ProcessHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Wait for a bell, a message or an end."""
        if any(handle.peek() is not Answer.NONE for handle in pending):
            timeout_s = 0.0  # the compiled steps have taken their bells
        last = pending[-1] if want_all and pending else None
        self._watch.wait(last, timeout_s)
        if last is not None:
            with uninterrupted:
                for handle in pending:  # the others were most likely done before the last one
                    if handle is not last:
                        handle.note_done()

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Write the steps into the workers' rings and ring their bells."""
        if self._urgent_fd is None:
            super().post(workers, request, page)
        else:
            flags = page << PAGE_SHIFT
            post_steps(self._ports, self.under_way, workers, request, Op.STEP, flags)

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Wait for the workers' bells."""
        if self._urgent_fd is None:
            return super().collect(workers, min_slots, limit_s)
        return collect_steps(
            self._ports,
            self.under_way,
            workers,
            min_slots,
            self._urgent_fd,
            limit_s,
            self.spin_s,
        )

    def death_at_start(self, handle: ProcessHandle) -> Exception | None:
        """A worker may have found that it cannot import the main script, and why."""
        if handle.exit_code() != GUARD_EXIT:
            return None
        script = getattr(sys.modules.get("__main__"), "__file__", None) or "the main script"
        for other in self.handles.values():
            if (failure := other.script_failure) is not None:
                error = MainNotImportable(script, self.start_method, failure.reason)
                error.__cause__ = RemoteTraceback(failure.traceback)
                return error
        return MissingMainGuard(script, self.start_method)

    def close(self) -> None:
        """Give up the watch and the file for stacks."""
        self._watch.close()
        self._stack_dumps.close()

    def _check_files(self) -> None:
        used, allowed = open_files()
        if used + self.num_workers * FILES_PER_WORKER + SPARE_FILES > allowed:
            raise self._too_many_files()

    @contextlib.contextmanager
    def _naming_the_limit(self) -> Iterator[None]:
        """Say what is needed if there are too many open files."""
        try:
            yield
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                raise self._too_many_files() from exc
            raise

    def _too_many_files(self) -> TooManyOpenFiles:
        used, allowed = open_files()
        need = self.num_workers * FILES_PER_WORKER + SPARE_FILES
        return TooManyOpenFiles(allowed, used, need, self.num_workers)


class _ProcessWait:
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
        if not ready:  # no worker was named, or time is up: all that are done count
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
                # it is ending, or cannot answer; a fork server that is stopped does not tell
                handle.note_end()

    def _ignore(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._urgents.unregister(fd)


def _new_set() -> Any:
    return select.epoll() if hasattr(select, "epoll") else select.poll()


def _poll(watched: Any, timeout_s: float | None) -> list[tuple[int, int]]:
    in_seconds = hasattr(watched, "fileno")
    if timeout_s is not None:
        timeout_s = min(timeout_s, _LONGEST_WAIT_S)
    timeout = timeout_s if in_seconds or timeout_s is None else timeout_s * 1000
    ready: list[tuple[int, int]] = watched.poll(timeout)
    return ready
