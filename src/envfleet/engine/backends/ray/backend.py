"""Workers that are Ray actors, anywhere in a cluster.

Commands carry actions and replies carry rows, as `RowMessages` packs them: one call per worker and
step. An actor belongs to this process; Ray ends it when this process ends, however that happens.
What Ray reports of a lost actor or node is a death of the worker: a call that was under way may or
may not have been carried out, so its answer is never taken.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import cloudpickle

from envfleet.engine.backends.base import (
    Answer,
    Backend,
    Launch,
    RowBinding,
    SharedMemory,
)
from envfleet.engine.backends.encoding import encode_env_fns
from envfleet.engine.backends.process.main import Ready, load_facts
from envfleet.engine.backends.ray.cluster import (
    HEAD_CHECK_S,
    Connection,
    HeadWatch,
    connect,
    need_ray,
)
from envfleet.engine.backends.ray.host import ActorHost
from envfleet.engine.backends.row_messages import RowMessages
from envfleet.engine.machine import usable_cores
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply, WorkerStatus
from envfleet.engine.options import RayOptions, StartMethod
from envfleet.errors import ConfigError, ObjectStoreTooSmall

ASK_S = 1.0
"""How long a worker may take to say where it stands."""
END_S = 2.0
"""How long the ends of actors are waited for when a fleet is closed."""
ROUNDS, TRIP_LIMIT_S = 5, 30.0
"""Calls of which the fastest is the round trip, and how long one may take."""
SMALL_BYTES = 1 << 20
"""Less fits into any object store."""
_STRATEGIES = {"spread": "SPREAD", "pack": "DEFAULT"}


class RayHandle:
    """The parent's end of one actor."""

    def __init__(
        self, ray: ModuleType, launch: Launch, shared_memory: SharedMemory, options: RayOptions
    ) -> None:
        self.worker, self.first, self.count = launch.worker, launch.first, len(launch.env_fns)
        self.pid: int | None = None
        self.node = ""
        """Ray's id of the node that it runs on, once that is known."""
        self.facts: list[EnvFacts] | None = None
        self.start_failure: tuple[str, EnvFailure] | None = None
        self.last = Command(0, Op.IDLE)
        self.is_open, self.is_dead, self.ended_by = True, False, ""
        self._ray, self._options, self._word = ray, options, 0
        self._posted: deque[tuple[Command, Any]] = deque()
        self._done: deque[Any] = deque()
        self._look: Any = None
        blob = encode_env_fns(launch)
        demands = {"CPU": 0.0, **_demands(options)}
        self._actor = (
            _actor_class(ray)
            .options(
                num_cpus=demands.pop("CPU"),
                num_gpus=demands.pop("GPU", 0),
                resources=demands,
                scheduling_strategy=_STRATEGIES[options.placement],
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(shared_memory.plan, launch.worker, launch.first)
        )
        self.life: Any = self._actor.live.remote()
        """Ready once the actor has ended."""
        self._start: Any = self._actor.build.remote(blob, launch.autoreset)

    def bind(self, binding: RowBinding) -> None:
        """Give the worker its rows."""
        data = binding.data
        self._rows = RowMessages(binding.control, data, self.worker, self.first, self.count)
        self._check_object_stores(self._rows.nbytes)
        message = cloudpickle.dumps((data.space_groups, binding.length, binding.page_plan))
        self._actor.bind.remote(message)

    def _check_object_stores(self, need_bytes: int) -> None:
        """What does not fit would go by way of the disk, much more slowly."""
        if need_bytes < SMALL_BYTES:
            return
        ends = {self.node, self._ray.get_runtime_context().get_node_id()}
        stores = [
            int(node["Resources"].get("object_store_memory", 0))
            for node in self._ray.nodes()
            if node["NodeID"] in ends
        ]
        if stores and need_bytes > min(stores):
            raise ObjectStoreTooSmall(self.worker, self.count, need_bytes, min(stores))

    def post(self, command: Command) -> None:
        """Hand over a command; does not wait."""
        payload = cloudpickle.dumps(command.payload)
        slots = None if command.slots is None else list(command.slots)
        carried = self._rows.asked(command)
        words = (command.request, int(command.op), slots, command.page, payload, carried)
        try:
            answer = self._actor.handle.remote(pickle.dumps(words))
        except self._ray.exceptions.RayError as exc:  # such as an object store that is full
            answer = None
            self._note_end(exc)
        self._posted.append((command, answer))
        self.last = command

    # ---- what has arrived -----------------------------------------------------------------------

    def awaited(self) -> list[Any]:
        """The references that have something to say once they are ready."""
        if self.is_dead or not self.is_open:
            return []
        refs = [self.life]
        if self._start is not None:
            refs.append(self._start)
        if self._posted:
            refs.append(self._posted[0][1])
        return refs

    def oldest(self) -> Any:
        """What its next answer will be, if it owes one."""
        return self._posted[0][1] if self._posted else self._start

    def take_in(self, ready: set[Any]) -> bool:
        """Take in what is ready of `awaited`; whether there was any news."""
        has_news = False
        with contextlib.suppress(_Ended):
            if self._start is not None and self._start in ready:
                self.pid, self.node, said = self._get(self._start)
                self._start, has_news = None, True
                self._note_start(pickle.loads(said))
            while self._posted and self._posted[0][1] in ready:
                command, answer = self._posted[0]
                said, carried = self._get(answer)
                self._posted.popleft()
                self._done.append((command, said, carried))
                has_news = True
            if self.life in ready:
                self._get(self.life)
        return has_news or self.is_dead

    def _get(self, answer: Any) -> Any:
        try:
            return self._ray.get(answer)
        except Exception as exc:
            self._note_end(exc)
            raise _Ended from None

    def _note_end(self, exc: Exception) -> None:
        self.is_dead, self.ended_by = True, _in_short(exc)
        self._look = None

    def _note_start(self, message: Any) -> None:
        if isinstance(message, Ready):
            self.facts = load_facts(message.facts)
        else:
            self.start_failure = (message.why, message.failure)

    def peek(self) -> Answer:
        """What `take` would find first."""
        if not self._done:
            return Answer.NONE
        return Answer.PLAIN if self._done[0][1] is None else Answer.SPECIAL

    def take(self) -> list[Reply | None]:
        """The answers that have arrived."""
        replies: list[Reply | None] = []
        while self._done:
            command, said, carried = self._done[0]
            reply = self._decoded(said)
            if carried is not None:
                self._rows.absorb(command, carried)
            replies.append(reply)
            self._done.popleft()
        return replies

    def take_back(self) -> None:
        """Undo a `take` that found one plain answer, whose rows are in their place."""
        self._done.appendleft((self.last, None, None))

    def _decoded(self, said: bytes | list[EnvFailure] | None) -> Reply | None:
        if said is None:
            return None
        if isinstance(said, list):
            return Reply(failures=said)
        try:
            reply: Reply = pickle.loads(said)
            return reply
        except BaseException as exc:
            return Reply(failures=[EnvFailure.of(self.first, "reading a reply", exc)])

    # ---- how it is ------------------------------------------------------------------------------

    def status(self) -> WorkerStatus:
        """What the worker said last; it is asked again each time, and not waited for."""
        if self.is_dead or not self.is_open:
            # what it told when it was asked is no proof of what it did when it ended
            return WorkerStatus(Op.IDLE if self.facts else Op.BUILD, None, not self.is_dead)
        if self._look is not None and self._ray.wait([self._look], timeout=0)[0]:
            with contextlib.suppress(_Ended):
                self._word = self._get(self._look)
            self._look = None
        if self._look is None and self.pid is not None:
            self._look = self._actor.watch.remote()
        return WorkerStatus.of_word(self._word, is_alive=not self.is_dead)

    def exit_code(self) -> int | None:
        """Ray does not tell it; `stack` has what Ray tells."""
        return None

    def stack(self) -> str:
        """Where the worker stands, or how it ended."""
        if self.is_dead:
            return f"Ray says: {self.ended_by}"
        if self.pid is None and not self._ray.wait([self._actor.echo.remote()], timeout=ASK_S)[0]:
            return self._not_placed()
        answer = self._actor.stack.remote()
        if not self._ray.wait([answer], timeout=ASK_S)[0]:
            return f"it did not tell within {ASK_S:g} s: native code may hold the interpreter"
        with contextlib.suppress(_Ended):
            return str(self._get(answer))
        return f"Ray says: {self.ended_by}"

    def _not_placed(self) -> str:
        asked, free = _demands(self._options), self._ray.available_resources()
        left = {name: round(free.get(name, 0.0), 2) for name in asked}
        return (
            f"it has not begun: a worker asks for {asked}, and of that the cluster has {left} free"
        )

    def stop(self) -> None:
        """End the actor."""
        if not self.is_open:
            return
        self.is_open = False
        if self._ray.is_initialized():
            with contextlib.suppress(Exception):
                self._ray.kill(self._actor, no_restart=True)
        self._posted.clear()
        self._start = self._look = None
        for name in ("_rows", "_actor"):
            self.__dict__.pop(name, None)


class _Ended(Exception):
    """The actor has ended; its handle knows how."""


class RayBackend(Backend[RayHandle]):
    """Actors as workers."""

    shares_memory = False
    needs_pickle = can_interrupt = survives_crash = has_own_clock = True
    options_class = RayOptions

    def __init__(
        self,
        shared_memory: SharedMemory,
        num_workers: int,
        start_method: StartMethod,
        options: RayOptions = RayOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(shared_memory, num_workers, start_method)
        self._ray, self._options = need_ray(), options
        self._connection: Connection = connection_for(options, num_workers)
        self._ended: list[Any] = []
        self._head = HeadWatch(self._connection.address, HEAD_CHECK_S)

    def launch(self, launch: Launch) -> RayHandle:
        """Start one actor."""
        if launch.worker in self.handles:
            self._ended.append(self.handles[launch.worker].life)
        handle = RayHandle(self._ray, launch, self.shared_memory, self._options)
        self.handles[launch.worker] = handle
        return handle

    def wait(
        self, pending: Sequence[RayHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Wait until one of `pending` has news; all that has arrived is taken in."""
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            refs = [ref for one in self.handles.values() for ref in one.awaited()]
            if not refs:
                return
            wanted = 1
            if want_all:
                owed = {one.worker for one in pending if one.oldest() is not None}
                wanted = max(1, min(len(owed), len(refs)))
            self._head.look()
            left_s = HEAD_CHECK_S
            if give_up_s is not None:
                left_s = min(left_s, max(give_up_s - time.monotonic(), 0.0))
            ready, _ = self._ray.wait(refs, num_returns=wanted, timeout=left_s)
            chosen = set(ready)
            news = [one for one in self.handles.values() if one.is_open and one.take_in(chosen)]
            if news or any(one.peek() is not Answer.NONE or one.is_dead for one in pending):
                return
            if give_up_s is not None and time.monotonic() >= give_up_s:
                return

    @classmethod
    @contextlib.contextmanager
    def place(cls, options: Any, num_workers: int | None) -> Iterator[tuple[int, str]]:
        """How many workers the cluster has room for."""
        options = options or RayOptions()
        with connection_for(options, num_workers) as connection:
            there = need_ray().cluster_resources()
            rooms = [int(there.get(name, 0) / one) for name, one in _demands(options).items()]
            room = min(rooms, default=usable_cores())
            said = f"the Ray cluster at {connection.address} has room for {room}"
            if rooms and room < (num_workers or 1):
                raise ConfigError(
                    f"{said} workers of {_demands(options)} each, of the {num_workers or 1} that "
                    "are needed: start more nodes, ask for fewer by num_workers, or let each take "
                    "less: backend_options=RayOptions(resources={'CPU': 0.5})"
                )
            yield room, said

    def round_trip_s(self) -> float:
        """How long a call takes that does nothing, from this process to the slowest worker."""
        slowest = 0.0
        for handle in self.handles.values():
            best = float("inf")
            for _ in range(ROUNDS):
                start_s = time.perf_counter()
                self._ray.get(handle._actor.echo.remote(), timeout=TRIP_LIMIT_S)
                best = min(best, time.perf_counter() - start_s)
            slowest = max(slowest, best)
        return slowest

    def close(self) -> None:
        """See the actors end, and give up the connection."""
        if self._ray.is_initialized():
            lives = [*self._ended, *(one.life for one in self.handles.values())]
            with contextlib.suppress(Exception):
                self._ray.wait(lives, num_returns=len(lives), timeout=END_S)
        self._ended.clear()
        for handle in self.handles.values():
            handle.life = None
        self._connection.close()


def connection_for(options: RayOptions, num_workers: int | None = None) -> Connection:
    """The connection that these options ask for; a cluster started here has room for them all."""
    each = options.resources.get("CPU", 1.0)
    cpus = max(usable_cores(), -int(-(num_workers or 0) * each // 1))
    return connect(options.address, num_cpus=cpus, runtime_env=options.runtime_env)


def _demands(options: RayOptions) -> dict[str, float]:
    """What one worker takes of a node."""
    asked = {"CPU": 1.0, **options.resources}
    return {name: amount for name, amount in asked.items() if amount}


def _actor_class(ray: ModuleType) -> Any:
    made = ray.remote(concurrency_groups={"watch": 1, "life": 1})
    for name, group in (
        ("watch", "watch"),
        ("stack", "watch"),
        ("echo", "watch"),
        ("live", "life"),
    ):
        ray.method(concurrency_group=group)(getattr(ActorHost, name))
    return made(ActorHost)


def _in_short(exc: Exception) -> str:
    """What Ray says, without its advice on what may have caused it."""
    text = str(exc).replace("\t", " ")
    return " ".join(text.partition(" Some common causes include:")[0].split())
