"""The one imperative shell: open, send, recv, call, close.

    caller ── send(actions, slots) ──► rows in shared memory ── command ──► workers
    caller ◄── recv(): Batch ───────── rows, infos, incidents ◄── reply ──── workers

`inflight` records what is under way, `receiver` takes in answers, `episodes` remembers what was
done to each slot, `recovery` handles failures. `actions` writes actions into rows, `batch_reader`
reads results out of them. Only one thread may use a fleet at a time.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine import checks
from envfleet.engine.actions import ActionWriter
from envfleet.engine.backends.base import check_options
from envfleet.engine.backends.process.launch import refuse_unguarded_main
from envfleet.engine.batch import Batch
from envfleet.engine.batch_reader import BatchReader
from envfleet.engine.episodes import Episodes
from envfleet.engine.incident import Incident
from envfleet.engine.inflight import Inflight
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.memory import PagePlan
from envfleet.engine.messages import EnvFacts, Op
from envfleet.engine.options import (
    Autoreset,
    Deadlines,
    EnvFn,
    OnFailure,
    ResetPlan,
    RestartPolicy,
    StartMethod,
)
from envfleet.engine.receiver import Receiver
from envfleet.engine.recovery import Recovery
from envfleet.engine.slots import Slots, SlotSet, SlotSets
from envfleet.engine.snapshot import Snapshot
from envfleet.engine.workers import Workers
from envfleet.errors import ConfigError, EnvfleetError, FleetClosed, SnapshotError

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
        backend_options: Any = None,
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
            backend_options: What the backend takes beside, such as `RayOptions` for "ray".
        """
        refuse_unguarded_main()
        checks.check_choices(start_method, autoreset, on_failure)
        check_options(backend, backend_options)
        checks.check_plan(len(env_fns), num_workers, num_here, backend, deadlines)
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
            backend_options=backend_options,
        )
        self._finalizer = weakref.finalize(self, workers.stop)
        self._together = checks.together_of(workers.facts)
        if self._can_resume and self._together:
            workers.stop()
            checks.check_resumable(self._together)
        self._data, control = workers.data, workers.control
        self._slot_sets = SlotSets(workers.bounds)
        self._inflight = Inflight(self._slot_sets, workers.handles, workers.fast_path)
        self._episodes = Episodes(workers.env_fns, control, can_resume=self._can_resume)
        self._batch_reader = BatchReader(
            control, workers.data, self._slot_sets.worker_of, autoreset, copy=copy
        )
        parts = workers, self._inflight, self._slot_sets, self._episodes, self._batch_reader
        self._recovery = Recovery(
            parts,
            autoreset=autoreset,
            deadlines=deadlines,
            on_failure=on_failure,
            restarts=restarts,
        )
        self._receiver = Receiver(parts, self._recovery, autoreset=autoreset, poison=poison)
        self._has_pages = workers.data.pages is not None
        # natively vectorised slots cannot be replayed one by one
        is_native = all(facts.native for facts in workers.facts)
        self._action_log = self._episodes.action_log
        self._action_writer = ActionWriter(workers, None if is_native else self._action_log)
        self._is_closed, self._why_closed = False, "this fleet is closed; open a new one"
        _fleets.add(self)
        self._last_timings: dict[str, float] = {}
        self.incidents: list[Incident] = self._episodes.incidents
        """Every failure so far, oldest first."""

    # ---- facts ----------------------------------------------------------------------------------

    @property
    def round_trip_s(self) -> float | None:
        """How long an empty command to the slowest worker takes, where that is much."""
        return self._workers.round_trip_s

    @property
    def facts(self) -> list[EnvFacts]:
        """Spaces, metadata and spec of every slot's environment."""
        return self._workers.facts

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Which slots each worker hosts, as half-open ranges."""
        return self._workers.bounds

    def worker_pids(self) -> list[int | None]:
        """The process of each worker; None for those that are none, or have been given up."""
        self._check_open()
        return self._workers.pids()

    @property
    def quarantined(self) -> dict[int, EnvfleetError]:
        """Slots that have been given up, with the reason."""
        self._check_open()
        return dict(self._recovery.blocked)

    @property
    def in_flight(self) -> list[int]:
        """Slots that have been sent and not received."""
        self._check_open()
        return self._inflight.busy(self._slot_sets.everything)

    @property
    def without_episode(self) -> list[int]:
        """Slots that must be reset before they can be sent."""
        self._check_open()
        return self._episodes.needs_reset.nonzero()[0].tolist()

    @property
    def is_closed(self) -> bool:
        """True after `close`, and in a copy of the process that opened it."""
        return self._is_closed

    @property
    def timings(self) -> dict[str, float]:
        """Seconds so far: workers in hosts and waiting, this process waiting and copying."""
        if self.is_closed:
            return self._last_timings
        mine = {"wait_s": self._receiver.wait_s, "copy_s": self._receiver.copy_s}
        return self._workers.timings | mine

    def observations(self) -> Any:
        """What every slot observed last, batched."""
        self._check_open()
        if self._episodes.num_needing_reset:  # slots that were never reset have nothing to show
            self._batch_reader.mend_rows(np.flatnonzero(self._episodes.needs_reset).tolist())
        everything = self._slot_sets.everything
        return self._batch_reader.observations(everything.slots, everything.rows)

    @property
    def pages(self) -> npt.NDArray[Any] | None:
        """Observations of many steps in shared memory, [page, slot], if these are single arrays.

        A step that is sent with a page has its observations written there by its workers, and they
        stay until another is sent. Pages count from 1.
        """
        self._check_open()
        return self._data.pages

    # ---- steps ----------------------------------------------------------------------------------

    def send(
        self, actions: Any, slots: Sequence[int] | Slots | None = None, *, page: int = 0
    ) -> None:
        """Start a step of these slots (None: all); `actions` is a batch in their order.

        The observations may come by a page; the batch says if they did. Where something about a
        step is special they do not.
        """
        started_s = time.perf_counter()
        if self._is_closed:
            raise FleetClosed(self._why_closed)
        if page != 0:
            checks.check_page(page, self._data.pages)
        inflight, action_log = self._inflight, self._action_log
        slot_set = self._slot_sets.everything if slots is None else self._slot_sets.find(slots)
        workers = slot_set.workers
        is_plain = (
            workers is not None
            and not self._episodes.num_needing_reset
            and not self._batch_reader.spills
            and not self._recovery.blocked
            and inflight.is_free(workers)
        )
        if not is_plain:
            self._receiver.check_sendable(slot_set)
        before = action_log.now
        try:
            spills = self._action_writer.put(slot_set, actions)
            if self._can_resume:
                self._batch_reader.keep_obs(slot_set.slots, slot_set.rows)
            if self._poison:
                self._batch_reader.poison(slot_set.slots, slot_set.rows)
            if is_plain and spills is None and workers is not None:
                inflight.last_request += 1
                inflight.steps.post(workers, inflight.last_request, int(page))
            else:
                inflight.enter()
                inflight.post(slot_set, Op.STEP, spills)
        except BaseException:
            if not inflight.is_posted(slot_set):
                action_log.take_out(before)  # no worker was asked to do that
            raise
        self._receiver.copy_s += time.perf_counter() - started_s

    def step(self, actions: Any, *, page: int = 0) -> Batch:
        """`send` to all slots and `recv` from all of them."""
        before = self._inflight.last_request
        try:
            self.send(actions, page=page)
            return self.recv()
        except BaseException:
            if self._inflight.last_request != before:
                self.drop()  # the rows of the other slots have no call left to go to
            raise

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
        if min_slots is not None or timeout_s is not None:
            checks.check_wait(min_slots, timeout_s)
        if self._is_closed:
            raise FleetClosed(self._why_closed)
        called_s = time.perf_counter()
        slot_set = None if slots is None else self._slot_sets.find(slots)
        receiver, silences = self._receiver, self._recovery.silences
        noted_before = receiver.num_noted
        limit_s = silences.check_s
        if timeout_s is not None and timeout_s < limit_s:
            limit_s = timeout_s
        is_patient = slot_set is None and min_slots is None
        try:
            collected = None
            # a slot that hangs must not go unnoticed because others are done
            if is_patient or not silences.is_any_too_long(time.monotonic()):
                collected = self._inflight.collect(
                    slot_set, min_slots, limit_s, has_pages=self._has_pages
                )
            now_s = time.perf_counter()
            receiver.wait_s += now_s - called_s
            if collected is not None:
                found, page = collected
                batch = self._batch_reader.batch(found.slots, found.rows, page)
                if batch.has_events or self._episodes.has_ended or self._episodes.failing:
                    receiver.note_events(batch, found.rows)
                receiver.copy_s += time.perf_counter() - now_s
                return batch
            silences.note_wait(now_s - called_s, limit_s, time.monotonic())
        except BaseException:
            if not self._is_closed:
                receiver.note_taken(slot_set or self._slot_sets.everything, noted_before)
            raise
        return receiver.receive(slot_set, min_slots, timeout_s, called_s)

    def drop(self, slots: Sequence[int] | Slots | None = None) -> None:
        """What these slots (None: all) have in flight or ready is not going to be received."""
        self._check_open()
        self._receiver.drop(set(self._slot_sets.find(slots).slots.tolist()))

    # ---- resets ---------------------------------------------------------------------------------

    def reset(
        self, plans: Sequence[ResetPlan], slots: Sequence[int] | Slots | None = None
    ) -> Batch:
        """Reset these slots (None: all) by their plans and wait for their first observations.

        What these slots still have in flight is waited for and dropped, and so are results of
        theirs that were not received; plans queued for their autoresets stay.
        """
        slot_set = self._checked_reset(plans, slots)
        self._receiver.wait_out(slot_set.slots.tolist())
        try:
            self._post_reset(slot_set, plans)
            return self._receiver.receive(slot_set)
        except BaseException:
            self.drop(slots)  # the rows of the other slots have no call left to go to
            raise

    def send_reset(
        self, plans: Sequence[ResetPlan], slots: Sequence[int] | Slots | None = None
    ) -> None:
        """Start a reset of these slots (None: all) by their plans; `recv` returns their rows.

        The rows are those of `reset`: the first observation, reward 0, `valid` False. As with
        `send`, the slots must have nothing in flight; what was dropped is waited for first.
        """
        slot_set = self._checked_reset(plans, slots)
        self._receiver.check_idle(slot_set)
        self._post_reset(slot_set, plans)

    def _checked_reset(
        self, plans: Sequence[ResetPlan], slots: Sequence[int] | Slots | None
    ) -> SlotSet:
        slot_set = self._named(slots, plans, "reset plans")
        checks.check_whole(self._together, slot_set, "reset")
        if any(plan.options is not None for plan in plans):
            checks.check_options(self._together, slot_set, plans)
            self._workers.check_payload([plan.options for plan in plans], "an option for reset")
        return slot_set

    def _post_reset(self, slot_set: SlotSet, plans: Sequence[ResetPlan]) -> None:
        with uninterrupted:
            if self._can_resume:
                known = slot_set.slots[self._episodes.has_history[slot_set.slots]]
                self._batch_reader.keep_obs(known, known)
            self._batch_reader.forget(slot_set.slots.tolist())
            self._inflight.post(slot_set, Op.RESET, plans)

    def queue_reset(self, plans: Sequence[ResetPlan], slots: Sequence[int] | None = None) -> None:
        """Use these plans at the next autoresets of these slots, one after another."""
        self._check_open()
        if self.autoreset == "disabled":
            raise ConfigError(
                "with autoreset='disabled' there is no autoreset to queue for; use reset"
            )
        slot_set = self._named(slots, plans, "reset plans")
        checks.check_scalar(self._together, slot_set, "resets itself; nothing can be queued")
        self._workers.check_payload(list(plans), "an option for reset")
        self._receiver.ask_for_all(slot_set, plans)

    # ---- calls and states -----------------------------------------------------------------------

    def call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        slots: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call `name` on the environments of these slots; what is no function is read."""
        payload = _call_payload(name, args, kwargs)
        return self._ask_each(slots, Op.CALL, payload, f"an argument for {name!r}")

    def start_call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        slots: Sequence[int] | None = None,
    ) -> Callable[[float | None], list[Any]]:
        """Start a `call`; what is returned waits for its results, at most so many seconds.

        Past these it raises TimeoutError, and the results are dropped.
        """
        payload = _call_payload(name, args, kwargs)
        slot_set = self._named(slots)
        self._workers.check_payload(payload, f"an argument for {name!r}")
        group = self._receiver.post_alike(slot_set, Op.CALL, payload)

        def results(timeout_s: float | None) -> list[Any]:
            self._check_open()
            values = self._receiver.answers(group, timeout_s)
            return [values[slot] for slot in slot_set.slots.tolist()]

        return results

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
        values = self._receiver.ask_alike(slot_set, op, payload)
        return [values[slot] for slot in slot_set.slots.tolist()]

    def set_attr(
        self, name: str, values: Sequence[Any], slots: Sequence[int] | None = None
    ) -> None:
        """Set `name` on the environments of these slots, one value each."""
        slot_set = self._named(slots, values, "values")
        checks.check_whole(self._together, slot_set, "set attributes of")
        self._workers.check_payload(list(values), f"a value for {name!r}")
        payload = [(name, value) for value in values]
        self._receiver.ask(slot_set, Op.SET, payload)

    def snapshot(self, slots: Sequence[int] | None = None) -> tuple[Snapshot, ...]:
        """The state of these slots, which must not be in flight."""
        slot_set = self._named(slots)
        checks.check_scalar(self._together, slot_set, _NO_STATE, SnapshotError)
        self._receiver.check_sendable(slot_set)
        values = self._receiver.ask(slot_set, Op.SNAPSHOT)
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
        checks.check_scalar(self._together, slot_set, _NO_STATE, SnapshotError)
        self._workers.check_payload(list(snapshots), "a snapshot")
        self._receiver.wait_out(slot_set.slots.tolist())
        self._batch_reader.forget(slot_set.slots.tolist())
        self._receiver.ask(slot_set, Op.RESTORE, snapshots)

    def rehearse(
        self, snapshots: Sequence[Snapshot], slots: Sequence[int] | None = None
    ) -> list[bool | None]:
        """Whether replays lead a second environment to where these slots stand; None: not known."""
        slot_set = self._named(slots, snapshots, "snapshots")
        values = self._receiver.ask(slot_set, Op.REHEARSE, snapshots)
        return [values[slot] for slot in slot_set.slots.tolist()]

    def _named(self, slots: Any, items: Sequence[Any] | None = None, what: str = "") -> SlotSet:
        self._check_open()
        self._inflight.enter()
        slot_set = self._slot_sets.find(slots)
        num_slots = len(slot_set.slots)
        if items is not None and len(items) != num_slots:
            raise ConfigError(f"{num_slots} slots need {num_slots} {what}, got {len(items)}")
        checks.check_blocked(self._recovery.blocked, slot_set)
        return slot_set

    def _check_open(self) -> None:
        if self._is_closed:
            raise FleetClosed(self._why_closed)

    def close(self) -> None:
        """Close environments, end workers, give everything back. Idempotent and bounded in time."""
        if self.is_closed:
            return
        if self._workers.is_stopped:  # the interpreter is exiting, and the finalizer came first
            self._is_closed = True
            return
        self._last_timings = self.timings
        self._inflight.enter()
        self._is_closed = True
        self._finalizer.detach()
        owed = [len(outstanding) for outstanding in self._inflight.outstanding]
        for failure in self._workers.close(owed):
            warnings.warn(
                f"the environment of slot {failure.slot} raised while closing: {failure.reason}",
                RuntimeWarning,
                stacklevel=2,
            )
        # rows cannot be read through a closed fleet, and their memory shall go
        del self._data, self._batch_reader, self._episodes, self._recovery
        del self._receiver, self._action_writer, self._action_log, self._inflight.steps

    def _leave_to_parent(self) -> None:
        """This is a copy of the process whose workers these are: they answer to the original."""
        if not self._is_closed:
            self._is_closed, self._why_closed = True, self._workers.why_not_here


def _call_payload(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    if name in ("reset", "step", "close"):
        raise ConfigError(f"{name!r} cannot be called by name; use the fleet's own {name}")
    return name, tuple(args), dict(kwargs or {})


_fleets: weakref.WeakSet[Fleet] = weakref.WeakSet()
"""All that this process has opened and that are still referred to."""


def _leave_all_to_parent() -> None:
    for fleet in _fleets:
        fleet._leave_to_parent()


# once for each copy, so that no step has to ask whose the fleet is
os.register_at_fork(after_in_child=_leave_all_to_parent)
