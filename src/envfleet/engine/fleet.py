"""The one imperative shell: open, send, recv, call, close.

    caller ── send(actions, slots) ──► rows in shared memory ── command ──► workers
    caller ◄── recv(): Batch ───────── rows, infos, incidents ◄── reply ──── workers

`inflight` records what is under way, `episodes` remembers what was done to each slot, `recovery`
handles failures. `actions` writes actions into rows, `batch_reader` reads results out of them. Only
one thread may use a fleet at a time.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.utils.env_checker import data_equivalence

from envfleet.engine.actions import ActionWriter
from envfleet.engine.backends.base import WorkerHandle, backend_named
from envfleet.engine.backends.process.launch import refuse_unguarded_main
from envfleet.engine.batch import Batch, any_set
from envfleet.engine.batch_reader import BatchReader
from envfleet.engine.episodes import Episodes
from envfleet.engine.host import SlotState
from envfleet.engine.incident import Incident
from envfleet.engine.inflight import MOVES, Inflight, Pending, PlainSteps
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.memory import PagePlan
from envfleet.engine.messages import EnvFacts, Op, Reply
from envfleet.engine.options import (
    Autoreset,
    Deadlines,
    EnvFn,
    OnFailure,
    ResetPlan,
    RestartPolicy,
    StartMethod,
    check_count,
    check_seconds,
    one_of,
)
from envfleet.engine.recovery import Recovery, env_failed
from envfleet.engine.slots import Slots, SlotSet, SlotSets, is_enough
from envfleet.engine.snapshot import Snapshot
from envfleet.engine.workers import Workers
from envfleet.errors import (
    ConfigError,
    EnvfleetError,
    FleetClosed,
    NothingSent,
    ResetNeeded,
    SnapshotError,
    StillInFlight,
)

Flags = npt.NDArray[np.bool_]
_NO_STATE = "has no state of single slots to be taken or put back"


class Fleet:
    """Environments in slots, slots in workers, batches out. Slots may hold different ones."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        num_workers: int = 1,
        backend: str = "process",
        start_method: StartMethod = "fork",
        autoreset: Autoreset = "next_step",
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        on_failure: OnFailure = "raise",
        restarts: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        copy: bool = True,
        poison: bool = False,
        page_plan: PagePlan = PagePlan(),  # noqa: B008 - frozen
        num_here: int = 0,
    ) -> None:
        """Build the environments; returns when all of them are there.

        Args:
            env_fns: One function per slot that builds its environment where it will live.
            num_workers: Among how many workers the slots are dealt.
            backend: "serial" (here), "thread", "process", or another that was registered.
            start_method: How processes are started: "fork", "spawn" or "forkserver".
            autoreset: "next_step", "same_step" or "disabled", as Gymnasium defines them.
            deadlines: How long to wait for what.
            on_failure: "raise", "restart", "resume" or "fallback".
            restarts: How many failures of a slot "restart" forgives.
            copy: False returns views of shared memory, valid until the next send to that slot.
            poison: Fill the rows of a slot with junk when it is sent, to find views kept too long.
            page_plan: Room for the observations of many steps, see `pages`.
            num_here: So many of the slots, the last, live in this process, which steps them while
                worker processes step the others; it counts as one of the workers.
        """
        refuse_unguarded_main()
        kind = backend_named(backend)
        one_of("start_method", start_method, StartMethod)
        one_of("autoreset", autoreset, Autoreset)
        one_of("on_failure", on_failure, OnFailure)
        if not kind.can_interrupt and (deadlines.step_s or deadlines.reset_s):
            raise ConfigError(
                f"backend={backend!r} runs environments in this thread, where none can be "
                "interrupted; leave out the timeouts or use backend='process'"
            )
        if not env_fns:
            raise ConfigError("a fleet needs at least one environment; got none")
        check_count("num_workers", num_workers)
        if num_workers > len(env_fns):
            raise ConfigError(
                f"num_workers must be between 1 and the number of environments ({len(env_fns)}), "
                f"got {num_workers}"
            )
        _check_here(num_here, len(env_fns), num_workers, backend, kind.survives_crash, deadlines)
        self.num_slots, self.autoreset = len(env_fns), autoreset
        self._poison, self._can_resume = poison, on_failure == "resume"
        workers = self._workers = Workers(
            env_fns,
            backend=backend,
            start_method=start_method,
            num_workers=num_workers,
            autoreset=autoreset,
            deadlines=deadlines,
            page_plan=page_plan,
            num_here=num_here,
        )
        self._finalizer = weakref.finalize(self, workers.stop)
        together = [facts.together for facts in workers.facts if facts.together is not None]
        self._together = tuple(dict.fromkeys(together))
        """The slots of each natively vectorised environment."""
        if on_failure == "resume" and together:
            workers.stop()
            raise ConfigError(
                f"slots {together[0][0]} to {together[0][-1]} are one natively vectorised "
                "environment, which cannot be replayed slot by slot; use on_failure='restart'"
            )
        self._data = workers.data
        self._slot_sets = SlotSets(workers.bounds)
        self._inflight = Inflight(self.num_slots, workers.handles)
        self._episodes = Episodes(workers.env_fns, workers.control, can_resume=self._can_resume)
        self._batch_reader = BatchReader(
            workers.control, workers.data, self._slot_sets.worker_of, autoreset, copy=copy
        )
        self._recovery = Recovery(
            workers,
            self._inflight,
            self._slot_sets,
            self._episodes,
            self._batch_reader,
            autoreset=autoreset,
            deadlines=deadlines,
            on_failure=on_failure,
            restarts=restarts,
        )
        self._plain_steps = PlainSteps(
            workers,
            self._inflight,
            self._slot_sets,
            self._episodes,
            self._batch_reader,
            self._recovery,
        )
        self._is_native = all(facts.native for facts in workers.facts)
        # natively vectorised slots cannot be replayed one by one
        self._action_writer = ActionWriter(
            workers, None if self._is_native else self._episodes.action_log
        )
        self._is_closed, self._why_closed = False, "this fleet is closed; open a new one"
        _fleets.add(self)
        self._wait_s = self._copy_s = 0.0
        self._num_noted = 0
        """How often ends and beginnings were noted that must be noted once."""
        self._last_timings: dict[str, float] = {}
        self.incidents: list[Incident] = self._episodes.incidents
        """Every failure so far, oldest first."""

    # ---- facts ----------------------------------------------------------------------------------

    @property
    def facts(self) -> list[EnvFacts]:
        """Spaces, metadata and spec of every slot's environment."""
        return self._workers.facts

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Which slots each worker hosts, as half-open ranges."""
        return self._workers.bounds

    def worker_pids(self) -> list[int | None]:
        """The process of each worker; None for those that are none."""
        self._check_open()
        return [handle.pid for handle in self._workers.handles]

    @property
    def quarantined(self) -> dict[int, EnvfleetError]:
        """Slots that have been given up, with the reason."""
        self._check_open()
        return dict(self._recovery.blocked)

    @property
    def is_closed(self) -> bool:
        """True after `close`, and in a copy of the process that opened it."""
        return self._is_closed

    @property
    def timings(self) -> dict[str, float]:
        """Seconds so far: workers in hosts and waiting, this process waiting and copying."""
        if self.is_closed:
            return self._last_timings
        words = self._workers.control.status
        return {
            "env_s": sum(word[2] for word in words) / 1e9,
            "worker_wait_s": sum(word[3] for word in words) / 1e9,
            "wait_s": self._wait_s,
            "copy_s": self._copy_s,
        }

    def observations(self) -> Any:
        """What every slot observed last, batched."""
        self._check_open()
        if (
            self._episodes.num_needing_reset
        ):  # slots that have never been reset have nothing to show
            self._batch_reader.mend_rows(np.flatnonzero(self._episodes.needs_reset).tolist())
        everything = self._slot_sets.everything
        return self._batch_reader.observations(everything.slots, everything.rows)

    @property
    def shared_obs(self) -> npt.NDArray[Any] | None:
        """What every slot observed last, in shared memory, if these are single arrays.

        It changes with every step.
        """
        self._check_open()
        return None if self._batch_reader.is_mixed else self._data.obs[0].sole_array

    @property
    def pages(self) -> npt.NDArray[Any] | None:
        """Observations of many steps in shared memory, [page, slot], if these are single arrays.

        A step that is sent with a page has its observations written there by its workers, and they
        stay as long as nobody sends another. Pages count from 1.
        """
        self._check_open()
        return self._data.pages

    # ---- the hot path ---------------------------------------------------------------------------

    def send(
        self, actions: Any, slots: Sequence[int] | Slots | None = None, *, page: int = 0
    ) -> None:
        """Start a step of these slots (None: all); `actions` is a batch in their order.

        The observations may come by a page; the batch says if they did. Where something about a
        step is special they do not.
        """
        started_s = time.perf_counter()
        self._check_open()
        if page != 0:
            self._check_page(page)
        slot_set = self._slot_sets.find(slots)
        fast_path = self._plain_steps.fast_path_for(slot_set)
        if fast_path is None:
            self._check_together(slot_set, "step")
            self._check_sendable(slot_set)
        action_log = self._episodes.action_log
        before = action_log.now
        try:
            spills = self._action_writer.put(slot_set, actions)
            if self._can_resume:
                self._batch_reader.keep_obs(slot_set.slots, slot_set.rows)
            if self._poison:
                self._batch_reader.poison(slot_set.slots, slot_set.rows)
            if fast_path is not None and spills is None and slot_set.workers is not None:
                fast_path.post(slot_set.workers, self._inflight.next_request(), int(page))
            else:
                self._plain_steps.leave()
                self._inflight.post(slot_set, Op.STEP, spills)
        except BaseException:
            if not self._is_under_way(slot_set):
                action_log.take_out(before)  # nobody was asked to do that
            raise
        self._copy_s += time.perf_counter() - started_s

    def step(self, actions: Any, *, page: int = 0) -> Batch:
        """`send` to all slots and `recv` from all of them."""
        before = self._inflight.last_request
        try:
            self.send(actions, page=page)
            return self.recv()
        except BaseException:
            if self._inflight.last_request != before:
                self.drop()  # the rows of the other slots have nobody left to go to
            raise

    def step_plainly(
        self, actions: Any, rewards: npt.NDArray[np.float64], *, page: int = 0
    ) -> Batch | None:
        """`step` for whoever needs no infos: most of the time no batch has to be made.

        Where nothing is special about a step the rewards of all slots are put into `rewards`, the
        observations are on the page, if there was one, and in `shared_obs`, and None is returned.
        No episode has ended then, and nothing has failed.
        """
        before, noted_before = self._inflight.last_request, self._num_noted
        try:
            self.send(actions, page=page)
            called_s, self._plain_steps.has_replies = time.perf_counter(), False
            collected = self._plain_steps.collect(None, None, None)
            self._wait_s += time.perf_counter() - called_s
            if collected is None:
                return self._recv_by_books(None, None, None, called_s)
            found, used = collected
            if (
                used == page
                and not self._episodes.has_ended
                and self._batch_reader.take_plain(rewards)
            ):
                return None
            return self._hand_out(found.slots, found.rows, used)
        except BaseException:
            self._note_taken(self._slot_sets.everything, noted_before)
            if self._inflight.last_request != before:
                self.drop()
            raise

    def _is_under_way(self, slot_set: SlotSet) -> bool:
        """Whether a step of this route was posted: all of it is, or nothing."""
        fast_path, part = self._workers.fast_path, slot_set.parts[0]
        return bool(fast_path.under_way[part.worker]) or self._inflight.is_any_in_flight(
            part.slots.tolist()
        )

    def _check_page(self, page: Any) -> None:
        pages = self.pages
        is_number = isinstance(page, int | np.integer) and not isinstance(page, bool)
        if pages is None or not is_number or not 1 <= page <= len(pages):
            have = "none" if pages is None else f"1 to {len(pages)}"
            raise ConfigError(f"there is no page {page!r}: this fleet has {have}")

    def recv(
        self,
        min_slots: int | None = None,
        timeout_s: float | None = None,
        slots: Sequence[int] | Slots | None = None,
    ) -> Batch:
        """Wait for steps and resets that were sent, and return all that are done.

        Args:
            min_slots: Wait for at least this many slots; None waits for all that are in flight.
            timeout_s: After this long return what is there, perhaps nothing; 0 does not wait.
            slots: Wait for these only, and return them in this order; the others stay where they
                are.
        """
        if min_slots is not None:
            check_count("min_slots", min_slots)
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, may_be_zero=True)
        self._check_open()
        called_s = time.perf_counter()
        plain_steps = self._plain_steps
        plain_steps.has_replies = False
        slot_set = None if slots is None else self._slot_sets.find(slots)
        noted_before = self._num_noted
        try:
            collected = plain_steps.collect(slot_set, min_slots, timeout_s)
            now_s = time.perf_counter()
            self._wait_s += now_s - called_s
            if collected is not None:
                found, page = collected
                batch = self._hand_out(found.slots, found.rows, page)
                self._copy_s += time.perf_counter() - now_s
                return batch
            recovery = self._recovery
            limit_s = recovery.check_s if timeout_s is None else min(recovery.check_s, timeout_s)
            recovery.note_wait(now_s - called_s, limit_s, time.monotonic())
        except BaseException:
            self._note_taken(slot_set or self._slot_sets.everything, noted_before)
            raise
        return self._recv_by_books(slot_set, min_slots, timeout_s, called_s)

    def _recv_by_books(
        self,
        slot_set: SlotSet | None,
        min_slots: int | None,
        timeout_s: float | None,
        called_s: float,
    ) -> Batch:
        """`recv` of what is not, or no longer, on the lane."""
        if self._plain_steps.leave():
            self._advance(0.0, want_all=False)  # a silence is counted from its first look
        inflight = self._inflight
        if slot_set is None and not inflight.ready and not inflight.num_in_flight:
            raise NothingSent("recv has nothing to wait for: no slot is in flight. Call send first")
        chosen = None if slot_set is None else slot_set.slots.tolist()
        started_s = now_s = time.perf_counter()
        give_up_s = None if timeout_s is None else max(called_s + timeout_s, started_s)
        while not is_enough(*inflight.count(chosen), min_slots):
            left_s = None if give_up_s is None else give_up_s - now_s
            if left_s is not None and left_s < 0:
                break
            self._advance(left_s, want_all=min_slots is None and chosen is None)
            now_s = time.perf_counter()
        self._wait_s += now_s - started_s
        with uninterrupted:
            if slot_set is None:
                found = self._slot_sets.merge(inflight.take_ready())
            else:
                found = self._take_ready_of(slot_set)
            batch = self._hand_out(*found)
        self._copy_s += time.perf_counter() - now_s
        return batch

    def _take_ready_of(self, slot_set: SlotSet) -> tuple[Slots, slice | Slots]:
        """Take out what these slots have ready, also if it was sent together with others."""
        inflight, slots = self._inflight, slot_set.slots.tolist()
        if inflight.take_ready_parts(slot_set.parts):
            return slot_set.slots, slot_set.rows
        ready = inflight.unreceived()
        missing = [slot for slot in slots if slot not in ready and not inflight.in_flight[slot]]
        if missing:
            self._check_sendable(self._slot_sets.find(missing))
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

    def _hand_out(self, slots: Slots, rows: slice | Slots, page: int = 0) -> Batch:
        batch = self._batch_reader.batch(slots, rows, page)
        if batch.has_events or self._episodes.has_ended:
            inflight = self._inflight
            is_noted = (
                self.autoreset != "disabled"
                and isinstance(rows, slice)
                and not self._is_native
                and not inflight.reset_slots
                and self._episodes.note_rows(
                    rows.start, batch, is_same_step=self.autoreset == "same_step"
                )
            )
            if not is_noted:
                with uninterrupted:
                    ended, invalid = batch.terminated | batch.truncated, ~batch.valid
                    if inflight.reset_slots:  # these began by their plans, as is known already
                        began = [slot in inflight.reset_slots for slot in slots.tolist()]
                        invalid &= ~np.array(began, np.bool_)
                        inflight.reset_slots.difference_update(slots.tolist())
                    self._note_episodes(slots, rows, ended, invalid)
                    self._num_noted += 1
            if self.autoreset == "same_step":
                # from now on flags that are set tell of ends that no caller knows of
                self._workers.control.flags[:2, rows] = False
        return batch

    def _note_taken(self, slot_set: SlotSet, noted_before: int) -> None:
        """A signal's handler raised: what has left the lane is lost, but its ends are to be known.

        Plain ends may be noted twice.
        """
        if self._is_closed:
            return
        control, fast_path = self._workers.control, self._workers.fast_path
        if (
            not self._workers.are_all_up
            or self._num_noted != noted_before
            or not self._inflight.is_empty
        ):
            return
        with uninterrupted:
            for part in slot_set.parts:
                if not fast_path.under_way[part.worker]:
                    rows = part.slots
                    ended = control.terminated[rows] | control.truncated[rows]
                    self._note_episodes(rows, rows, ended, control.invalid[rows])

    def _advance(self, timeout_s: float | None, *, want_all: bool) -> None:
        """Wait for news of the workers that owe something, take it in, and see to trouble."""
        recovery, handles = self._recovery, self._workers.handles
        outstanding = self._inflight.outstanding
        busy = [handles[worker] for worker, owed in enumerate(outstanding) if owed]
        if recovery.coming:
            busy = [handle for handle in busy if handle.worker not in recovery.coming]
            want_all = False  # the bells of some and the first words of others
        limit_s = recovery.check_s if timeout_s is None else min(recovery.check_s, timeout_s)
        started_s = time.monotonic()
        self._workers.wait(busy, limit_s, want_all=want_all)
        now_s = time.monotonic()
        recovery.note_wait(now_s - started_s, limit_s, now_s)
        is_check_due = recovery.is_check_due(now_s)
        if is_check_due:  # who has answered is not silent: take in what the wait above left out
            self._workers.wait(busy, 0.0, want_all=False)
        with uninterrupted:
            for handle in busy:
                self._take_from(handle)
            if is_check_due:
                recovery.check_silences(now_s)
            if recovery.coming:
                recovery.welcome()
        if recovery.errors:
            self._raise_first(recovery.errors)

    def _take_from(self, handle: WorkerHandle) -> None:
        handles, owed = self._workers.handles, self._inflight.outstanding[handle.worker]
        for reply in handle.take():
            if handles[handle.worker] is not handle or not owed:
                break  # it was given up for an earlier answer
            self._complete(handle, reply)
        if handle.is_dead and handles[handle.worker] is handle:
            self._recovery.on_death(handle)

    def _raise_first(self, errors: list[EnvfleetError]) -> None:
        first = errors[0]
        for other in errors[1:]:
            first.add_note(f"At the same time: {other}")
        errors.clear()
        raise first

    def _complete(self, handle: WorkerHandle, reply: Reply | None) -> None:
        inflight = self._inflight
        pending = inflight.outstanding[handle.worker].popleft()
        pending.is_done, pending.reply = True, reply
        self._plain_steps.has_replies |= reply is not None
        op = pending.command.op
        if pending.part is None:
            return
        if self._poison and op in MOVES:
            failed = {one.slot for one in reply.failures} if reply is not None else set()
            self._batch_reader.answered([slot for slot in pending.slots if slot not in failed])
        if (
            op is Op.STEP and reply is None and not self._batch_reader.spills
        ):  # by far the most common
            inflight.land(pending.part)
            self._offer(pending)
            return
        if op not in MOVES:
            self._note_done(pending)
            return
        self._batch_reader.absorb(pending.part, reply)
        asked = pending.slots if op is Op.RESET else ()
        if reply is not None and reply.failures:
            self._recovery.on_failures(pending, reply.failures)
            if not pending.slots or not pending.is_done or pending.error is not None:
                return
        inflight.land(pending.part)
        if op is Op.RESET:
            plans = dict(zip(asked, pending.command.payload, strict=True))
            self._episodes.began(pending.slots, [plans[slot] for slot in pending.slots])
        self._offer(pending)

    def _note_done(self, pending: Pending) -> None:
        """Keep the books in step with an answer that brings no new rows."""
        op, reply = pending.command.op, pending.reply
        failures = [] if reply is None else reply.failures
        if op in (Op.REBUILD, Op.RESUME) and failures:
            self._recovery.on_failures(pending, failures)
        elif op is Op.QUEUE and pending.group and not failures:  # without: queued once more
            self._episodes.queue(pending.slots, pending.command.payload)
        elif op is Op.RESTORE:
            self._note_restored(pending)

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

    def _note_episodes(
        self, slots: Slots, rows: slice | Slots, ended: Flags, invalid: Flags
    ) -> None:
        """Take note of what the hosts of these slots did by themselves."""
        if self._is_native:
            return  # such slots cannot be replayed one by one, and their resets cannot be planned
        self._episodes.note_ends(rows, ended)
        if self.autoreset == "next_step":
            if any_set(invalid):
                self._episodes.began_by_itself(slots[invalid & ~ended])
        elif any_set(ended):
            if self.autoreset == "same_step":
                self._episodes.began_by_itself(slots[ended])
            else:
                self._episodes.set_needs_reset(slots[ended], True)

    # ---- resets ---------------------------------------------------------------------------------

    def reset(
        self, plans: Sequence[ResetPlan], slots: Sequence[int] | Slots | None = None
    ) -> Batch:
        """Reset these slots (None: all) by their plans and wait for their first observations.

        What these slots still have in flight is waited for and dropped, and so are results of
        theirs that nobody has received; plans queued for their autoresets stay.
        """
        slot_set = self._checked_reset(plans, slots)
        self._renounce(slot_set.slots.tolist())
        try:
            self._post_reset(slot_set, plans)
            return self._recv_by_books(slot_set, None, None, time.perf_counter())
        except BaseException:
            self.drop(slots)  # the rows of the other slots have nobody left to go to
            raise

    def send_reset(
        self, plans: Sequence[ResetPlan], slots: Sequence[int] | Slots | None = None
    ) -> None:
        """Start a reset of these slots (None: all) by their plans; `recv` returns their rows.

        The rows are those of `reset`: the first observation, reward 0, `valid` False. As with
        `send`, the slots must have nothing in flight; what was dropped is waited for first.
        """
        slot_set = self._checked_reset(plans, slots)
        self._check_idle(slot_set)
        self._post_reset(slot_set, plans)

    def _checked_reset(
        self, plans: Sequence[ResetPlan], slots: Sequence[int] | Slots | None
    ) -> SlotSet:
        slot_set = self._named(slots, plans, "reset plans")
        self._check_together(slot_set, "reset")
        if any(plan.options is not None for plan in plans):
            self._check_options(slot_set, plans)
            self._workers.check_payload(list(plans), "an option for reset")
        return slot_set

    def _post_reset(self, slot_set: SlotSet, plans: Sequence[ResetPlan]) -> None:
        slots = slot_set.slots
        with uninterrupted:
            if self._can_resume:
                known = slots[self._episodes.has_history[slots]]
                self._batch_reader.keep_obs(known, known)
            self._batch_reader.forget(slots.tolist())
            self._inflight.post(slot_set, Op.RESET, plans)

    def queue_reset(self, plans: Sequence[ResetPlan], slots: Sequence[int] | None = None) -> None:
        """Use these plans at the next autoresets of these slots, one after another."""
        self._check_open()
        if self.autoreset == "disabled":
            raise ConfigError(
                "with autoreset='disabled' there is no autoreset to queue for; use reset"
            )
        slot_set = self._named(slots, plans, "reset plans")
        self._check_scalar(slot_set, "resets itself; nothing can be queued")
        self._workers.check_payload(list(plans), "an option for reset")
        group: list[Pending] = []

        def post() -> list[Pending]:
            group.extend(self._inflight.post(slot_set, Op.QUEUE, plans))
            return group

        try:
            self._results(self._ask(post))
        except EnvfleetError:
            self._unqueue(group)
            raise

    def _unqueue(self, group: list[Pending]) -> None:
        """Some slots could not be given their plans: take back those that the others have."""
        while not all(pending.is_done for pending in group):
            with contextlib.suppress(EnvfleetError):  # the first of them is on its way
                self._advance(None, want_all=True)
        with uninterrupted:
            for pending in group:
                has_failed = pending.error or (pending.reply and pending.reply.failures)
                if pending.part is not None and not has_failed:
                    self._episodes.unqueue(pending.slots)
                    none = [None] * len(pending.slots)
                    self._inflight.post_part(Op.QUEUE, pending.part, none, pending.slots)

    def drop(self, slots: Sequence[int] | None = None) -> None:
        """Nobody will receive what these slots (None: all) have in flight or ready."""
        self._open_books()
        with uninterrupted:
            for pending in self._inflight.renounce(set(self._slot_sets.find(slots).slots.tolist())):
                self._offer(pending)

    def _renounce(self, slots: list[int]) -> None:
        """Wait for what these slots have in flight, and drop it."""
        self.drop(slots)
        self._batch_reader.forget(slots)
        while self._inflight.is_any_in_flight(slots):
            self._advance(None, want_all=True)
        self._batch_reader.forget_infos(slots)  # what befell them meanwhile is for their next rows

    # ---- calls and states -----------------------------------------------------------------------

    def call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        slots: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call `name` on the environments of these slots; what is no function is read."""
        if name in ("reset", "step", "close"):
            raise ConfigError(f"{name!r} cannot be called by name; use the fleet's own {name}")
        payload = (name, tuple(args), dict(kwargs or {}))
        return self._ask_each(slots, Op.CALL, payload, f"an argument for {name!r}")

    def get(self, name: str, slots: Sequence[int] | None = None) -> list[Any]:
        """Read `name` from the environments of these slots; a function is returned, not called."""
        return self._ask_each(slots, Op.GET, name, "a name")

    def apply(
        self, function: Callable[[Any], Any], slots: Sequence[int] | None = None
    ) -> list[Any]:
        """Call `function(env)` where the environments of these slots live; one result each.

        To worker processes the function travels by cloudpickle, and so do the results back. A
        natively vectorised environment is given to it once, and the result is every slot's.
        """
        return self._ask_each(slots, Op.APPLY, function, "the function")

    def _ask_each(self, slots: Sequence[int] | None, op: Op, payload: Any, what: str) -> list[Any]:
        slot_set = self._named(slots)
        self._workers.check_payload(payload, what)
        group = self._ask(lambda: self._inflight.post_shared(slot_set, op, payload))
        values = self._results(group)
        return [values[slot] for slot in slot_set.slots.tolist()]

    def set_attr(
        self, name: str, values: Sequence[Any], slots: Sequence[int] | None = None
    ) -> None:
        """Set `name` on the environments of these slots, one value each."""
        slot_set = self._named(slots, values, "values")
        self._check_together(slot_set, "set attributes of")
        self._workers.check_payload(list(values), f"a value for {name!r}")
        payload = [(name, value) for value in values]
        self._results(self._ask(lambda: self._inflight.post(slot_set, Op.SET, payload)))

    def snapshot(self, slots: Sequence[int] | None = None) -> tuple[Snapshot, ...]:
        """The state of these slots, which must not be in flight."""
        slot_set = self._named(slots)
        self._check_scalar(slot_set, _NO_STATE, SnapshotError)
        self._check_sendable(slot_set)
        values = self._results(self._ask(lambda: self._inflight.post(slot_set, Op.SNAPSHOT)))
        snapshots = []
        for slot in slot_set.slots.tolist():
            taken, state, queued = values[slot]
            if taken is None:
                taken = self._episodes.replay_of(slot)
            obs = self._batch_reader.observation(slot)
            lineage = self._episodes.lineage_of(slot)
            snapshots.append(Snapshot(taken, obs, int(state), queued, lineage))
        return tuple(snapshots)

    def restore(self, snapshots: Sequence[Snapshot], slots: Sequence[int] | None = None) -> None:
        """Bring these slots to the states of `snapshots`, from this fleet or another."""
        slot_set = self._named(slots, snapshots, "snapshots")
        if not all(isinstance(snapshot, Snapshot) for snapshot in snapshots):
            raise ConfigError("restore takes what snapshot returned: one Snapshot per slot")
        self._check_scalar(slot_set, _NO_STATE, SnapshotError)
        self._workers.check_payload(list(snapshots), "a snapshot")
        self._renounce(slot_set.slots.tolist())
        self._batch_reader.forget(slot_set.slots.tolist())
        self._results(self._ask(lambda: self._inflight.post(slot_set, Op.RESTORE, snapshots)))

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

    def _named(
        self,
        slots: Sequence[int] | Slots | None,
        items: Sequence[Any] | None = None,
        what: str = "",
    ) -> SlotSet:
        self._open_books()
        slot_set = self._slot_sets.find(slots)
        if items is not None and len(items) != len(slot_set.slots):
            raise ConfigError(
                f"{len(slot_set.slots)} slots need {len(slot_set.slots)} {what}, got {len(items)}"
            )
        self._check_blocked(slot_set)
        return slot_set

    def _ask(self, post: Callable[[], list[Pending]]) -> list[Pending]:
        """Post a group of commands and wait until each has its answer, or will have none."""
        group: list[Pending] = []
        try:
            with uninterrupted:
                group = post()
            while not all(pending.is_done for pending in group):
                self._advance(None, want_all=True)
        except BaseException:
            for pending in group:  # its caller is gone: nothing of it concerns whoever comes next
                pending.unwanted |= set(pending.slots)
            raise
        return group

    def _results(self, group: list[Pending]) -> dict[int, Any]:
        """Raise what went wrong with these commands; the values by slot."""
        values: dict[int, Any] = {}
        for pending in group:
            if pending.error is not None:
                raise pending.error
            if pending.reply is not None:
                if pending.reply.failures:
                    raise env_failed(pending.reply.failures[0])
                values.update(pending.reply.values)
        return values

    # ---- order ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise FleetClosed(self._why_closed)

    def _open_books(self) -> None:
        """Make sure that the fleet is open and that its books know of everything."""
        self._check_open()
        self._plain_steps.leave()

    def _check_together(self, slot_set: SlotSet, doing: str) -> None:
        """Refuse a part of what is one environment, before anybody is asked for it."""
        if self._together and slot_set.workers is None:
            named = set(slot_set.slots.tolist())
            for together in self._together:
                if 0 < len(named.intersection(together)) < len(together):
                    raise ConfigError(
                        f"slots {together[0]} to {together[-1]} are one natively vectorised "
                        f"environment: {doing} all of them together"
                    )

    def _check_options(self, slot_set: SlotSet, plans: Sequence[ResetPlan]) -> None:
        """Refuse options that differ where one environment can take only one."""
        if not self._together:
            return
        options = dict(zip(slot_set.slots.tolist(), (plan.options for plan in plans), strict=True))
        for together in self._together:
            first = options.get(together[0])
            if together[0] in options and not all(
                data_equivalence(first, options[slot], exact=True) for slot in together
            ):
                raise ConfigError(
                    f"slots {together[0]} to {together[-1]} are one natively vectorised "
                    "environment, which takes one options for all of them"
                )

    def _check_scalar(
        self, slot_set: SlotSet, why: str, error: type[EnvfleetError] = ConfigError
    ) -> None:
        """Refuse for natively vectorised environments what they cannot do."""
        named = set(slot_set.slots.tolist())
        for together in self._together:
            if not named.isdisjoint(together):
                raise error(
                    f"slots {together[0]} to {together[-1]} are one natively vectorised "
                    f"environment, which {why}"
                )

    def _check_blocked(self, slot_set: SlotSet) -> None:
        blocked = self._recovery.blocked
        if blocked:
            for slot in slot_set.slots.tolist():
                if slot in blocked:
                    raise blocked[slot]

    def _check_sendable(self, slot_set: SlotSet) -> None:
        self._open_books()
        self._check_blocked(slot_set)
        self._check_idle(slot_set)
        episodes = self._episodes
        if episodes.num_needing_reset:
            idle = slot_set.slots[episodes.needs_reset[slot_set.slots]].tolist()
            if idle:
                raise ResetNeeded(f"slots {idle} have no running episode; call reset first")

    def _check_idle(self, slot_set: SlotSet) -> None:
        """Refuse slots that have something in flight; what was dropped is waited for."""
        inflight = self._inflight
        if inflight.num_in_flight or inflight.num_ready:
            busy = inflight.busy(slot_set)
            if busy and not inflight.is_awaited(busy):  # the rest of a step that was dropped
                self._renounce(busy)
                busy = inflight.busy(slot_set)
            if busy:
                raise StillInFlight(
                    f"slots {busy} have been sent and not yet received; call recv before sending "
                    "again"
                )

    def close(self) -> None:
        """Close environments, end workers, give everything back. Idempotent and bounded in time."""
        if self.is_closed:
            return
        if self._workers.is_stopped:  # the interpreter is exiting, and the finalizer came first
            self._is_closed = True
            return
        self._last_timings = self.timings
        self._plain_steps.leave()
        self._is_closed = True
        self._finalizer.detach()
        owed = [len(outstanding) for outstanding in self._inflight.outstanding]
        for failure in self._workers.close(owed):
            warnings.warn(
                f"the environment of slot {failure.slot} raised while closing: {failure.reason}",
                RuntimeWarning,
                stacklevel=2,
            )
        # nobody may read rows through a closed fleet, and their memory shall go
        del self._data, self._batch_reader, self._episodes, self._recovery
        del self._plain_steps, self._action_writer

    def _leave_to_parent(self) -> None:
        """This is a copy of the process whose workers these are: they answer to the original."""
        if not self._is_closed:
            self._is_closed = True
            self._why_closed = (
                f"this fleet belongs to process {self._workers.owner_pid}; this process is a copy "
                "of it (os.fork), and the workers answer only to the original. Open a fleet here"
            )


