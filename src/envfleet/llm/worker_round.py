"""Trajectories in `RolloutWorkers`: joblib's, or those of a Ray cluster.

    worker: own environments ─ next ─► WorkShare        one socket for all of it
                             ─ generate ─► model
                             ─ begin, turn, end ─► journal

Nothing is pinned to workers: each makes one call of `SharePlay`, which asks for trajectories until
there are none. Everything travels over the socket of the inference manager as it happens; what a
call returns is only a receipt. Law: what a lost worker has sent is kept. Its trajectories are taken
up by others where they stopped.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from envfleet.engine.machine import usable_cores
from envfleet.llm.inference.client import InferenceClient
from envfleet.llm.journal import begin_entry, end_entry, turn_entry
from envfleet.llm.play import POLL_S, Play
from envfleet.llm.play_rules import PlayRules, TrajectoryTask
from envfleet.llm.seats import EnvSeats
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn
from envfleet.llm.work_share import Key, MachineState, WorkShare, free_memory, wanted_workers

START_S = 60.0
"""How long workers may take until the first of them says something."""
HEAR_S = 0.02
_ADAPT_EVERY_S = 1.0
_ALIVE_EVERY_S = 0.5
SILENCE_S = 600.0
"""How long a worker may be silent, where es_manager.step_timeout_s says nothing."""
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


@dataclass(frozen=True, slots=True)
class SharePlay:
    """What every worker of a round does."""

    client: InferenceClient
    topic: str
    rules: PlayRules
    max_live: int
    """How many trajectories a worker plays at once."""

    def __call__(self, worker: int) -> int:
        """Play trajectories until there are none; how many it were."""
        client, topic, rules = self.client, self.topic, self.rules
        source = _ShareTasks(client, topic, worker)
        client.send(topic, Said(worker, "hello", os.getpid()))
        try:
            counts = dict.fromkeys(rules.tags, self.max_live)
            seats = EnvSeats(rules.tags, counts, rules.settings, False, 1)
            threads = ThreadPoolExecutor(self.max_live, "envfleet-asking")
            try:
                listener = _ShareReporter(client, topic, worker)
                ask, tick = _asking(client, threads), listener.tick
                max_live = self.max_live
                Play(rules, seats, ask, listener, source, max_live=max_live, on_tick=tick).run()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                seats.close()
        except Exception as exc:
            client.send(topic, Said(worker, "bye", f"{type(exc).__name__}: {exc}"))
            raise
        client.send(topic, Said(worker, "bye"))
        return source.num_taken


def _asking(client: InferenceClient, threads: ThreadPoolExecutor) -> Callable[[Any], Any]:
    return lambda request: threads.submit(client.generate, request)


class _ShareTasks:
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


class _ShareReporter:
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


class RolloutWorkers(Protocol):
    """The workers of a round: it starts them, and notices when they end."""

    name: str
    """In sentences."""
    backend: str
    """As in results."""
    num_workers: int
    is_adaptive: bool
    """Whether the number of workers that play follows this machine's load."""

    def client(self, llm: Any) -> InferenceClient:
        """What a worker reaches the inference manager by."""

    def start(self, play: SharePlay, say: Callable[[Said], None]) -> None:
        """Have `play(worker)` called once for each worker; does not wait for anything.

        With -1 for a worker, `say` tells that none is left.
        """

    def grow(self, num_gone: int, num_waiting: int) -> str | None:
        """Start more workers if there is new room for them, and say why there are more now.

        So many workers of all that were started are gone, and so many trajectories wait.
        """

    def greet(self, worker: int, pid: int) -> bool:
        """A worker is there, in this process; False if that has ended already."""

    def ended(self) -> Mapping[int, str]:
        """Workers that have ended and why, those that had nothing more to do included."""

    def kill(self, worker: int) -> bool:
        """End a worker that hangs; False if it cannot be ended."""

    def stop(self, is_any_lost: bool) -> None:
        """Let the workers end, in bounded time."""


