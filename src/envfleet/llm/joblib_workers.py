"""Trajectories in joblib's workers: `loky`, `threading` and `multiprocessing`.

    worker: own environments ─ next ─► WorkShare        one unix socket for all of it
                             ─ generate ─► model
                             ─ begin, turn, end ─► journal

joblib starts the workers and pins nothing to them, so each call of it is one worker that asks for
trajectories until there are none. Everything travels over the socket of the inference manager as it
happens; what joblib returns is only a receipt. Law: what a lost worker has sent is kept. Its
trajectories are taken up by others where they stopped, whether joblib notices the loss (loky) or
not (multiprocessing).
"""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from envfleet.engine.machine import usable_cores
from envfleet.llm.extras import import_extra
from envfleet.llm.inference.client import InferenceClient
from envfleet.llm.journal import begin_entry, end_entry, turn_entry
from envfleet.llm.play import POLL_S, Play
from envfleet.llm.play_rules import PlayRules, TrajectoryTask
from envfleet.llm.seats import EnvSeats
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn
from envfleet.llm.work_share import Key, MachineState, WorkShare, free_memory, wanted_workers

JoblibBackend = Literal["loky", "threading", "multiprocessing"]
START_S = 60.0
"""How long workers may take until the first of them says something."""
GOODBYE_S = 5.0
"""How long workers may take to end when all trajectories are over."""
HEAR_S = 0.02
_ADAPT_EVERY_S = 1.0
_ALIVE_EVERY_S = 0.5
SILENCE_S = 600.0
"""How long a worker may be silent, where es_manager.step_timeout_s says nothing."""
_MOST_SAID = 500
"""Characters of an error of joblib that are kept."""
_IN_FLIGHT_S = 0.05
"""What a lost worker sent may take this long to arrive."""
_log = logging.getLogger("envfleet.llm.rollout")


class WorkersLost(Exception):
    """No worker of a round is left, or none could be started."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a worker says: that it is there, what happens to a trajectory, or how it ended."""

    worker: int
    kind: Literal["hello", "alive", "entry", "bye"]
    content: Any = None


# ---- in a worker --------------------------------------------------------------------------------


def play_share(
    client: InferenceClient,
    topic: str,
    rules: PlayRules,
    worker: int,
    max_live: int,
    manager_pid: int,
) -> int:
    """Play trajectories until there are none; how many it were."""
    _end_with_parent(manager_pid)
    source = _JoblibTasks(client, topic, worker)
    client.send(topic, Said(worker, "hello", os.getpid()))
    try:
        counts = dict.fromkeys(rules.tags, max_live)
        seats = EnvSeats(rules.tags, counts, rules.settings, False, 1)
        threads = ThreadPoolExecutor(max_live, "envfleet-asking")
        try:
            listener = _JoblibReporter(client, topic, worker)
            ask = _asking(client, threads)
            tick = listener.tick
            Play(rules, seats, ask, listener, source, max_live=max_live, on_tick=tick).run()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            seats.close()
    except Exception as exc:
        client.send(topic, Said(worker, "bye", f"{type(exc).__name__}: {exc}"))
        raise
    client.send(topic, Said(worker, "bye"))
    return source.num_taken


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


def _asking(client: InferenceClient, threads: ThreadPoolExecutor) -> Callable[[Any], Any]:
    return lambda request: threads.submit(client.generate, request)


class _JoblibTasks:
    """The tasks of a worker, which the manager hands out."""

    def __init__(self, client: InferenceClient, topic: str, worker: int) -> None:
        self._client, self._topic, self._worker = client, f"{topic}.next", worker
        self.is_over = False
        self.num_taken = 0
        self._again_s = 0.0

    def next(self) -> TrajectoryTask | None:
        if self.is_over or time.monotonic() < self._again_s:
            return None
        task, self.is_over = self._client.send(self._topic, self._worker)
        if task is None:
            self._again_s = time.monotonic() + 10 * POLL_S
        self.num_taken += task is not None
        found: TrajectoryTask | None = task
        return found


