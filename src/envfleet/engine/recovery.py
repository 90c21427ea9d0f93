"""What is done about failures: exceptions, deaths and silences of workers.

`supervision` decides, this carries out: raise, rebuild one environment where it is, put a new
worker in the place of a lost one, let its slots go on in this process, or quarantine. A slot that
comes back is asked again what it was last asked:

    restart   the new environment answers with a truncated row, and begins a new episode
    resume    the new environment is driven to where the lost one stood, by the plan of its episode
              and the actions since; then it gives the answer that the lost one would have given
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envfleet.engine.backends.base import WorkerHandle
from envfleet.engine.episodes import FailureEvent
from envfleet.engine.host import ReturnOrder, SlotState
from envfleet.engine.incident import Incident
from envfleet.engine.inflight import MOVES, Pending
from envfleet.engine.messages import EnvFailure, Op
from envfleet.engine.options import Autoreset, Deadlines, OnFailure, RestartPolicy
from envfleet.engine.return_orders import FleetParts, ReturnOrders
from envfleet.engine.silences import Silences
from envfleet.engine.snapshot import Snapshot
from envfleet.engine.supervision import COMES_BACK, Decision, RecentFailures, decide
from envfleet.errors import (
    DeadlineExceeded,
    EnvConstructionFailed,
    EnvfleetError,
    EnvNotRegistered,
    NoNewProcess,
    ResumeFailed,
    SlotQuarantined,
    SnapshotError,
    StartTimeout,
    WorkerDied,
    describe_exit,
    level_of_caller,
)


@dataclass(slots=True)
class _Loss:
    """A lost worker, from its end until its slots go on."""

    worker: int
    event: FailureEvent
    error: EnvfleetError
    is_known: bool
    """It is known that the event's slot was the one; else it may have been any, or none."""
    since_s: float
    """Since when its slots have done nothing, as far as that is not counted yet."""
    incident: Incident | None = None
    falls_back: bool = False
    lacks_process_since_s: float | None = None
    """Since when there has been no process for its successor."""

    def fails_again(self, error: EnvfleetError, slot: int | None) -> None:
        """The successor did not come up: that is one more failure, with its own reason.

        `slot` is the one whose environment was being built, if that is known.
        """
        self.error = error
        reason = str(error).partition("\n")[0]
        exit_code = getattr(error, "exitcode", None)
        self.is_known = slot is not None
        self.event = replace(
            self.event,
            slot=self.event.slot if slot is None else slot,
            doing="a restart",
            reason=reason,
            text="",
            exit_code=exit_code,
            plan=None,
        )


