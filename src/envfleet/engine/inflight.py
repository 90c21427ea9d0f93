"""The one record of what is under way: commands not yet answered, answers not yet received.

A slot has at most one step or reset in flight. Commands of one worker are answered in the order
in which they were posted, so a reply belongs to the oldest one outstanding.

A plain step, of all slots of a worker that owes nothing else, is a byte in `plain` and nothing
more. Its backend sets and clears the byte. Everything else has a `Pending`; before anything else is
done, `enter` makes one of each plain step that is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from envfleet.engine.backends.base import FastPath, WorkerHandle
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.messages import Command, Op, Reply
from envfleet.engine.slots import SlotSet, SlotSets, WorkerPart
from envfleet.errors import EnvfleetError

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
    """Slots whose answer is not wanted any more: it is taken and dropped."""
    is_done: bool = False
    reply: Reply | None = None
    error: EnvfleetError | None = None
    """Why there will be no reply."""
    failed_before: str | None = None
    """What an environment raised that was asked the same, and has been replaced since."""

    @property
    def slots(self) -> list[int]:
        """The slots that it will answer for."""
        return [] if self.part is None else self.part.slots.tolist()


class Inflight:
    """Commands on their way, per worker in order, and which slots they hold."""

    def __init__(
        self, slot_sets: SlotSets, handles: Sequence[WorkerHandle], steps: FastPath
    ) -> None:
        """`handles` is the list in which a lost worker is replaced by its successor."""
        self._slot_sets, self._handles = slot_sets, handles
        self.steps = steps
        """How plain steps are posted and collected."""
        self.plain = steps.under_way
        """By worker, whether it has a plain step under way; it owes nothing else then."""
        self.outstanding: list[deque[Pending]] = [deque() for _ in handles]
        self.ready: list[Pending] = []
        """Answered steps and resets that were not received yet, oldest first."""
        self.num_ready = 0
        self.reset_slots: set[int] = set()
        """Slots whose answer that waits to be received is that of a reset."""
        # bytes are set and cleared in a fraction of an array's time, and this is done per step
        self.in_flight = bytearray(slot_sets.num_slots)
        """The slots of steps and resets that have a `Pending`."""
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
        """Whether no command is outstanding, other than plain steps, and none to be received."""
        return not self.num_in_flight and not self.ready and not any(self.outstanding)

    def is_free(self, workers: tuple[int, ...]) -> bool:
        """Whether these workers live and owe nothing, and nothing waits to be received."""
        if self.ready or self._held:
            return False
        handles, outstanding, plain = self._handles, self.outstanding, self.plain
        for worker in workers:
            if plain[worker] or outstanding[worker] or handles[worker].is_dead:
                return False
        return True

    def is_posted(self, slot_set: SlotSet) -> bool:
        """Whether a step of these slots is under way: all of it is, or nothing."""
        part = slot_set.parts[0]
        return bool(self.plain[part.worker]) or self.is_any_in_flight(part.slots.tolist())

    def collect(
        self, chosen: SlotSet | None, min_slots: int | None, limit_s: float, *, has_pages: bool
    ) -> tuple[SlotSet, int] | None:
        """Wait for plain steps, of these slots or (None) of all, if nothing else is under way.

        Returns the slots that are done, and the page that they are on. Returns None if they are not
        enough when the time is up, or if an answer is not plain.
        """
        everything, plain = self._slot_sets.everything, self.plain
        if chosen is None:
            if self.ready or self.num_in_flight or not any(plain):
                return None
            workers = everything.workers
        else:
            workers = chosen.workers
            if workers is None or not all(plain[worker] for worker in workers):
                return None
        assert workers is not None
        num_slots, page = self._slot_sets.num_slots, 0
        if has_pages:
            pages = {self.steps.page_of(worker) for worker in workers if plain[worker]}
            page = pages.pop() if len(pages) == 1 else 0
        wanted = num_slots if min_slots is None or min_slots > num_slots else min_slots
        done = self.steps.collect(workers, wanted, limit_s)
        if done is None:
            return None
        if len(done) == len(workers):
            return chosen or everything, page
        return self._slot_sets.of_workers(done), page

    def enter(self) -> bool:
        """Make a `Pending` of each plain step under way, as if it had been posted; is there any?"""
        if not any(self.plain):
            return False
        for part in self._slot_sets.everything.parts:
            if self.plain[part.worker]:
                # in this order a signal handler may raise in between: it is then entered again
                self._mark(part, b"\1")
                self.num_in_flight = self.in_flight.count(1)
                if not self.outstanding[part.worker]:
                    command = Command(self.steps.request_of(part.worker), Op.STEP)
                    self.outstanding[part.worker].append(Pending(command, part))
                self.plain[part.worker] = 0
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
        """What these slots have in flight or ready is not wanted; returns what was ready."""
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
        """Whether what any of these slots has in flight or ready is wanted."""
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
        """Those slots of the set that are in flight, or ready and not received."""
        rows = slot_set.rows
        is_any_plain = any(self.plain)
        is_nothing_else = not self.ready and not is_any_plain
        if is_nothing_else and isinstance(rows, slice) and 1 not in self.in_flight[rows]:
            return []
        found = self.unreceived()
        if is_any_plain:
            for part in self._slot_sets.everything.parts:
                if self.plain[part.worker]:
                    found.update(part.slots.tolist())
        return [slot for slot in slot_set.slots.tolist() if self.in_flight[slot] or slot in found]
