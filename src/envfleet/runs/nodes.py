"""Work for whole nodes of a Ray cluster: pieces of work out, results back as they finish.

    build ── sent once ──► an actor on every node, which keeps the worker that build(place) returned
    share(value) ────────► the object store, from which every node takes it once
    work(tasks, shared) ─► worker(task, shared) on the node that is free ──► Done, in any order

A user of this module writes one function, `build(place) -> worker`. The worker is called with a
task and with what is shared; it may have a `close`, and holds what is expensive: a fleet, a policy.

    with NodePool(build) as pool:                     # Ray is connected already
        weights = pool.share(policy.state_dict())     # once per iteration
        for done in pool.work(tasks, weights):
            results[done.index] = done.result         # each index comes exactly once

`work` is `give` for each task, and `next` until all are done. Both may be called at any time, so
that nodes have work while this process does something else.

Law: a piece is answered once. One whose actor or node was lost, or that passed its deadline, may or
may not have been done: what it did is dropped, and another worker is given the same task. So a task
has to say all that its result depends on; what a worker keeps is a cache. A task that raises is not
given again: its exception is raised here, with the remote traceback as its cause.

Nodes that join get actors, those that leave are dropped. Every such decision is an `Event`.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import cloudpickle

from envfleet.engine.backends.ray.cluster import HeadWatch
from envfleet.errors import ClusterLost, ConfigError, NoNodes, RemoteTraceback, WorkLost
from envfleet.observe.events import Event, EventKind

__all__ = ["Done", "Later", "NodePool", "Place", "PoolWorker"]

CHECK_S = 1.0
"""Seconds between two looks at which nodes there are."""
CLOSE_S = 5.0
"""Seconds that actors get to end by themselves."""
OUT_OF_MEMORY = "running low on memory"
"""What Ray says when it ended an actor because its node's memory was short."""

Task = TypeVar("Task", contravariant=True)
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker lives: what `build` is told."""

    node: str
    """Ray's name of the node."""
    host: str
    """Its address."""
    cores: int
    """How many cores the worker may use."""

    def __str__(self) -> str:
        return f"node {self.node[:8]} ({self.host})"


class PoolWorker(Protocol[Task, Result]):
    """What `build` returns. If it has a method `close`, that is called at the end."""

    def __call__(self, task: Task, shared: Any) -> Result:
        """Do one piece of work; the result depends on nothing but these two."""


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """One piece of work that was done."""

    index: int
    """Of its task."""
    result: Result
    worker: int
    """Who did it, to be named in `prefers` of later work."""
    seconds: float
    """From handing it out until its result was here."""


@dataclass(frozen=True, slots=True)
class Later:
    """A value in the object store: part of a task that its worker fetches only if it needs it."""

    reference: Any

    def get(self) -> Any:
        """Fetch it."""
        import ray

        return ray.get(self.reference)


@dataclass(slots=True)
class _QueuedPiece:
    index: int
    task: Any
    shared: Any
    prefers: int | None
    losses: int = 0


@dataclass(slots=True)
class _Hired:
    """An actor, as this process sees it."""

    number: int
    place: Place
    actor: Any
    answer: Any
    """The call that it is busy with: its start at first; None if it is free."""
    since_s: float
    is_ready: bool = False
    piece: _QueuedPiece | None = None
    """What it works on. None with an answer owed: its start, or work that is not wanted now."""