class Recovery:
    """Carries out what failures of a fleet lead to."""

    def __init__(
        self,
        parts: FleetParts,
        *,
        autoreset: Autoreset,
        deadlines: Deadlines,
        on_failure: OnFailure,
        restarts: RestartPolicy,
    ) -> None:
        self._workers, self._inflight, self._slot_sets, self._episodes, self._batch_reader = parts
        self._orders = ReturnOrders(parts, autoreset)
        self._on_failure, self._restarts = on_failure, restarts
        self._resumes = on_failure == "resume"
        self.coming: dict[int, _Loss] = {}
        """Workers that are being replaced, and by whose loss."""
        self.blocked: dict[int, EnvfleetError] = {}
        """Slots that are lost for good, and why."""
        self.errors: list[EnvfleetError] = []
        """To be raised to the caller, oldest first."""
        self.silences = Silences(self._workers, self._inflight, deadlines)

    # ---- an environment raised ------------------------------------------------------------------

    def on_failures(self, pending: Pending, failures: list[EnvFailure]) -> None:
        """Some slots of `pending` failed: take them out of it and see to each."""
        assert pending.part is not None
        worker = pending.part.worker
        handle = self._workers.handles[worker]
        native = [one for one in failures if self._workers.facts[one.slot].native]
        if native and self._on_failure == "restart":  # such a one comes back with its worker only
            event = self._event_of(pending, native[0], self._slots_of(handle))
            owed = [pending, *self._inflight.outstanding[worker]]
            error = native[0].as_error(self._together(native[0].slot))
            self._lose(handle, event, error, owed, is_known=True)
            return
        left, is_return = set(pending.slots), pending.command.op in (Op.REBUILD, Op.RESUME)
        for failure in failures:
            if failure.slot not in left:
                continue  # it is seen to already
            together = self._together(failure.slot)
            left.difference_update(together)
            asked = self._take_back(worker, failure.slot) if is_return else pending
            self._see_to(asked, failure, together)
        pending.part = self._slot_sets.part_of(sorted(left)) if left else None

    def _see_to(
        self, pending: Pending | None, failure: EnvFailure, together: Sequence[int]
    ) -> None:
        """The environment that fills these slots raised, in `pending` or while it came back."""
        slot = failure.slot
        if failure.doing == Op.RESUME.phrase and failure.kind == SnapshotError.__name__:
            self._stop_at(ResumeFailed(slot, failure.reason.partition(": ")[2]), None, [slot])
            return
        if self._is_repeated(pending, failure):
            self._give_back_reset(pending, failure, together)
            return
        incident = self._episodes.record(self._event_of(pending, failure, tuple(together)))
        verdict = self._decide(slot, failure.doing)
        if verdict is Decision.REBUILD:
            if not self._resumes:
                self._batch_reader.attach(incident, [slot], set())
            self._rebuild(pending, slot, failure.reason)
            return
        error = failure.as_error(together)
        if verdict is Decision.QUARANTINE:
            error = self._quarantine(slot, incident, error)
        self._stop_at(error, pending, together)

    def _stop_at(
        self, error: EnvfleetError, pending: Pending | None, together: Sequence[int]
    ) -> None:
        """These slots do not go on by themselves; their caller hears why, if it still waits."""
        for slot in together:
            self._inflight.lose(slot)
        self._episodes.lose(list(together))
        if pending is None or not set(together) <= pending.unwanted:
            self.errors.append(error)

    def _is_repeated(self, pending: Pending | None, failure: EnvFailure) -> bool:
        """Whether a reset raised the same in the environment that this one was made to replace.

        Then it always will: its plan asks for something that does not exist, for example.
        """
        return (
            self._resumes
            and failure.doing == "reset"
            and pending is not None
            and pending.failed_before == failure.reason
        )

    def _give_back_reset(
        self, pending: Pending | None, failure: EnvFailure, together: Sequence[int]
    ) -> None:
        """A reset that cannot work is its caller's matter, and not a failure of the slot."""
        failures_of, slot = self._episodes.failures_of, failure.slot
        failures_of[slot] = RecentFailures(failures_of[slot].failures[:-1])
        error = failure.as_error(together)
        error.add_note("It raised the same in a new environment, so it is not tried again.")
        self._stop_at(error, pending, together)

    def _together(self, slot: int) -> Sequence[int]:
        """All slots of the environment that fills this one."""
        return self._workers.facts[slot].together or (slot,)

    def _take_back(self, worker: int, slot: int) -> Pending | None:
        """What the slot is to do behind a return that failed: there is no environment to do it."""
        follower = self._owed_by(worker, slot)
        if follower is None:
            return None
        asked = replace(follower)
        self._take_out(follower, [slot])
        return asked

    def _owed_by(self, worker: int, slot: int, ops: Sequence[Op] = MOVES) -> Pending | None:
        """The step or reset of this slot that its worker has not answered."""
        for pending in self._inflight.outstanding[worker]:
            if pending.command.op in ops and slot in pending.slots:
                return pending
        return None

    def _take_out(self, pending: Pending, slots: Sequence[int]) -> None:
        """This step or reset does not answer for these slots any more."""
        left = [slot for slot in pending.slots if slot not in slots]
        if not left:
            pending.part, pending.is_done = None, True
            return
        command = pending.command
        payload = command.payload
        if payload is not None:
            payload = [self._orders.share_of(pending, slot) for slot in left]
        pending.command = command._replace(slots=left, payload=payload)
        pending.part = self._slot_sets.part_of(left)

    def _rebuild(self, pending: Pending | None, slot: int, reason: str) -> None:
        """A new environment for one slot, which is then asked again what the old one was asked.

        `reason` is what the old one raised.
        """
        order: ReturnOrder
        part = self._slot_sets.part_of([slot])
        self._batch_reader.mend_rows([slot])  # its last observation may be what could not be sent
        if self._resumes:
            try:
                order = self._orders.resume(slot, pending)
            except ResumeFailed as exc:
                self._stop_at(exc, None, [slot])
                return
        else:
            order = self._orders.restart(slot)
        self._inflight.post_part(Op.REBUILD, part, [order])
        if pending is None:
            return
        payload = None
        if pending.command.op is Op.RESET:
            payload = [self._orders.plan_of(pending, slot)]
        elif pending.command.payload is not None:
            # after a restart the action is not taken, but it is read, and what it spilled is not
            # in the slab
            payload = [self._orders.share_of(pending, slot)]
        again = self._inflight.post_part(pending.command.op, part, payload)
        again.unwanted, again.failed_before = pending.unwanted & {slot}, reason

    # ---- a worker is lost -----------------------------------------------------------------------

    def on_death(self, handle: WorkerHandle) -> None:
        """A worker ended without being asked to."""
        owed = list(self._inflight.outstanding[handle.worker])
        status = handle.status()
        op, slot = status.op, status.slot
        if op is Op.IDLE and owed:
            op = owed[0].command.op
        is_known = slot is not None
        if slot is None:
            slot = owed[0].slots[0] if owed and owed[0].slots else handle.first
        slots, exit_code, stack = self._slots_of(handle), handle.exit_code(), handle.stack()
        reason = describe_exit(exit_code)
        plan = self._orders.plan_of(owed[0], slot) if op is Op.RESET and _is_move(owed) else None
        event = FailureEvent(
            "death", handle.worker, slot, slots, op.phrase, reason, stack, exit_code, plan
        )
        restart_helps = self._on_failure == "raise"
        error = WorkerDied(handle.worker, slots, exit_code, op.phrase, stack, restart_helps)
        self._lose(handle, event, error, owed, is_known=is_known)

    def check_silences(self, now_s: float) -> None:
        """Give up the workers that have stood at one place for too long."""
        for late in self.silences.overdue(now_s, self.coming.keys()):
            handle, op, slot = late.handle, late.op, late.slot
            stack, slots = handle.stack(), self._slots_of(handle)
            is_reset = op is Op.RESET and _is_move([late.oldest])
            event = FailureEvent(
                "timeout",
                handle.worker,
                slot,
                slots,
                op.phrase,
                f"no answer for {late.limit_s:g} s",
                stack,
                None,
                self._orders.plan_of(late.oldest, slot) if is_reset else None,
            )
            limit_s, option = late.limit_s, late.option
            error = DeadlineExceeded(slot, handle.worker, op.phrase, limit_s, option, stack)
            owed = list(self._inflight.outstanding[handle.worker])
            self._lose(handle, event, error, owed, is_known=late.is_known, since_s=late.since_s)

    def _lose(
        self,
        handle: WorkerHandle,
        event: FailureEvent,
        error: EnvfleetError,
        owed: list[Pending],
        *,
        is_known: bool,
        since_s: float | None = None,
    ) -> None:
        """A worker cannot go on: give its slots up, or put another in its place.

        `since_s` says since when it has done nothing, if not since now.
        """
        outstanding = self._inflight.outstanding[handle.worker]
        outstanding.clear()
        self.silences.forget(handle.worker)
        for pending in owed:
            if self._is_asked_again(pending):
                pending.is_done = False
                outstanding.append(pending)
            else:
                pending.is_done, pending.error = True, error
        since_s = time.monotonic() if since_s is None else since_s
        self._replace(_Loss(handle.worker, event, error, is_known, since_s))

    def _is_asked_again(self, pending: Pending) -> bool:
        """Whether the successor of a lost worker is asked what that one did not answer."""
        op = pending.command.op
        if op in MOVES:
            return True
        if op in (Op.REBUILD, Op.RESUME) or not pending.group:
            return False  # these are made anew
        return self._resumes or (op is Op.QUEUE and self._on_failure != "raise")

    def _replace(self, loss: _Loss) -> None:
        while True:
            loss.incident = self._episodes.record(loss.event)
            verdict = self._decide(loss.event.slot, loss.event.doing, loss)
            if verdict is Decision.QUARANTINE:
                loss.error = self._quarantine(loss.event.slot, loss.incident, loss.error)
            left = tuple(slot for slot in loss.event.slots if slot not in self.blocked)
            if verdict is Decision.QUARANTINE and loss.is_known and left:
                self._go_on_without(loss.worker, self._together(loss.event.slot), loss.error)
            elif verdict in (Decision.RAISE, Decision.QUARANTINE):
                return self._fail(loss.worker, loss.error)
            loss.event = replace(loss.event, slots=left)
            loss.falls_back = verdict is Decision.FALL_BACK
            try:
                self._launch(loss)
                break
            except NoNewProcess as exc:
                loss.lacks_process_since_s = time.monotonic()
                warnings.warn(
                    f"{exc}. It is tried again for {self._workers.start_limit_s:g} s",
                    RuntimeWarning,
                    stacklevel=level_of_caller(),
                )
                break
            except EnvfleetError as exc:
                if loss.falls_back:
                    return self._fail(loss.worker, exc)
                loss.fails_again(exc, self._being_built(loss.worker, exc))
            except BaseException:  # no process to be had, or Ctrl-C: there is no successor
                self._give_up(loss.worker, loss.error)
                raise
        self._batch_reader.mend_rows(loss.event.slots)
        self._inflight.hold(loss.worker)
        self.coming[loss.worker] = loss

    def _launch(self, loss: _Loss) -> None:
        """Put a successor in the place of a lost worker."""
        self._workers.replace(loss.worker, in_process=loss.falls_back, absent=self.blocked.keys())
        self._inflight.steps = self._workers.fast_path
        loss.lacks_process_since_s = None

    def _has_come(self, loss: _Loss) -> bool:
        """Whether a successor is up; one that there was no process for is tried again."""
        since_s = loss.lacks_process_since_s
        if since_s is None:
            return self._workers.has_come(loss.worker)
        try:
            self._launch(loss)
        except NoNewProcess:
            if time.monotonic() - since_s >= self._workers.start_limit_s:
                loss.falls_back = True  # no other try
                raise
        return False

    def _go_on_without(self, worker: int, slots: Sequence[int], error: EnvfleetError) -> None:
        """These slots have been given up: the worker's others are asked again, and these never."""
        self.errors.append(error)
        outstanding = self._inflight.outstanding[worker]
        for pending in list(outstanding):
            if set(slots).isdisjoint(pending.slots):
                continue
            if set(slots) >= set(pending.slots) or pending.command.op not in MOVES:
                outstanding.remove(pending)
                pending.is_done, pending.error = True, error
            else:
                self._take_out(pending, slots)
        for slot in slots:
            self._inflight.lose(slot)
        self._episodes.lose(list(slots))
        self._batch_reader.mend_rows(slots)

    def _being_built(self, worker: int, error: EnvfleetError) -> int | None:
        """Whose environment a successor that did not come up was building, if that is known."""
        if isinstance(error, EnvConstructionFailed | EnvNotRegistered):
            return error.slot
        if isinstance(error, WorkerDied | StartTimeout):
            return self._workers.handles[worker].status().slot
        return None

    def welcome(self) -> None:
        """Let successors that have come up go on; one that could not is one more failure."""
        for worker, loss in list(self.coming.items()):
            try:
                if not self._has_come(loss):
                    continue
            except EnvfleetError as exc:
                del self.coming[worker]
                if loss.falls_back:
                    self._fail(worker, exc)
                else:
                    loss.fails_again(exc, self._being_built(worker, exc))
                    self._replace(loss)
                continue
            del self.coming[worker]
            self._settle(loss)

    def _settle(self, loss: _Loss) -> None:
        assert loss.incident is not None
        event, unreceived = loss.event, self._inflight.unreceived()
        failures_of = self._episodes.failures_of
        failures_of[event.slot] = failures_of[event.slot].moved(time.monotonic() - loss.since_s)
        self._batch_reader.forget_worker(loss.worker, unreceived)
        if not self._resumes:
            self._batch_reader.attach(loss.incident, event.slots, unreceived)
        if loss.falls_back:
            warnings.warn(
                f"{_slots_go(event.slots)} on in this process: {loss.error}",
                RuntimeWarning,
                stacklevel=level_of_caller(),
            )
        if self._resumes:
            self._resume(loss.worker, event.slots)
            return
        held = self._inflight.let_go(loss.worker)
        self._bring_back(event)
        for pending in held:
            self._inflight.again(pending)

    def _resume(self, worker: int, slots: Sequence[int]) -> None:
        """Bring a new worker to where the lost one stood, and ask it again what that one owes."""
        orders = []
        for slot in slots:
            try:
                owed = self._owed_by(worker, slot, (*MOVES, Op.RESTORE))
                order = self._orders.resume(slot, owed)
            except ResumeFailed as exc:
                self._take_back(worker, slot)
                self._stop_at(exc, None, [slot])
                queued = self._episodes.queued(slot)
                order = Snapshot(None, None, SlotState.UNUSABLE, queued)
            orders.append(order)
        held = self._inflight.let_go(worker)
        self._inflight.post_part(Op.RESUME, self._slot_sets.part_of(slots), orders)
        for pending in held:
            if pending.part is not None:
                self._inflight.again(pending)

    def _bring_back(self, event: FailureEvent) -> None:
        """Tell a new worker that its slots owe a truncated row."""
        part = self._slot_sets.part_of(event.slots)
        later = [(slot, plan) for slot in event.slots for plan in self._episodes.queued(slot)]
        orders = self._orders.restart_all(event.slots)
        self._inflight.post_part(Op.RESUME, part, orders)
        if later:
            slots, plans = [slot for slot, _ in later], [plan for _, plan in later]
            self._inflight.post_part(Op.QUEUE, part, plans, slots)

    def _fail(self, worker: int, error: EnvfleetError) -> None:
        """Give the worker up; the caller hears of it next."""
        self._give_up(worker, error)
        self.errors.append(error)

    def _give_up(self, worker: int, error: EnvfleetError) -> None:
        handle = self._workers.handles[worker]
        self._workers.dismiss(worker)
        for pending in self._inflight.let_go(worker):
            pending.is_done, pending.error = True, error
        for slot in self._slots_of(handle):
            self._inflight.lose(slot)
            self.blocked.setdefault(slot, error)

    def _event_of(
        self, pending: Pending | None, failure: EnvFailure, slots: tuple[int, ...]
    ) -> FailureEvent:
        slot = failure.slot
        return FailureEvent(
            "exception",
            int(self._slot_sets.worker_of[slot]),
            slot,
            slots,
            failure.doing,
            failure.reason,
            failure.traceback,
            plan=self._orders.plan_of(pending, slot) if failure.doing == "reset" else None,
        )

    def _quarantine(self, slot: int, incident: Incident, error: EnvfleetError) -> EnvfleetError:
        failures = len(self._episodes.failures_of[slot].failures)
        quarantined = SlotQuarantined(slot, failures, self._restarts.window_s, str(incident))
        quarantined.__cause__ = error
        self.blocked.update(dict.fromkeys(self._together(slot), quarantined))
        return quarantined

    def _decide(self, slot: int, doing: str, loss: _Loss | None = None) -> Decision:
        """What one more failure of this slot leads to; without a loss it raised."""
        failures_of, now_s, lost_s = self._episodes.failures_of, time.monotonic(), 0.0
        if loss is not None:
            lost_s, loss.since_s = now_s - loss.since_s, now_s
        failures_of[slot], verdict = decide(
            failures_of[slot],
            now_s,
            self._on_failure,
            self._restarts,
            is_lost=loss is not None,
            was_late=loss is not None and loss.event.kind == "timeout",
            lost_s=lost_s,
            has_worked=slot not in self._episodes.failing,
        )
        self._episodes.note_failure(slot, doing, comes_back=verdict in COMES_BACK)
        return verdict

    def _slots_of(self, handle: WorkerHandle) -> tuple[int, ...]:
        return tuple(range(handle.first, handle.first + handle.count))


def _is_move(owed: Sequence[Pending]) -> bool:
    """Whether the oldest of what is owed is a step or a reset, and not the replay of some."""
    return bool(owed) and owed[0].command.op in MOVES


def _slots_go(slots: tuple[int, ...]) -> str:
    return f"slot {slots[0]} goes" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]} go"