class _JoblibReporter:
    """Sends what happens to trajectories to the manager."""

    def __init__(self, client: InferenceClient, topic: str, worker: int) -> None:
        self._client, self._topic, self._worker = client, topic, worker
        self._said_s = time.monotonic()

    def tick(self) -> None:
        """Say now and then that no environment hangs."""
        if time.monotonic() - self._said_s >= _ALIVE_EVERY_S:
            self._said_s = time.monotonic()
            self._client.send(self._topic, Said(self._worker, "alive"))

    def _send(self, entry: dict[str, Any]) -> None:
        self._said_s = time.monotonic()
        self._client.send(self._topic, Said(self._worker, "entry", entry))

    def begun(self, trajectory: Trajectory) -> None:
        self._send(begin_entry(trajectory))

    def turned(self, trajectory: Trajectory, turn: TrajectoryTurn) -> None:
        self._send(turn_entry(trajectory, turn))

    def ended(self, trajectory: Trajectory) -> None:
        self._send(end_entry(trajectory))


# ---- in the manager's process -------------------------------------------------------------------


class JoblibRound:
    """One call of joblib: workers that play until all trajectories are over, or all are lost."""

    def __init__(
        self,
        llm: Any,
        rules: PlayRules,
        share: WorkShare,
        *,
        backend: JoblibBackend,
        num_workers: int,
        max_live: int,
        is_adaptive: bool,
        topic: str,
    ) -> None:
        self._llm, self._rules, self._share = llm, rules, share
        self._backend, self._num_workers = backend, num_workers
        self._max_live, self._is_adaptive, self._topic = max_live, is_adaptive, topic
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._is_over = False
        self._watched: dict[int, int] = {}
        """For each worker process, a descriptor that tells of its end."""
        self.pids: dict[int, int] = {}
        """The process of each worker that has said something."""
        self._left: set[int] = set()
        """Workers that have said goodbye."""
        self._gone: set[int] = set()
        """Workers that are lost, or ended by an error."""
        self._why = "all workers were killed"
        self._adapted_s = time.monotonic()
        self._heard_s: dict[int, float] = {}
        """When each worker process was heard last."""
        self._silence_s = rules.settings.step_timeout_s or SILENCE_S

    def run(
        self,
        on_entry: Callable[[dict[str, Any]], None],
        on_lost: Callable[[list[Key]], None],
        is_done: Callable[[], bool],
        on_tick: Callable[[], None],
    ) -> None:
        """Play.

        Args:
            on_entry: Called with every entry, in this thread.
            on_lost: Called with trajectories whose worker is gone.
            is_done: Whether all trajectories are over.
            on_tick: Called many times a second.

        Raises:
            WorkersLost: Before all trajectories are over.
        """
        self._llm.on_message(self._topic, self._said.put)
        self._llm.on_message(f"{self._topic}.next", self._next)
        with self._workers():
            begun_s = time.monotonic()
            while not is_done():
                self._hear(on_entry, on_lost, HEAR_S)
                self._look_after(on_entry, on_lost)
                self._adapt()
                on_tick()
                if is_done():
                    break
                if len(self._gone) == self._num_workers:
                    raise WorkersLost(self._why)
                if not self.pids and time.monotonic() - begun_s > START_S:
                    raise WorkersLost(f"no worker started within {START_S:g} s")

    @contextmanager
    def _workers(self) -> Iterator[None]:
        joblib = import_extra(
            "joblib", wanted_by="parallel_backend", install="pip install 'envfleet[joblib]'"
        )
        client = self._llm.client()
        each = -(-self._max_live // self._num_workers)
        parallel = joblib.Parallel(
            n_jobs=self._num_workers, backend=self._backend, batch_size=1, pre_dispatch="all"
        )
        calls = [
            joblib.delayed(play_share)(client, self._topic, self._rules, worker, each, os.getpid())
            for worker in range(self._num_workers)
        ]
        call = threading.Thread(
            target=self._call, args=(parallel, calls), name="envfleet-joblib", daemon=True
        )
        call.start()
        try:
            yield
        finally:
            self._is_over = True
            call.join(GOODBYE_S if not self._gone else HEAR_S)
            if call.is_alive():
                # joblib waits for ever for a worker process that was killed, unless time is up
                parallel.timeout = HEAR_S
                call.join(GOODBYE_S)
            for descriptor in self._watched.values():
                os.close(descriptor)
            self._watched.clear()

    def _call(self, parallel: Any, calls: Sequence[Any]) -> None:
        """Let joblib do its work, in a thread of its own."""
        try:
            parallel(calls)
            problem = "they ended before their time"
        except BaseException as exc:
            problem = " ".join(f"{type(exc).__name__}: {exc}".split())[:_MOST_SAID]
        self._said.put(Said(-1, "bye", problem))

    def _next(self, worker: int) -> tuple[TrajectoryTask | None, bool]:
        """Called in the thread of the inference manager."""
        task = None if self._is_over else self._share.next(worker)
        return task, self._is_over

    def _hear(
        self,
        on_entry: Callable[[dict[str, Any]], None],
        on_lost: Callable[[list[Key]], None],
        timeout_s: float,
    ) -> None:
        """Take in what workers say, and wait for the first word."""
        with suppress(queue.Empty):
            said = self._said.get(timeout=timeout_s)
            while True:
                self._take_in(said, on_entry, on_lost)
                said = self._said.get_nowait()

    def _take_in(
        self,
        said: Said,
        on_entry: Callable[[dict[str, Any]], None],
        on_lost: Callable[[list[Key]], None],
    ) -> None:
        worker = said.worker
        if worker in self._heard_s or said.kind == "hello":
            self._heard_s[worker] = time.monotonic()
        if said.kind == "hello":
            self.pids[worker] = said.content
            _log.info("worker %d plays in process %d", worker, said.content)
            if said.content != os.getpid():
                try:
                    self._watched[worker] = os.pidfd_open(said.content)
                except ProcessLookupError:
                    self._lose(worker, on_lost)
        elif worker < 0:
            if not self._is_over:
                self._why = f"{self._backend} has ended its workers ({said.content})"
            for one in range(self._num_workers):
                if one not in self._gone:
                    self._lose(one, on_lost)
        elif said.kind == "bye":
            self._left.add(worker)
            if said.content is not None:
                self._why = f"worker {worker} failed: {said.content}"
                self._lose(worker, on_lost)
        elif said.kind == "entry":
            key = said.content["env_id"], said.content["attempt"]
            if self._share.is_owner(worker, key):
                if said.content["kind"] == "end":
                    self._share.ended(key)
                on_entry(said.content)

    def _look_after(
        self,
        on_entry: Callable[[dict[str, Any]], None],
        on_lost: Callable[[list[Key]], None],
    ) -> None:
        """Notice processes that have ended before their time."""
        poll = select.poll()
        worker_of = {
            descriptor: worker
            for worker, descriptor in self._watched.items()
            if worker not in self._gone and worker not in self._left
        }
        for descriptor, worker in worker_of.items():
            poll.register(descriptor, select.POLLIN)
            if time.monotonic() - self._heard_s[worker] > self._silence_s + _ALIVE_EVERY_S:
                _log.warning("worker %d hangs, and is killed", worker)
                self._heard_s[worker] = math.inf
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended = [worker_of[descriptor] for descriptor, _ in poll.poll(0)]
        if ended:
            time.sleep(_IN_FLIGHT_S)
            self._hear(on_entry, on_lost, _IN_FLIGHT_S)
        for worker in ended:
            if worker not in self._left:
                self._lose(worker, on_lost)

    def _lose(self, worker: int, on_lost: Callable[[list[Key]], None]) -> None:
        self._gone.add(worker)
        self._share.active = self._num_workers  # the one that is gone may be the only active one
        keys = self._share.lost(worker)
        _log.warning(
            "worker %d is lost; %d trajectories are taken up where they stopped", worker, len(keys)
        )
        on_lost(keys)

    def _adapt(self) -> None:
        """Have more or fewer workers begin trajectories, by the state of the machine."""
        if (
            not self._is_adaptive
            or self._gone
            or time.monotonic() - self._adapted_s < _ADAPT_EVERY_S
        ):
            return
        self._adapted_s = time.monotonic()
        now = MachineState(os.getloadavg()[0], usable_cores(), free_memory())
        share = self._share
        wanted, why = wanted_workers(share.active, self._num_workers, share.num_waiting, now)
        if why is not None:
            share.active = wanted
            _log.info(why)


def end_idle_workers() -> None:
    """End the workers that loky keeps for later calls."""
    with suppress(ImportError, AttributeError):
        kept: Any = import_module("joblib.externals.loky.reusable_executor")
        if kept._executor is not None:
            kept._executor.terminate(kill_workers=True)
