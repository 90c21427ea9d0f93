"""The workers of joblib: `loky`, `threading` and `multiprocessing`.

joblib pins no task to a worker, so each call of it is one worker of a round. Whether it notices
that a worker was killed (loky) or waits for ever (multiprocessing), the process is watched here.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal

from envfleet.engine.backends.process.launch import refuse_unguarded_main
from envfleet.llm.extras import import_extra
from envfleet.llm.inference.client import InferenceClient
from envfleet.llm.worker_round import HEAR_S, Said, SharePlay

JoblibBackend = Literal["loky", "threading", "multiprocessing"]
GOODBYE_S = 5.0
"""How long workers may take to end when all trajectories are over."""
_MOST_SAID = 500
"""Characters of an error of joblib that are kept."""
_log = logging.getLogger("envfleet.llm.rollout")


class JoblibWorkers:
    """One call of joblib."""

    def __init__(self, backend: JoblibBackend, num_workers: int, *, is_adaptive: bool) -> None:
        self.name = f"the {backend} backend of joblib"
        self.backend: str = backend
        self.num_workers, self.is_adaptive = num_workers, is_adaptive
        self._call: threading.Thread | None = None
        self._watched: dict[int, int] = {}
        """For each worker process, a descriptor that tells of its end."""

    def client(self, llm: Any) -> InferenceClient:
        """What a worker reaches the inference manager by."""
        client: InferenceClient = llm.client()
        return client

    def start(self, play: SharePlay, say: Callable[[Said], None]) -> None:
        """Call joblib, in a thread of its own."""
        joblib = import_extra(
            "joblib", wanted_by="parallel_backend", install="pip install 'envfleet[joblib]'"
        )
        if self.backend != "threading":
            refuse_unguarded_main()
        self._say = say
        self._parallel = joblib.Parallel(
            n_jobs=self.num_workers,
            backend=_joblib_backend(self.backend),
            batch_size=1,
            pre_dispatch="all",
        )
        calls = [
            joblib.delayed(_play_in_joblib)(play, worker, os.getpid())
            for worker in range(self.num_workers)
        ]
        self._call = threading.Thread(
            target=self._run, args=(calls,), name="envfleet-joblib", daemon=True
        )
        self._call.start()

    def _run(self, calls: Sequence[Any]) -> None:
        try:
            self._parallel(calls)
            problem = "they ended before their time"
        except BaseException as exc:
            problem = " ".join(f"{type(exc).__name__}: {exc}".split())[:_MOST_SAID]
        self._say(Said(-1, "bye", problem))

    def grow(self, num_gone: int, num_waiting: int) -> str | None:
        """Joblib's workers are as many as they were."""
        return None

    def greet(self, worker: int, pid: int) -> bool:
        """Watch the process of a worker; False if it has ended already."""
        _log.info("worker %d plays in process %d", worker, pid)
        if pid != os.getpid():
            try:
                self._watched[worker] = os.pidfd_open(pid)
            except ProcessLookupError:
                return False
        return True

    def ended(self) -> dict[int, str]:
        """Workers whose process has ended."""
        poll = select.poll()
        for descriptor in self._watched.values():
            poll.register(descriptor, select.POLLIN)
        found = {descriptor for descriptor, _ in poll.poll(0)}
        return {
            worker: "its process was killed"
            for worker, one in self._watched.items()
            if one in found
        }

    def kill(self, worker: int) -> bool:
        """End a worker that hangs; one in this process cannot be."""
        if worker not in self._watched:
            return False
        signal.pidfd_send_signal(self._watched[worker], signal.SIGKILL)
        return True

    def stop(self, is_any_lost: bool) -> None:
        """Wait for joblib."""
        if self._call is None:
            return
        self._call.join(HEAR_S if is_any_lost else GOODBYE_S)
        if self._call.is_alive():
            # joblib waits for ever for a worker process that was killed, unless time is up
            self._parallel.timeout = HEAR_S
            self._call.join(GOODBYE_S)
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched.clear()


def _joblib_backend(backend: str) -> Any:
    """What joblib takes as its backend.

    By itself it would fork this process, in which threads of the inference manager run. Such a copy
    may hang, and one of a process that uses Ray can end it. A fork server has no threads.
    """
    return multiprocessing.get_context("forkserver") if backend == "multiprocessing" else backend


def _play_in_joblib(play: SharePlay, worker: int, manager_pid: int) -> int:
    _end_with_parent(manager_pid)
    return play(worker)


@functools.cache
def _end_with_parent(manager_pid: int) -> None:
    """End this process when the manager's ends; joblib's workers would wait for more for ever."""
    if manager_pid == os.getpid():
        return
    manager = os.pidfd_open(manager_pid)

    def wait() -> None:
        poll = select.poll()
        poll.register(manager, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait, name="envfleet-manager-watch", daemon=True).start()


def end_idle_workers() -> None:
    """End the workers that loky keeps for later calls."""
    with suppress(ImportError, AttributeError):
        kept: Any = import_module("joblib.externals.loky.reusable_executor")
        if kept._executor is not None:
            kept._executor.terminate(kill_workers=True)
