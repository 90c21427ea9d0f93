"""What is under way: commands not yet answered, answers not yet received.

A slot has at most one step or reset in flight. Commands of one worker are answered in the order
in which they were posted, so a reply belongs to the oldest one outstanding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envfleet.engine.backends.base import FastPath, WorkerHandle
from envfleet.engine.batch_reader import BatchReader
from envfleet.engine.episodes import Episodes
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.messages import Command, Op, Reply
from envfleet.engine.slots import SlotSet, SlotSets, WorkerPart
from envfleet.engine.workers import Workers
from envfleet.errors import EnvfleetError

if TYPE_CHECKING:
    from envfleet.engine.recovery import Recovery

MOVES = (Op.STEP, Op.RESET)
"""What gives a slot a new row."""


@dataclass(slots=True, eq=False)
class Pending:
    """One command, from its posting until its result has been handed out."""

    command: Command
    part: WorkerPart | None
    """The slots that it will answer for; fewer than were sent if some of them failed."""
    group: list[Pending] = field(default_factory=list)
    """Everything that one caller waits for."""
    unwanted: Set[int] = frozenset()
    """Slots whose answer nobody waits for any more: it is taken and dropped."""
    is_done: bool = False
    reply: Reply | None = None
    error: EnvfleetError | None = None
    """Why there will be no reply."""

    @property
    def slots(self) -> list[int]:
        """The slots that it will answer for."""
        return [] if self.part is None else self.part.slots.tolist()


class Inflight:
    """Commands on their way, per worker in order, and which slots they hold."""

    def __init__(self, num_slots: int, handles: Sequence[WorkerHandle]) -> None:
        """`handles` is the crew's own list, in which a lost worker is replaced."""
        self._handles = handles
        self.outstanding: list[deque[Pending]] = [deque() for _ in handles]
        self.ready: list[Pending] = []
        """Answered steps that nobody has received yet, oldest first."""
        self.num_ready = 0
        self.reset_slots: set[int] = set()
        """Slots whose answer that waits to be received is that of a reset."""
        # bytes are set and cleared in a fraction of an array's time, and this is done per step
        self.in_flight = bytearray(num_slots)
        self.num_in_flight = 0
        self._held: set[int] = set()
        """Workers that are being replaced: what is posted to them waits for their successors."""
        self.last_request = 0
        """The identity of what was posted last."""

    def post(
        self, slot_set: SlotSet, op: Op, payload: Sequence[Any] | None = None
    ) -> list[Pending]:
        """Send one command to each worker that has a share; `payload` has one item per slot."""
        group: list[Pending] = []
        with uninterrupted:
            self.last_request += 1
            for part in slot_set.parts:
                share = None if payload is None else [payload[index] for index in part.positions]
                self._post(op, part, share, group)
            if op in MOVES:
                self._mark(slot_set, b"\1")
                self.num_in_flight += len(slot_set.slots)
        return group

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way and nothing waits to be received."""
        return not self.num_in_flight and not self.ready and not any(self.outstanding)

    def next_request(self) -> int:
        """The identity of a step that is posted past this."""
        self.last_request += 1
        return self.last_request

    def enter(self, fast_path: FastPath, parts: Sequence[WorkerPart]) -> None:
        """Enter what is under way on the lane, as if it had been posted; `parts` by worker."""
        for part in parts:
            if fast_path.under_way[part.worker]:
                # in this order a signal's handler may raise in between: it is then entered again
                self._mark(part, b"\1")
                self.num_in_flight = self.in_flight.count(1)
                if not self.outstanding[part.worker]:
                    command = Command(fast_path.request_of(part.worker), Op.STEP)
                    self.outstanding[part.worker].append(Pending(command, part))
                fast_path.under_way[part.worker] = 0

    def hand_back(self, fast_path: FastPath) -> bool:
        """Strike out what is under way if all of it could be on the lane; whether it is there."""
        queues = [queue for queue in self.outstanding if queue]
        if self.ready or not all(len(queue) == 1 and _is_plain(queue[0]) for queue in queues):
            return False
        if not fast_path.resume(
            tuple(worker for worker, queue in enumerate(self.outstanding) if queue)
        ):
            return False
        self.in_flight[:] = bytes(len(self.in_flight))
        self.num_in_flight = 0
        for queue in queues:
            queue.clear()
        return True

    def post_shared(self, slot_set: SlotSet, op: Op, payload: Any) -> list[Pending]:
        """Send one command to each worker that has a share, with one payload for all."""
        self.last_request += 1
        group: list[Pending] = []
        for part in slot_set.parts:
            self._post(op, part, payload, group)
        return group

    def post_part(
        self, op: Op, part: WorkerPart, payload: Any = None, slots: list[int] | None = None
    ) -> Pending:
        """One more command for one worker; what its slots have in flight stays as it is.

        `slots` are given where the command names some of the part's more than once.
        """
        self.last_request += 1
        if slots is None:
            return self._post(op, part, payload, [])
        return self._enqueue(
            Pending(Command(self.last_request, op, slots, payload), part), part.worker
        )

    def again(self, pending: Pending) -> None:
        """Post a command once more, to the successor of the worker that had it."""
        assert pending.part is not None
        pending.is_done, pending.reply = False, None
        self._enqueue(pending, pending.part.worker)

    def _post(self, op: Op, part: WorkerPart, payload: Any, group: list[Pending]) -> Pending:
        slots = None if part.is_whole and op in MOVES else part.slots.tolist()
        pending = Pending(Command(self.last_request, op, slots, payload), part)
        if op not in MOVES:  # `recv` waits for these, and a cycle would be left for gc
            pending.group = group
        group.append(pending)
        return self._enqueue(pending, part.worker)

    def _enqueue(self, pending: Pending, worker: int) -> Pending:
        self.outstanding[worker].append(pending)
        if worker not in self._held:
            self._handles[worker].post(pending.command)
        return pending

    def hold(self, worker: int) -> None:
        """Keep what is posted to this worker until `let_go`."""
        self._held.add(worker)

    def let_go(self, worker: int) -> list[Pending]:
        """The worker can be posted to again; returns what was held, to be posted by `again`."""
        self._held.discard(worker)
        held = list(self.outstanding[worker])
        self.outstanding[worker].clear()
        return held

    def land(self, part: WorkerPart) -> None:
        """These slots are no longer in flight."""
        self._mark(part, b"\0")
        self.num_in_flight -= len(part.slots)

    def _mark(self, where: SlotSet | WorkerPart, value: bytes) -> None:
        if isinstance(where.rows, slice):
            self.in_flight[where.rows] = value * len(where.slots)
        else:
            for slot in where.slots.tolist():
                self.in_flight[slot] = value[0]

    def is_any_in_flight(self, slots: Sequence[int]) -> bool:
        """Whether one of `slots` has been sent and not answered."""
        return any(self.in_flight[slot] for slot in slots)

    def lose(self, slot: int) -> None:
        """This slot will not come back from where it is, if it is anywhere."""
        self.num_in_flight -= self.in_flight[slot]
        self.in_flight[slot] = 0

    def make_ready(self, pending: Pending) -> None:
        """An answered step waits to be received."""
        self.ready.append(pending)
        self.num_ready += 0 if pending.part is None else len(pending.part.slots)

    def take_ready(self) -> list[WorkerPart]:
        """Hand out everything that is ready."""
        parts = [pending.part for pending in self.ready if pending.part is not None]
        self.ready, self.num_ready = [], 0
        return parts

    def take_ready_parts(self, parts: Sequence[WorkerPart]) -> bool:
        """Hand out exactly these, if they are ready as they were sent."""
        mine = [pending for pending in self.ready if any(pending.part is part for part in parts)]
        if len(mine) < len(parts):
            return False
        self.ready = [pending for pending in self.ready if pending not in mine]
        self.num_ready -= sum(len(part.slots) for part in parts)
        return True

    def take_ready_of(self, slots: Set[int]) -> list[Pending]:
        """Hand out what these slots have ready; returns commands that answered for others too."""
        touched = [pending for pending in self.ready if not slots.isdisjoint(pending.slots)]
        self.ready = [pending for pending in self.ready if pending not in touched]
        self.num_ready -= sum(len(pending.slots) for pending in touched)
        return [pending for pending in touched if not slots >= set(pending.slots)]

    def renounce(self, slots: set[int]) -> list[Pending]:
        """Nobody waits for what these slots have in flight or ready; returns what was ready."""
        for queue in self.outstanding:
            for pending in queue:
                if pending.command.op in MOVES:
                    pending.unwanted |= slots.intersection(pending.slots)
        touched = [pending for pending in self.ready if not slots.isdisjoint(pending.slots)]
        self.ready = [pending for pending in self.ready if pending not in touched]
        self.num_ready = sum(len(pending.slots) for pending in self.ready)
        for pending in touched:
            pending.unwanted |= slots.intersection(pending.slots)
        return touched

    def is_awaited(self, slots: Sequence[int]) -> bool:
        """Whether somebody waits for what any of these slots has in flight or ready."""
        chosen = set(slots)
        return any(
            chosen.intersection(pending.slots) - pending.unwanted
            for queue in (*self.outstanding, self.ready)
            for pending in queue
            if pending.command.op in MOVES
        )

    def unreceived(self) -> set[int]:
        """Slots whose last step or reset is answered and not handed out."""
        return {slot for pending in self.ready for slot in pending.slots}

    def count(self, slots: Sequence[int] | None) -> tuple[int, int]:
        """How many of these slots (None: all) are ready, and how many in flight."""
        if slots is None:
            return self.num_ready, self.num_in_flight
        ready = self.unreceived() if self.ready else ()
        num_ready = sum(slot in ready for slot in slots)
        return num_ready, sum(self.in_flight[slot] for slot in slots)

    def busy(self, slot_set: SlotSet) -> list[int]:
        """Those slots of the route that are in flight, or ready and not received."""
        rows = slot_set.rows
        if not self.ready and isinstance(rows, slice) and 1 not in self.in_flight[rows]:
            return []
        ready = {slot for pending in self.ready for slot in pending.slots}
        return [slot for slot in slot_set.slots.tolist() if self.in_flight[slot] or slot in ready]


def _is_plain(pending: Pending) -> bool:
    """Whether this is no more than a step of all slots of a worker."""
    command, part = pending.command, pending.part
    return (
        command.op is Op.STEP
        and command.slots is None
        and command.payload is None
        and part is not None
        and part.is_whole
        and not pending.unwanted
    )


class PlainSteps:
    """Decides what goes by the lane, and what is on it."""

    def __init__(
        self,
        workers: Workers,
        inflight: Inflight,
        slot_sets: SlotSets,
        episodes: Episodes,
        batch_reader: BatchReader,
        recovery: Recovery,
    ) -> None:
        self._workers, self._inflight, self._slot_sets = workers, inflight, slot_sets
        self._episodes, self._batch_reader, self._recovery = episodes, batch_reader, recovery
        self._num_slots = slot_sets.num_slots
        self._has_pages = workers.data.pages is not None
        self._clear: FastPath | None = None
        """The lane, while nothing has been done by the books since they were found to be empty."""
        self.has_replies = False
        """Whether there were any when last somebody waited: such steps are none for the lane."""

    def fast_path_for(self, slot_set: SlotSet) -> FastPath | None:
        """The lane, if there is nothing to be said against a plain step of this route."""
        if slot_set.workers is None or self._episodes.num_needing_reset:
            return None
        fast_path = self._clear or self._found_clear()
        if fast_path is None:
            return None
        under_way = fast_path.under_way
        for worker in slot_set.workers:
            if under_way[worker]:
                return None
        return fast_path

    def _found_clear(self) -> FastPath | None:
        fast_path, inflight = self._workers.fast_path, self._inflight
        if (
            self._workers.are_all_up
            and not self.has_replies
            and not self._batch_reader.spills
            and not self._recovery.blocked
            and not any(handle.is_dead for handle in self._workers.handles)
            and (inflight.is_empty or inflight.hand_back(fast_path))
        ):
            self._clear = fast_path
        return self._clear

    def collect(
        self, chosen: SlotSet | None, min_slots: int | None, limit_s: float | None
    ) -> tuple[SlotSet, int] | None:
        """Wait for what is on the lane, of these slots if some are chosen.

        Returns what can be handed out, and its page; or None if that is not enough, or something
        about it is special.
        """
        fast_path, recovery = self._clear, self._recovery
        workers = self._slot_sets.everything.workers if chosen is None else chosen.workers
        if fast_path is None or workers is None:
            return None
        under_way = fast_path.under_way
        if chosen is None:
            if not any(under_way):
                return None
        elif not all(under_way[worker] for worker in workers):
            return None
        is_patient = chosen is None and min_slots is None
        if not is_patient and recovery.is_any_silent(fast_path, time.monotonic()):
            return None  # those who are done must not hide one who hangs
        check_s, num_slots = recovery.check_s, self._num_slots
        page = self._page_of(fast_path, workers) if self._has_pages else 0
        done = fast_path.collect(
            workers,
            num_slots if min_slots is None or min_slots > num_slots else min_slots,
            check_s if limit_s is None or limit_s > check_s else limit_s,
        )
        if done is None:
            return None
        if chosen is not None and len(done) == len(workers):
            return chosen, page
        return self._slot_sets.of_workers(done), page

    def _page_of(self, fast_path: FastPath, workers: tuple[int, ...]) -> int:
        """The one page that these workers write what is under way into, if it is one."""
        pages = {fast_path.page_of(worker) for worker in workers if fast_path.under_way[worker]}
        return pages.pop() if len(pages) == 1 else 0

    def leave(self) -> bool:
        """Enter what is on the lane into the books, where all else can see it; is there any?"""
        self._clear = None
        fast_path = self._workers.fast_path
        if not any(fast_path.under_way):
            return False
        self._inflight.enter(fast_path, self._slot_sets.everything.parts)
        return True
