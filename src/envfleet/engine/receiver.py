"""Taking in what workers answer: wait, complete commands, note episodes, have failures seen to.

The fleet posts commands and hands out batches. Between the two, everything that is not a plain step
goes through here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine.backends.base import WorkerHandle
from envfleet.engine.batch import Batch, any_set
from envfleet.engine.checks import check_blocked, check_whole, together_of
from envfleet.engine.host import SlotState
from envfleet.engine.inflight import MOVES, Pending
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.messages import Op, Reply
from envfleet.engine.options import Autoreset, ResetPlan
from envfleet.engine.recovery import Recovery
from envfleet.engine.return_orders import FleetParts
from envfleet.engine.slots import Slots, SlotSet, is_enough
from envfleet.errors import EnvfleetError, NothingSent, ResetNeeded, StillInFlight

Flags = npt.NDArray[np.bool_]


class Receiver:
    """Waits for workers and keeps all records in step with what they answer."""

    def __init__(
        self, parts: FleetParts, recovery: Recovery, *, autoreset: Autoreset, poison: bool
    ) -> None:
        self._workers, self._inflight, self._slot_sets, self._episodes, self._batch_reader = parts
        self._recovery = recovery
        self._autoreset, self._poison = autoreset, poison
        self._together = together_of(self._workers.facts)
        self._is_native = all(facts.native for facts in self._workers.facts)
        self._begins_plainly = autoreset != "disabled" and not self._is_native
        """Slots may begin episodes by themselves, and those may be noted all at once."""
        self.wait_s = self.copy_s = 0.0
        """How long this process has waited for workers, and copied actions and rows."""
        self.num_noted = 0
        """How often ends and beginnings were noted that must be noted once."""

    # ---- waiting --------------------------------------------------------------------------------

    def advance(self, timeout_s: float | None, *, want_all: bool) -> None:
        """Wait for news of the workers that owe something, take it in, and see to failures."""
        recovery, handles = self._recovery, self._workers.handles
        silences = recovery.silences
        outstanding = self._inflight.outstanding
        busy = [handles[worker] for worker, owed in enumerate(outstanding) if owed]
        if recovery.coming:
            busy = [handle for handle in busy if handle.worker not in recovery.coming]
            want_all = False  # some have answers to give, and others come up
        limit_s = silences.check_s if timeout_s is None else min(silences.check_s, timeout_s)
        started_s = time.monotonic()
        self._workers.wait(busy, limit_s, want_all=want_all)
        now_s = time.monotonic()
        silences.note_wait(now_s - started_s, limit_s, now_s)
        is_check_due = silences.is_check_due(now_s)
        if is_check_due:  # a worker that has answered is not silent: take in what was left out
            self._workers.wait(busy, 0.0, want_all=False)
        with uninterrupted:
            for handle in busy:
                self._take_from(handle)
            if is_check_due:
                recovery.check_silences(now_s)
            if recovery.coming:
                recovery.welcome()
        if recovery.errors:
            _raise_first(recovery.errors)

    def receive(
        self,
        slot_set: SlotSet | None,
        min_slots: int | None = None,
        timeout_s: float | None = None,
        called_s: float = 0.0,
    ) -> Batch:
        """`Fleet.recv` of what is not, or no longer, plain steps."""
        started_s = time.perf_counter()
        self._wait_for(slot_set, min_slots, timeout_s, called_s)
        now_s = time.perf_counter()
        self.wait_s += now_s - started_s
        with uninterrupted:
            slots, rows = self._take_ready(slot_set)
            batch = self._batch_reader.batch(slots, rows)
            if batch.has_events or self._episodes.has_ended or self._episodes.failing:
                self.note_events(batch, rows)
        self.copy_s += time.perf_counter() - now_s
        return batch

    def _wait_for(
        self,
        slot_set: SlotSet | None,
        min_slots: int | None,
        timeout_s: float | None,
        called_s: float,
    ) -> None:
        """Wait until enough of these slots (None: all that are in flight) are ready."""
        if self._inflight.enter():
            self.advance(0.0, want_all=False)  # a silence is counted from its first look
        inflight = self._inflight
        if slot_set is None and not inflight.ready and not inflight.num_in_flight:
            raise NothingSent("recv has nothing to wait for: no slot is in flight. Call send first")
        chosen = None if slot_set is None else slot_set.slots.tolist()
        now_s = time.perf_counter()
        give_up_s = None if timeout_s is None else max(called_s + timeout_s, now_s)
        while not is_enough(*inflight.count(chosen), min_slots):
            left_s = None if give_up_s is None else give_up_s - now_s
            if left_s is not None and left_s < 0:
                break
            self.advance(left_s, want_all=min_slots is None and chosen is None)
            now_s = time.perf_counter()

    # ---- asking ---------------------------------------------------------------------------------

    def ask(
        self, slot_set: SlotSet, op: Op, payload: Sequence[Any] | None = None
    ) -> dict[int, Any]:
        """Ask the workers of these slots and wait; `payload` has one item per slot.

        Returns values by slot, or raises what went wrong.
        """
        return _results(self._ask(lambda: self._inflight.post(slot_set, op, payload)))

    def ask_alike(self, slot_set: SlotSet, op: Op, payload: Any) -> dict[int, Any]:
        """`ask`, with one payload for all."""
        return _results(self._ask(lambda: self._inflight.post_shared(slot_set, op, payload)))

    def post_alike(self, slot_set: SlotSet, op: Op, payload: Any) -> list[Pending]:
        """Start what `ask_alike` does; `answers` brings the results."""
        with uninterrupted:
            return self._inflight.post_shared(slot_set, op, payload)

    def answers(self, group: list[Pending], timeout_s: float | None) -> dict[int, Any]:
        """Wait for commands that were posted; past `timeout_s` their answers are dropped."""
        return _results(self._ask(lambda: group, timeout_s))

    def ask_for_all(self, slot_set: SlotSet, plans: Sequence[ResetPlan]) -> None:
        """Give each of these slots its plan for the next autoreset, or none of them."""
        group: list[Pending] = []

        def post() -> list[Pending]:
            group.extend(self._inflight.post(slot_set, Op.QUEUE, plans))
            return group

        try:
            _results(self._ask(post))
        except EnvfleetError:
            while not all(pending.is_done for pending in group):
                with contextlib.suppress(EnvfleetError):  # the first of them is on its way
                    self.advance(None, want_all=True)
            with uninterrupted:
                for pending in group:
                    has_failed = pending.error or (pending.reply and pending.reply.failures)
                    if pending.part is not None and not has_failed:
                        slots = pending.slots
                        self._episodes.unqueue(slots)
                        none = [None] * len(slots)
                        self._inflight.post_part(Op.QUEUE, pending.part, none, slots)
            raise

    def _ask(
        self, post: Callable[[], list[Pending]], timeout_s: float | None = None
    ) -> list[Pending]:
        """Post a group of commands and wait until each has its answer, or will have none."""
        group: list[Pending] = []
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with uninterrupted:
                group = post()
            while not all(pending.is_done for pending in group):
                left_s = None if give_up_s is None else give_up_s - time.monotonic()
                if left_s is not None and left_s < 0:
                    raise TimeoutError(f"the call was not done within {timeout_s} s; it is dropped")
                self.advance(left_s, want_all=True)
        except BaseException:
            for pending in group:  # the caller is gone: what comes of it concerns no other call
                pending.unwanted |= set(pending.slots)
            raise
        return group

    # ---- what can be asked now ------------------------------------------------------------------

    def check_sendable(self, slot_set: SlotSet) -> None:
        """Refuse a step of slots that are lost, or have something in flight, or need a reset."""
        check_whole(self._together, slot_set, "step")
        self._inflight.enter()
        check_blocked(self._recovery.blocked, slot_set)
        self.check_idle(slot_set)
        episodes = self._episodes
        if episodes.num_needing_reset:
            idle = slot_set.slots[episodes.needs_reset[slot_set.slots]].tolist()
            if idle:
                raise ResetNeeded(f"slots {idle} have no running episode; call reset first")

    def check_idle(self, slot_set: SlotSet) -> None:
        """Refuse slots that have something in flight; what was dropped is waited for."""
        inflight = self._inflight
        if inflight.num_in_flight or inflight.num_ready:
            busy = inflight.busy(slot_set)
            if busy and not inflight.is_awaited(busy):  # the rest of a step that was dropped
                self.wait_out(busy)
                busy = inflight.busy(slot_set)
            if busy:
                raise StillInFlight(
                    f"slots {busy} have been sent and not yet received; call recv before sending "
                    "again"
                )

    def drop(self, slots: set[int]) -> None:
        """What these slots have in flight or ready is not going to be received."""
        self._inflight.enter()
        with uninterrupted:
            for pending in self._inflight.renounce(slots):
                self._offer(pending)

    def wait_out(self, slots: list[int]) -> None:
        """Drop what these slots have in flight, and wait until it is answered."""
        self.drop(set(slots))
        self._batch_reader.forget(slots)
        while self._inflight.is_any_in_flight(slots):
            self.advance(None, want_all=True)
        self._batch_reader.forget_infos(slots)  # failures meanwhile are told with the next rows

    # ---- answers --------------------------------------------------------------------------------

    def _take_from(self, handle: WorkerHandle) -> None:
        handles, owed = self._workers.handles, self._inflight.outstanding[handle.worker]
        for reply in handle.take():
            if handles[handle.worker] is not handle or not owed:
                break  # it was given up for an earlier answer
            self._complete(handle, reply)
        if handle.is_dead and handles[handle.worker] is handle:
            self._recovery.on_death(handle)

    def _complete(self, handle: WorkerHandle, reply: Reply | None) -> None:
        inflight = self._inflight
        pending = inflight.outstanding[handle.worker].popleft()
        pending.is_done, pending.reply = True, reply
        op = pending.command.op
        if pending.part is None:
            return
        if self._poison and op in MOVES:
            failed = {one.slot for one in reply.failures} if reply is not None else set()
            self._batch_reader.answered([slot for slot in pending.slots if slot not in failed])
        if op not in MOVES:
            self._note_done(pending)
            return
        if op is Op.RESET or reply is not None or self._batch_reader.spills:
            self._batch_reader.absorb(pending.part, reply)
            asked = pending.slots if op is Op.RESET else ()
            if reply is not None and reply.failures:
                self._recovery.on_failures(pending, reply.failures)
                if not pending.slots or not pending.is_done or pending.error is not None:
                    return
            if op is Op.RESET:
                plans = dict(zip(asked, pending.command.payload, strict=True))
                self._episodes.began(pending.slots, [plans[slot] for slot in pending.slots])
        inflight.land(pending.part)
        self._offer(pending)

    def _note_done(self, pending: Pending) -> None:
        """Keep the records in step with an answer that brings no new rows."""
        op, reply = pending.command.op, pending.reply
        failures = [] if reply is None else reply.failures
        if op in (Op.REBUILD, Op.RESUME) and failures:
            self._recovery.on_failures(pending, failures)
        elif op is Op.QUEUE and pending.group and not failures:  # without: queued once more
            self._episodes.queue(pending.slots, pending.command.payload)
        elif op is Op.RESTORE:
            self._note_restored(pending)

    def _note_restored(self, pending: Pending) -> None:
        assert pending.part is not None
        self._batch_reader.absorb(pending.part, pending.reply)
        control = self._workers.control
        failed = {failure.slot for failure in pending.reply.failures} if pending.reply else set()
        for slot, snapshot in zip(pending.slots, pending.command.payload, strict=True):
            if slot in failed:
                self._episodes.lose([slot])
                continue
            has_ended = snapshot.state == SlotState.ENDED
            self._episodes.restored(slot, snapshot)
            self._episodes.note_ends(slice(slot, slot + 1), np.array([has_ended]))
            control.terminated[slot] = has_ended
            control.truncated[slot] = False

    def _offer(self, pending: Pending) -> None:
        """Make an answered step or reset ready, without the slots that were dropped."""
        is_reset = pending.command.op is Op.RESET
        if pending.unwanted:
            dropped = [slot for slot in pending.slots if slot in pending.unwanted]
            kept = [slot for slot in pending.slots if slot not in pending.unwanted]
            if not is_reset:
                control, rows = self._workers.control, np.array(dropped, np.intp)  # none: it failed
                ended = control.terminated[rows] | control.truncated[rows]
                self._note_episodes(rows, rows, ended, control.invalid[rows])
                control.flags[:2, rows] = False
            self._batch_reader.forget(dropped)
            self._inflight.reset_slots.difference_update(dropped)
            pending.part = self._slot_sets.part_of(kept) if kept else None
        if pending.part is not None:
            self._inflight.make_ready(pending)
            if is_reset:
                self._inflight.reset_slots.update(pending.slots)

    # ---- what is handed out ---------------------------------------------------------------------

    def _take_ready(self, slot_set: SlotSet | None) -> tuple[Slots, slice | Slots]:
        """Take out what these slots (None: all) have ready, also if it was sent with others."""
        inflight = self._inflight
        if slot_set is None:
            return self._slot_sets.merge(inflight.take_ready())
        if inflight.take_ready_parts(slot_set.parts):
            return slot_set.slots, slot_set.rows
        ready, slots = inflight.unreceived(), slot_set.slots.tolist()
        missing = [slot for slot in slots if slot not in ready and not inflight.in_flight[slot]]
        if missing:
            self.check_sendable(self._slot_sets.find(missing))
            raise NothingSent(f"recv cannot wait for slots {missing}: send them first")
        here = [slot for slot in slots if slot in ready]
        for pending in inflight.take_ready_of(set(here)):
            rest = [slot for slot in pending.slots if slot not in here]
            pending.part = self._slot_sets.part_of(rest)
            inflight.make_ready(pending)
        if not here:
            return self._slot_sets.merge([])
        found = slot_set if len(here) == len(slots) else self._slot_sets.make(np.array(here))
        return found.slots, found.rows

    def note_events(self, batch: Batch, rows: slice | Slots) -> None:
        """Note the ends and beginnings that a batch tells its caller of."""
        inflight, is_same_step = self._inflight, self._autoreset == "same_step"
        if self._episodes.failing:
            ended = batch.terminated | batch.truncated
            self._episodes.note_good_rows(batch.slots, batch.valid, ended)
        if (
            self._begins_plainly
            and isinstance(rows, slice)
            and not inflight.reset_slots
            and self._episodes.note_rows(rows, is_same_step=is_same_step)
        ):
            return
        with uninterrupted:
            ended, invalid = batch.terminated | batch.truncated, ~batch.valid
            if inflight.reset_slots:  # these began by their plans, as is known already
                slots = batch.slots.tolist()
                began = [slot in inflight.reset_slots for slot in slots]
                invalid &= ~np.array(began, np.bool_)
                inflight.reset_slots.difference_update(slots)
            self._note_episodes(batch.slots, rows, ended, invalid)
            self.num_noted += 1
        if is_same_step:  # as `note_rows` does
            self._workers.control.flags[:2, rows] = False

    def note_taken(self, slot_set: SlotSet, noted_before: int) -> None:
        """A signal handler raised: plain steps that were collected are lost, but note their ends.

        Plain ends may be noted twice.
        """
        inflight, control = self._inflight, self._workers.control
        if self.num_noted != noted_before or not inflight.is_empty:
            return
        with uninterrupted:
            for part in slot_set.parts:
                if not inflight.plain[part.worker]:
                    rows = part.slots
                    ended = control.terminated[rows] | control.truncated[rows]
                    self._note_episodes(rows, rows, ended, control.invalid[rows])

    def _note_episodes(
        self, slots: Slots, rows: slice | Slots, ended: Flags, invalid: Flags
    ) -> None:
        """Take note of what the hosts of these slots did by themselves."""
        if self._is_native:
            return  # such slots cannot be replayed one by one, and their resets cannot be planned
        self._episodes.note_ends(rows, ended)
        if self._autoreset == "next_step":
            if any_set(invalid):
                self._episodes.began_by_itself(slots[invalid & ~ended])
        elif any_set(ended):
            if self._autoreset == "same_step":
                self._episodes.began_by_itself(slots[ended])
            else:
                self._episodes.set_needs_reset(slots[ended], True)


def _results(group: list[Pending]) -> dict[int, Any]:
    """Raise what went wrong with these commands; the values by slot."""
    values: dict[int, Any] = {}
    for pending in group:
        if pending.error is not None:
            raise pending.error
        if pending.reply is not None:
            if pending.reply.failures:
                raise pending.reply.failures[0].as_error()
            values.update(pending.reply.values)
    return values


def _raise_first(errors: list[EnvfleetError]) -> None:
    first = errors[0]
    for other in errors[1:]:
        first.add_note(f"At the same time: {other}")
    errors.clear()
    raise first