class NodePool(Generic[Task, Result]):
    """One actor per node, or several, and the work that they are given. Not for several threads."""

    def __init__(
        self,
        build: Callable[[Place], PoolWorker[Task, Result]],
        *,
        per_node: int = 1,
        memory_bytes: int = 0,
        deadline_s: float = 600.0,
        start_timeout_s: float = 120.0,
        most_losses: int = 3,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Start actors on all nodes that have a core; returns when they are ready.

        Args:
            build: Makes the worker of an actor, where that lives.
            per_node: Actors on each node, which share its cores; fewer if its memory is short.
            memory_bytes: What each of them needs, if that is known.
            deadline_s: Longest one piece of work may take.
            start_timeout_s: Longest an actor may take to start, and work may wait for a first one.
            most_losses: So often a piece may be lost, or an actor not start on a node in a row.
            on_event: Is told of every decision.
        """
        import ray

        if not ray.is_initialized():
            raise ConfigError("a NodePool needs a connection to a Ray cluster; make that first")
        self._ray: Any = ray
        self._head = HeadWatch(str(ray.get_runtime_context().gcs_address))
        self._per_node, self._memory_bytes = per_node, memory_bytes
        self._deadline_s, self._start_timeout_s = deadline_s, start_timeout_s
        self._most_losses, self._on_event = most_losses, on_event
        self._build = self._ray.put(cloudpickle.dumps(build))
        self._hired: dict[int, _Hired] = {}
        self._number = 0
        self._failed_starts = Counter[str]()
        """Actors that did not start, in a row, by node."""
        self._room: dict[str, int] = {}
        """How many actors a node has room for, where memory was short."""
        self._queue: deque[_QueuedPiece] = deque()
        self._next_check_s = 0.0
        self._alone_s: float | None = None
        """Since when no worker has been there for work."""
        self.events: list[Event] = []
        """Every decision so far."""
        try:
            self.refresh()
            self._wait_for_all()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def workers(self) -> dict[int, Place]:
        """Those that are ready, by number."""
        return {one.number: one.place for one in self._hired.values() if one.is_ready}

    def share(self, value: Any) -> Any:
        """Put a large value where every node takes it once; to be given to `work`."""
        return self._ray.put(value)

    def later(self, value: Any) -> Later:
        """Put a value into the object store, for a task."""
        return Later(self._ray.put(value))

    def work(
        self, tasks: Sequence[Task], shared: Any = None, prefers: Sequence[int | None] = ()
    ) -> Iterator[Done[Result]]:
        """Have all tasks done, and nothing else; results come as they finish.

        Args:
            tasks: What to do.
            shared: What every task gets besides: anything, or what `share` returned.
            prefers: For each task the worker that should do it, such as the one that holds its
                fleet. Where there is no such worker any more, another one does it.

        Raises:
            WorkLost: A piece was lost too often.
            NoNodes: No worker is left, and none came in time.
        """
        wanted, left = [*prefers] or [None] * len(tasks), len(tasks)
        self.forget()
        try:
            for index, (task, worker) in enumerate(zip(tasks, wanted, strict=True)):
                self.give(index, task, shared, worker)
            while left:
                done = self.next()
                if done is not None:
                    left -= 1
                    yield done
        finally:
            self.forget()

    def give(self, index: int, task: Task, shared: Any = None, prefers: int | None = None) -> None:
        """Have one more task done, called `index` in its `Done`; the rest is as for `work`."""
        self._queue.append(_QueuedPiece(index, task, shared, prefers))
        self._hand_out()

    def next(self) -> Done[Result] | None:
        """A piece that is done, or None if there is none within about a second.

        Raises:
            WorkLost: A piece was lost too often.
            NoNodes: No worker is left, and none came in time.
        """
        now_s = time.monotonic()
        if now_s >= self._next_check_s:
            self.refresh()
        self._hand_out()
        if any(one.is_ready for one in self._hired.values()):
            self._alone_s = None
        elif self._alone_s is None:
            self._alone_s = now_s
        elif now_s - self._alone_s > self._start_timeout_s:
            raise NoNodes(len(self._queue), self._start_timeout_s, self._last_words())
        return self._listen()

    def forget(self) -> None:
        """Have nothing done any more: pieces that wait are dropped, and answers that come later."""
        self._queue.clear()
        for one in self._hired.values():
            one.piece = None

    def under_way(self) -> dict[int, tuple[int, float]]:
        """The pieces that are worked on: by whom, and for how many seconds."""
        now_s = time.monotonic()
        return {
            one.piece.index: (one.number, now_s - one.since_s)
            for one in self._hired.values()
            if one.piece is not None
        }

    def expel(self, worker: int, why: str) -> None:
        """Give no work to this worker's node any more; what it works on is given to another one."""
        hired = self._hired[worker]
        self._room[hired.place.node] = 0
        for one in [one for one in self._hired.values() if one.place.node == hired.place.node]:
            self._lose(one, why)

    def refresh(self) -> None:
        """Start actors on nodes that have joined, drop those of nodes that have left."""
        self._next_check_s = time.monotonic() + CHECK_S
        self._find_overdue()
        try:
            if not self._head.look():
                return  # which nodes there are is known when it is back
            nodes = {one["NodeID"]: one for one in self._ray.nodes() if one["Alive"]}
        except (self._ray.exceptions.RayError, ConnectionError) as exc:
            raise ClusterLost(_first_line(exc)) from exc
        for hired in list(self._hired.values()):
            if hired.place.node not in nodes:
                self._lose(hired, "the node has left the cluster")
        living = Counter(one.place.node for one in self._hired.values())
        for name, node in nodes.items():
            wanted = self._wanted(name, node)
            for _ in range(wanted - living[name]):
                self._hire(name, node, wanted)

    def close(self) -> None:
        """End all actors; those that do not end by themselves in time are killed."""
        free = [one for one in self._hired.values() if one.is_ready and one.answer is None]
        try:
            said = [one.actor.close.remote() for one in free]
            if said:
                self._ray.wait(said, num_returns=len(said), timeout=CLOSE_S)
        finally:
            for one in list(self._hired.values()):
                self._dismiss(one)
            self._build = None  # the objects that it holds in the cluster go with it

    # ---- nodes and actors ------------------------------------------------------------------------

    def _wanted(self, name: str, node: dict[str, Any]) -> int:
        """How many actors belong on a node."""
        has = node["Resources"]
        if has.get("CPU", 0) < 1 or self._failed_starts[name] > self._most_losses:
            return 0
        if name not in self._room and self._memory_bytes:
            fits = int(has.get("memory", 0) // self._memory_bytes)
            if fits < self._per_node:
                self._room[name] = fits
                why = f"{has.get('memory', 0) / 1e9:.1f} GB of memory are enough for {fits}"
                self.tell("fewer", str(_place(name, node, 1)), f"{why}, not for {self._per_node}")
        return min(self._per_node, self._room.get(name, self._per_node))

    def _hire(self, name: str, node: dict[str, Any], sharers: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = _place(name, node, sharers)
        actor = (
            self._ray.remote(_Actor)
            .options(
                num_cpus=place.cores,
                memory=self._memory_bytes or None,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
            )
            .remote()
        )
        answer = actor.start.remote(self._build, place)
        self._hired[self._number] = _Hired(self._number, place, actor, answer, time.monotonic())
        self._number += 1

    def _lose(self, hired: _Hired, why: str) -> None:
        """Go on without an actor; what it was doing is given to another one."""
        self._dismiss(hired)
        piece, where = hired.piece, str(hired.place)
        if hired.is_ready:
            self.tell("lost" if piece else "left", where, why)
        else:
            self.tell("left", where, f"its actor did not start: {why}")
            self._failed_starts[hired.place.node] += 1
            if self._failed_starts[hired.place.node] > self._most_losses:
                self.tell("fewer", where, "no more are started there, none came up")
        if OUT_OF_MEMORY in why:
            living = sum(one.place.node == hired.place.node for one in self._hired.values())
            self._room[hired.place.node] = max(living, 1)
            if living:
                self.tell("fewer", where, f"its memory was short; {living} actors are left")
        if piece is not None:
            piece.losses += 1
            if piece.losses > self._most_losses:
                raise WorkLost(piece.index, piece.losses, f"{where}: {why}")
            piece.prefers = None
            self._queue.appendleft(piece)
            self.tell("again", where, f"its piece {piece.index} is given to another worker")

    def _dismiss(self, hired: _Hired) -> None:
        self._hired.pop(hired.number, None)
        self._ray.kill(hired.actor, no_restart=True)

    def _wait_for_all(self) -> None:
        """Until every actor is ready, or was given up."""
        limit_s = time.monotonic() + self._start_timeout_s
        while any(not one.is_ready for one in self._hired.values()):
            if time.monotonic() >= limit_s:
                break
            if time.monotonic() >= self._next_check_s:
                self.refresh()
            self._listen()
        if not self.workers:
            raise NoNodes(0, self._start_timeout_s, self._last_words())

    def _last_words(self) -> str:
        return str(self.events[-1]) if self.events else "no node has a free core"

    def tell(self, kind: EventKind, where: str, why: str) -> None:
        """Note a decision."""
        event = Event(kind, where, why)
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    # ---- pieces ----------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        for hired in self._hired.values():
            if not self._queue:
                return
            if not hired.is_ready or hired.answer is not None:
                continue
            for piece in self._queue:
                if piece.prefers == hired.number or piece.prefers not in self._hired:
                    break
            else:
                continue
            self._queue.remove(piece)
            hired.piece, hired.since_s = piece, time.monotonic()
            hired.answer = hired.actor.do.remote(piece.task, piece.shared)

    def _listen(self) -> Done[Result] | None:
        """Take in one answer, if one comes before the next look at the nodes."""
        by_answer = {one.answer: one for one in self._hired.values() if one.answer is not None}
        if not by_answer:
            time.sleep(0.05)  # there is no worker; the next look at the nodes may find some
            return None
        answers = list(by_answer)
        ready, _ = self._ray.wait(answers, timeout=max(0.0, self._next_check_s - time.monotonic()))
        if not ready:
            return None
        return self._take(by_answer[ready[0]])

    def _take(self, hired: _Hired) -> Done[Result] | None:
        errors = self._ray.exceptions
        try:
            said = self._ray.get(hired.answer, timeout=self._limit_s(hired))
        except errors.RayTaskError:
            raise  # what came back, or went there, cannot be pickled
        except (errors.RaySystemError, errors.RpcError, errors.LocalRayletDiedError) as exc:
            raise ClusterLost(_first_line(exc)) from exc
        except errors.RayError as exc:  # the actor, its node, or the result on it
            self._lose(hired, _reason(exc))
            return None
        hired.answer, piece, hired.piece = None, hired.piece, None
        if not hired.is_ready:
            if isinstance(said, _Raised):
                self._dismiss(hired)
                said.again()
            hired.is_ready = True
            self._failed_starts[hired.place.node] = 0
            self.tell("joined", str(hired.place), f"{hired.place.cores} cores were free")
            return None
        if piece is None:
            return None
        if isinstance(said, _Raised):
            said.again()
        return Done(piece.index, said, hired.number, time.monotonic() - hired.since_s)

    def _limit_s(self, hired: _Hired) -> float:
        return self._deadline_s if hired.is_ready else self._start_timeout_s

    def _find_overdue(self) -> None:
        for hired in list(self._hired.values()):
            limit_s = self._limit_s(hired)
            if hired.answer is None or time.monotonic() - hired.since_s <= limit_s:
                continue
            if not self._ray.wait([hired.answer], timeout=0)[0]:  # it may lie here for long
                self._lose(hired, f"no answer within {limit_s:g} s")


class _Actor:
    """Lives in a process of Ray: a worker, and exceptions as text."""

    def start(self, build: bytes, place: Place) -> Any:
        try:
            self._worker = pickle.loads(build)(place)
        except Exception as exc:
            return _Raised.of(exc)
        return os.getpid()

    def do(self, task: Any, shared: Any) -> Any:
        try:
            return self._worker(task, shared)
        except Exception as exc:
            return _Raised.of(exc)

    def close(self) -> None:
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception on its way here."""

    pickled: bytes | None
    """None: it cannot be pickled."""
    said: str
    traceback: str

    @classmethod
    def of(cls, exc: Exception) -> _Raised:
        try:
            pickled = cloudpickle.dumps(exc)
            pickle.loads(pickled)
        except Exception:
            pickled = None
        return cls(
            pickled, f"{type(exc).__name__}: {exc}", "".join(traceback.format_exception(exc))
        )

    def again(self) -> None:
        """Raise it here."""
        error = RuntimeError(self.said) if self.pickled is None else pickle.loads(self.pickled)
        error.__cause__ = RemoteTraceback(self.traceback)
        raise error


def _place(name: str, node: dict[str, Any], sharers: int) -> Place:
    cores = max(1, int(node["Resources"]["CPU"]) // max(1, sharers))
    return Place(name, node["NodeManagerAddress"], cores)


def _reason(exc: Exception) -> str:
    """What Ray says of a loss, in a few words."""
    text = str(exc)
    if OUT_OF_MEMORY in text:
        return f"its actor was ended because the node was {OUT_OF_MEMORY}"
    if "may or may not have been executed" in text:
        return "the actor cannot be reached: its node may be gone"
    return f"{type(exc).__name__}: {_first_line(exc)}"


def _first_line(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), "")