_fleets: weakref.WeakSet[Fleet] = weakref.WeakSet()
"""All that this process has opened and somebody still holds."""


def _leave_all_to_parent() -> None:
    for fleet in _fleets:
        fleet._leave_to_parent()


# once for each copy, so that no step has to ask whose the fleet is
os.register_at_fork(after_in_child=_leave_all_to_parent)


def _check_here(
    num_here: int,
    num_slots: int,
    num_workers: int,
    backend: str,
    is_apart: bool,
    deadlines: Deadlines,
) -> None:
    if not num_here:
        return
    if not is_apart or num_workers < 2:
        raise ConfigError(
            "num_here shares slots between this process and worker processes: it needs "
            f"backend='process' and two workers or more, of which this process is one; got "
            f"backend={backend!r} and num_workers={num_workers}"
        )
    check_count("num_here", num_here)
    if num_here > num_slots - num_workers + 1:
        raise ConfigError(
            f"num_here={num_here} leaves {max(num_slots - num_here, 0)} of {num_slots} slots for "
            f"{num_workers - 1} worker processes; each needs one or more"
        )
    if deadlines.step_s or deadlines.reset_s:
        raise ConfigError(
            "the slots that live in this process cannot be interrupted; leave out the timeouts or "
            "num_here"
        )
