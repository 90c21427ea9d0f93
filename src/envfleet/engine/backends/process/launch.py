"""How the parent starts worker processes: environment variables, the fork server, signals."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing import forkserver, popen_fork, resource_tracker, spawn, util
from typing import Any

from envfleet.engine.backends.process.child_processes import state_of
from envfleet.engine.backends.process.main import GUARD_EXIT, THREAD_VARIABLES, Script
from envfleet.engine.interrupts import uninterrupted

_PRELOADED = "envfleet.engine.backends.process.preload"
WORKER_NAME = "envfleet-worker-"
_KEYS = ("init_main_from_name", "init_main_from_path")
_BEFORE = "ENVFLEET_VARIABLES_BEFORE"


_variables_lock = threading.RLock()
"""Held while variables are changed: another thread would take them for what they were before."""
# a copy of this process is made within, by a thread that it does not have
os.register_at_fork(after_in_child=_variables_lock._at_fork_reinit)  # type: ignore[attr-defined]


@contextlib.contextmanager
def changed(changes: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables while processes are started within."""
    with _variables_lock:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            _restore(before)


@contextlib.contextmanager
def changed_at_start(changes: Mapping[str, str]) -> Iterator[None]:
    """The same for a process that puts them back by `as_before`, once it is up."""
    with _variables_lock:
        before = json.dumps({name: os.environ.get(name) for name in changes})
        with changed({**changes, _BEFORE: before}):
            yield


def as_before() -> None:
    """Undo what `changed_at_start` did to this process."""
    if _BEFORE in os.environ:
        _restore(json.loads(os.environ.pop(_BEFORE)))


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def main_script() -> Script:
    """The script of this process, and from now on multiprocessing leaves it to our workers."""
    if not hasattr(spawn.get_preparation_data, "leaves_script_to"):
        spawn.get_preparation_data = _leaving_script(spawn.get_preparation_data)
    data = spawn.get_preparation_data("")
    return {key: data[key] for key in _KEYS if key in data}


def _leaving_script(ordinary: Any) -> Any:
    # by name, and for good: other code that starts processes, in any thread, must not notice
    @functools.wraps(ordinary)
    def get_preparation_data(name: str) -> Any:
        data = ordinary(name)
        if name.startswith(WORKER_NAME):
            for key in _KEYS:
                data.pop(key, None)
        return data

    get_preparation_data.leaves_script_to = WORKER_NAME  # type: ignore[attr-defined]
    return get_preparation_data


def refuse_unguarded_main() -> None:
    """End this process if it is a worker that is still importing the main script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(GUARD_EXIT)


@contextlib.contextmanager
def started(process: Any, start_method: str) -> Iterator[None]:
    """Start a process; its environment variables and Ctrl-C are as they were after the block."""
    with _one_thread_each(), _interrupts_wait(start_method):
        _from_a_lasting_thread(process.start)
        yield


def watch_end(process: Any, start_method: str) -> int:
    """A descriptor that is readable when the process has ended.

    It is the process's own sentinel, and the only descriptor that is left open for it. Of the two
    pipes of multiprocessing one tells a child of its parent's end; our workers see to that
    themselves. The other tells of the end of a child only when no process has inherited it; the
    kernel's own descriptor is better, but for the fork server, which sends the exit code by it.
    """
    popen, close_fds, fd = process._popen, util.close_fds, -1  # type: ignore[attr-defined]
    if not hasattr(os, "pidfd_open"):
        return int(popen.sentinel)
    if start_method != "forkserver":
        with contextlib.suppress(ProcessLookupError):  # another thread has waited for it
            fd = os.pidfd_open(process.pid)
    kept = popen.sentinel if fd < 0 else fd
    given_up = [one for one in popen.finalizer._args if one != kept]
    popen.finalizer.cancel()
    popen.sentinel, popen.finalizer = kept, util.Finalize(popen, close_fds, (kept,))
    close_fds(*given_up)
    return int(kept)


def _one_thread_each() -> contextlib.AbstractContextManager[None]:
    """Variables of a worker at its start: numpy's BLAS reads them once, when it is loaded."""
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


class ForkProcess(multiprocessing.context.ForkProcess):
    """A process that leaves nothing open if it cannot be started."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _ForkPopen(process_obj)


class _ForkPopen(popen_fork.Popen):
    def _launch(self, process_obj: Any) -> None:
        """The ordinary one opens two pipes first, and leaves them open if there is no process."""
        try:
            super()._launch(process_obj)  # type: ignore[misc]
        except OSError as exc:
            frame = exc.__traceback__.tb_next if exc.__traceback__ else None
            opened = {} if frame is None else frame.tb_frame.f_locals
            for name in ("parent_r", "parent_w", "child_r", "child_w"):
                if name in opened:
                    os.close(opened[name])
            raise


class ForkServerStopped(Exception):
    """The fork server answers nothing; the argument is its process."""


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
    if state_of(server._forkserver_pid) == "T":
        raise ForkServerStopped(server._forkserver_pid)