class WorkerRound:
    """Workers that play until all trajectories are over, or all workers are lost."""

    def __init__(
        self,
        llm: Any,
        rules: PlayRules,
        share: WorkShare,
        workers: RolloutWorkers,
        *,
        max_live: int,
        topic: str,
    ) -> None:
        self._llm, self._rules, self._share, self._workers = llm, rules, share, workers
        self._max_live, self._topic = max_live, topic
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._is_over = False
        self._left: set[int] = set()
        """Workers that have said goodbye."""
        self._gone: set[int] = set()
        """Workers that are lost, or ended by an error."""
        self._why = "there were none"
        self._adapted_s = time.monotonic()
        self._heard_s: dict[int, float] = {}
        """When each worker was heard last."""
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
        llm, workers, topic = self._llm, self._workers, self._topic
        handlers = {
            topic: self._said.put,
            f"{topic}.next": self._next,
            f"{topic}.elapsed": self._elapsed,
            f"{topic}.image": self._keep_image,
        }
        for name, handler in handlers.items():
            llm.on_message(name, handler)
        each = -(-self._max_live // workers.num_workers)
        try:
            workers.start(SharePlay(workers.client(llm), topic, self._rules, each), self._said.put)
            begun_s = time.monotonic()
            while not is_done():
                self._hear(on_entry, on_lost, HEAR_S)
                self._look_after(on_entry, on_lost)
                self._adapt()
                on_tick()
                if is_done():
                    break
                if len(self._gone) == workers.num_workers:
                    raise WorkersLost(self._why)
                if not self._heard_s and time.monotonic() - begun_s > START_S:
                    raise WorkersLost(
                        f"no worker started within {START_S:g} s; if the main script has no "
                        '`if __name__ == "__main__":`, put its code under one'
                    )
        finally:
            self._is_over = True
            workers.stop(bool(self._gone))
            for name in handlers:  # the manager outlives this round, and would keep it
                llm.on_message(name, None)

    # ---- called in the thread of the inference manager -----------------------------------------

    def _next(self, worker: int) -> tuple[TrajectoryTask | None, bool]:
        is_over = self._is_over or worker in self._gone
        return None if is_over else self._share.next(worker), is_over

    def _elapsed(self, _: None) -> float:
        return time.monotonic() - self._rules.started_s

    def _keep_image(self, named: tuple[str, bytes]) -> None:
        assert self._rules.keep_image is not None
        self._rules.keep_image(*named)

    # ---- called in the thread of `run` ----------------------------------------------------------

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
            if not self._workers.greet(worker, said.content):
                self._lose(worker, on_lost)
        elif worker < 0:
            if not self._is_over:
                self._why = f"{self._workers.name} has ended its workers ({said.content})"
            for one in range(self._workers.num_workers):
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
        """Notice workers that have ended before their time, and end those that hang."""
        for worker, heard_s in self._heard_s.items():
            if worker in self._gone or worker in self._left:
                continue
            if time.monotonic() - heard_s > self._silence_s + _ALIVE_EVERY_S:
                self._heard_s[worker] = math.inf
                if self._workers.kill(worker):
                    _log.warning("worker %d hangs, and is killed", worker)
        ended = self._workers.ended()
        if ended.keys() - self._gone - self._left:
            time.sleep(_IN_FLIGHT_S)
            self._hear(on_entry, on_lost, _IN_FLIGHT_S)
        for worker in sorted(ended.keys() - self._gone - self._left):
            self._why = f"worker {worker} has ended: {ended[worker]}"
            self._lose(worker, on_lost)

    def _lose(self, worker: int, on_lost: Callable[[list[Key]], None]) -> None:
        self._gone.add(worker)
        # the one that is gone may be the only active one
        self._share.active = self._workers.num_workers
        keys = self._share.lost(worker)
        _log.warning(
            "worker %d is lost; %d trajectories are taken up where they stopped", worker, len(keys)
        )
        on_lost(keys)

    def _adapt(self) -> None:
        """Have more or fewer workers begin trajectories, by the nodes or the machine's state."""
        if time.monotonic() - self._adapted_s < _ADAPT_EVERY_S:
            return
        self._adapted_s, share = time.monotonic(), self._share
        before = self._workers.num_workers
        why = self._workers.grow(len(self._gone), share.num_waiting)
        if why is not None:
            share.grow(self._workers.num_workers - before)
            _log.info(why)
        if not self._workers.is_adaptive or self._gone:
            return
        now = MachineState(os.getloadavg()[0], usable_cores(), free_memory())
        wanted, why = wanted_workers(
            share.active, self._workers.num_workers, share.num_waiting, now
        )
        if why is not None:
            share.active = wanted
            _log.info(why)
