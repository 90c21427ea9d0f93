"""What the fleet remembers of each slot: its episode so far, and how often it failed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import cloudpickle
import numpy as np
import numpy.typing as npt

from envfleet.engine import rng
from envfleet.engine.batch import any_set
from envfleet.engine.incident import Incident
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.memory import Control
from envfleet.engine.messages import Op
from envfleet.engine.options import PLAIN_RESET, EnvFn, ResetPlan
from envfleet.engine.rows import note_ends
from envfleet.engine.slots import Slots
from envfleet.engine.snapshot import Lineage, OwnState, Pickled, Replay, Snapshot
from envfleet.engine.supervision import RecentFailures
from envfleet.errors import ResumeFailed, SnapshotError

LIMIT_BYTES = 64 << 20
_ENTRY_BYTES = 200
"""What an entry takes beside its actions."""
_TRIM_EVERY = 1024


@dataclass(frozen=True, slots=True)
class EpisodeLog:
    """How one slot's running episode began and went."""

    plan: ResetPlan
    actions: tuple[Any, ...]
    is_complete: bool


class ActionLog:
    """Actions of all slots, and where each slot's episode begins among them."""

    def __init__(self, num_slots: int) -> None:
        self._entries: deque[tuple[npt.NDArray[np.intp] | None, Any]] = deque()
        self._base = 0
        self._bytes = 0
        self.starts = np.zeros(num_slots, np.int64)
        """The number of the first entry of each slot's episode."""
        self.plans: dict[int, ResetPlan] = {}
        """How episodes began, where not plainly."""

    @property
    def now(self) -> int:
        """The number of the next entry."""
        return self._base + len(self._entries)

    def sent(self, slots: npt.NDArray[np.intp] | None, actions: Any) -> None:
        """Keep actions of these slots (None: all); they must not be changed afterwards."""
        self._entries.append((slots, actions))
        self._bytes += _ENTRY_BYTES
        self._bytes += (
            actions.nbytes if type(actions) is np.ndarray else _approximate_bytes(actions)
        )
        if len(self._entries) % _TRIM_EVERY == 0 or self._bytes > LIMIT_BYTES:
            self._trim()

    def take_out(self, number: int) -> None:
        """Forget the entries from this number on: what they say was never done."""
        while self.now > number and self._entries:
            self._bytes -= _ENTRY_BYTES + _approximate_bytes(self._entries.pop()[1])

    def began(self, slots: Iterable[int], plans: Iterable[ResetPlan]) -> None:
        """These slots have just been reset by these plans."""
        now = self.now
        for slot, plan in zip(slots, plans, strict=True):
            self.starts[slot], self.plans[slot] = now, plan

    def began_plainly(self, slots: npt.NDArray[np.intp]) -> None:
        """These slots have just been reset without seed or options."""
        self.starts[slots] = self.now
        if self.plans:
            for slot in slots.tolist():
                self.plans.pop(slot, None)

    def log_of(self, slot: int) -> EpisodeLog:
        """The slot's episode so far."""
        start = int(self.starts[slot])
        actions = []
        for slots, batch in islice(self._entries, max(0, start - self._base), None):
            if slots is None:
                actions.append(batch[slot])
            else:
                where = np.flatnonzero(slots == slot)
                if where.size:
                    actions.append(batch[int(where[0])])
        return EpisodeLog(self.plans.get(slot, PLAIN_RESET), tuple(actions), start >= self._base)

    def take_back(self, slot: int, plan: ResetPlan, actions: Sequence[Any]) -> None:
        """The slot was brought to the state that these actions lead to."""
        self.began([slot], [plan])
        for action in actions:
            self.sent(np.array([slot]), [action])

    def _trim(self) -> None:
        needed_from = int(self.starts.min())
        with uninterrupted:
            while self._entries and (self._base < needed_from or self._bytes > LIMIT_BYTES):
                _, actions = self._entries.popleft()
                self._bytes -= _ENTRY_BYTES + _approximate_bytes(actions)
                self._base += 1


def _approximate_bytes(value: Any) -> int:
    """About how many bytes a value takes."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_approximate_bytes, value.values())) + sys.getsizeof(value)
    if isinstance(value, list | tuple):
        return sum(map(_approximate_bytes, value)) + sys.getsizeof(value)
    return sys.getsizeof(value)


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A failure as the fleet sees it, before it is added how the slot got there."""

    kind: Literal["exception", "death", "timeout"]
    worker: int
    slot: int
    slots: tuple[int, ...]
    doing: str
    reason: str
    text: str = ""
    exit_code: int | None = None
    plan: ResetPlan | None = None
    """How the slot was being reset when it failed; None if it failed in its episode."""


class Episodes:
    """Seeds, plans, actions and failures of every slot."""

    def __init__(
        self, env_fns: Sequence[EnvFn], control: Control, *, can_resume: bool = False
    ) -> None:
        """With `can_resume` enough is kept to bring lost slots back to where they were."""
        self._env_fns = env_fns
        self._flags, self._cells = control.flags, control.rng
        self._rng = [cell.data for cell in control.rng]
        num_slots = len(env_fns)
        self._known_starts = control.rng.copy() if can_resume else None
        """What the episodes started from that callers know of: a worker overwrites its own."""
        self._bases: dict[int, OwnState | Pickled] = {}
        """States that slots were restored to, where their actions start from these."""
        self.has_history = np.zeros(num_slots, np.bool_)
        """Slots whose environments stand where their plans and actions have led."""
        self.action_log = ActionLog(num_slots)
        self._queued: list[deque[ResetPlan]] = [deque() for _ in env_fns]
        self._num_queued = 0
        self._restart_plans: dict[int, ResetPlan] = {}
        self._seeds: list[int | None] = [None] * num_slots
        self._restarts = [0] * num_slots
        self.failures_of = [RecentFailures()] * num_slots
        self.failing: dict[int, bool] = {}
        """Slots that have not worked since they failed; whether a reset is enough to show it."""
        self.needs_reset = np.ones(num_slots, np.bool_)
        """True for slots without a running episode."""
        self.num_needing_reset = num_slots
        self.ended = np.zeros(num_slots, np.bool_)
        """Slots whose caller knows that their last row was an end."""
        self.has_ended = False
        """Whether there may be any."""
        self.incidents: list[Incident] = []

    def note_ends(self, rows: slice | Slots, ended: npt.NDArray[np.bool_]) -> None:
        """Their caller has been told which of these slots' last rows were ends."""
        self.ended[rows] = ended
        self.has_ended = any_set(self.ended)

    def note_rows(self, rows: slice, *, is_same_step: bool) -> bool:
        """Note the ends and beginnings that neighbours' flags tell, if all beginnings are plain."""
        action_log = self.action_log
        if (
            self._restart_plans
            or self._num_queued
            or action_log.plans
            or self._known_starts is not None
        ):
            return False
        self.has_ended = note_ends(
            self._flags,
            self.ended,
            action_log.starts,
            rows.start,
            rows.stop,
            action_log.now,
            is_same_step,
        )
        return True

    def note_failure(self, slot: int, doing: str, *, comes_back: bool) -> None:
        """The slot has failed in this; if it `comes_back`, it is still to show that it works."""
        before = self.failing.pop(slot, True)
        if comes_back:
            self.failing[slot] = before and doing == Op.RESET.phrase

    def note_good_rows(
        self, slots: Slots, valid: npt.NDArray[np.bool_], ended: npt.NDArray[np.bool_]
    ) -> None:
        """Which slots work again: a step is done, or a reset where that had failed."""
        for slot, is_step, has_ended in zip(slots.tolist(), valid, ended, strict=True):
            if is_step or (self.failing.get(slot) and not has_ended):
                self.failing.pop(slot, None)

    # ---- episodes -------------------------------------------------------------------------------

    def began(self, slots: Sequence[int], plans: Sequence[ResetPlan]) -> None:
        """These slots were reset by these plans."""
        plans = [self.with_seed(slot, plan) for slot, plan in zip(slots, plans, strict=True)]
        for slot, plan in zip(slots, plans, strict=True):
            if plan.seed is not None:
                self._seeds[slot] = plan.seed
            self._restart_plans.pop(slot, None)
        self.action_log.began(slots, plans)
        self.set_needs_reset(slots, False)
        self.ended[slots] = False
        self.has_history[slots] = True
        self._keep_starts(slots)

    def began_by_itself(self, slots: Slots) -> None:
        """These slots reset themselves, by the next plan in their queue if there was one."""
        if not self._restart_plans and not self._num_queued:  # by far the most common
            self.action_log.began_plainly(slots)
            self._keep_starts(slots)
            return
        chosen = slots.tolist()
        plans = [self.next_plan(slot) for slot in chosen]
        for slot in chosen:
            if slot not in self._restart_plans and self._queued[slot]:
                self._queued[slot].popleft()
                self._num_queued -= 1
        self.began(chosen, plans)

    def with_seed(self, slot: int, plan: ResetPlan) -> ResetPlan:
        """How the slot is reset by this plan: a rebuilt one has a seed in any case."""
        return plan.seeded_like(self._restart_plans.get(slot))

    def next_plan(self, slot: int) -> ResetPlan:
        """How the slot's next autoreset will go."""
        if slot in self._restart_plans:
            return self._restart_plans[slot]
        queue = self._queued[slot]
        return queue[0] if queue else PLAIN_RESET

    def queue(self, slots: Iterable[int], plans: Iterable[ResetPlan]) -> None:
        """The hosts of these slots have been given these plans for later."""
        for slot, plan in zip(slots, plans, strict=True):
            self._queued[slot].append(plan)
            self._num_queued += 1

    def unqueue(self, slots: Iterable[int]) -> None:
        """The plan that came last was taken back from the hosts of these slots."""
        for slot in slots:
            self._queued[slot].pop()
            self._num_queued -= 1

    def queued(self, slot: int) -> tuple[ResetPlan, ...]:
        """Plans that the slot has not used yet."""
        return tuple(self._queued[slot])

    def set_needs_reset(self, slots: Any, value: bool) -> None:
        """Note whether these slots have a running episode."""
        if value or self.num_needing_reset:
            self.needs_reset[slots] = value
            self.num_needing_reset = int(np.count_nonzero(self.needs_reset))

    def lose(self, slots: Sequence[int]) -> None:
        """These slots have no running episode, and nothing is known of their environments."""
        self.set_needs_reset(slots, True)
        self.has_history[slots] = False

    def plan_restart(self, slot: int, *, has_ended: bool = False) -> ResetPlan:
        """How the slot's next episode begins if its environment must be replaced.

        An episode that is lost begins again with its own options.
        """
        self._restarts[slot] += 1
        lost = self._restart_plans.get(slot) or self.action_log.plans.get(slot, PLAIN_RESET)
        options = None if has_ended else lost.options
        plan = restart_plan(self._seeds[slot], self._restarts[slot], options)
        self._restart_plans[slot] = plan
        return plan

    def _keep_starts(self, slots: Any) -> None:
        """Keep what the episodes that these slots have just begun start from."""
        if self._known_starts is not None:
            self._known_starts[slots] = self._cells[slots]
            if self._bases:
                for slot in slots.tolist() if isinstance(slots, np.ndarray) else slots:
                    self._bases.pop(slot, None)

    # ---- states and failures --------------------------------------------------------------------

    def replay_of(self, slot: int) -> Replay:
        """How to bring a new environment to where this slot stands."""
        begins = self._restart_plans.get(slot)
        if begins is not None:  # it is new, and the log is that of the one before
            return Replay(begins.seed, begins.options, None, ())
        log = self.action_log.log_of(slot)
        start, base = rng.unpacked(self._rng[slot].tobytes()), self._bases.get(slot)
        is_start_known = log.plan.seed is not None or start is not None or base is not None
        if not log.is_complete or not is_start_known:
            raise SnapshotError(
                f"slot {slot} cannot be pickled and its episode cannot be replayed (no seed, or "
                "too many actions); give the environment the methods get_state and set_state"
            )
        return Replay(log.plan.seed, log.plan.options, start, log.actions, base)

    def way_back(self, slot: int, *, is_step_owed: bool, has_begun: bool) -> Replay:
        """How to bring a new environment to where the lost one of this slot stood.

        Args:
            slot: The slot.
            is_step_owed: Its last action has no answer, so the way ends before that.
            has_begun: It has reset itself since, which its caller is still to be told.
        """
        assert self._known_starts is not None
        if has_begun:
            plan, actions, is_complete = self.next_plan(slot), (), True
            cell, base = self._rng[slot].tobytes(), None
        else:
            log = self.action_log.log_of(slot)
            plan, actions, is_complete = log.plan, log.actions, log.is_complete
            actions = actions[:-1] if is_step_owed else actions
            cell, base = self._known_starts[slot].tobytes(), self._bases.get(slot)
            self._rng[slot][:] = cell
        start = rng.unpacked(cell)
        if not is_complete:
            raise ResumeFailed(slot, "its episode has more actions than are kept")
        if plan.seed is None and start is None and base is None:
            raise ResumeFailed(
                slot,
                "its episode began without a seed, from a generator that is none of numpy's PCG64",
            )
        return Replay(plan.seed, plan.options, start, actions, base)

    def queued_after(self, slot: int, *, has_begun: bool) -> tuple[ResetPlan, ...]:
        """Plans for the autoresets to come; the first is used up if the slot `has_begun`."""
        is_used = has_begun and slot not in self._restart_plans
        return tuple(self._queued[slot])[1 if is_used else 0 :]

    def lineage_of(self, slot: int) -> Lineage:
        """What the seeds of the slot's coming restarts follow from."""
        return Lineage(self._seeds[slot], self._restarts[slot], self._restart_plans.get(slot))

    def restored(self, slot: int, snapshot: Snapshot) -> None:
        """The slot was brought to another state."""
        taken, lineage = snapshot.taken, snapshot.lineage
        self._num_queued += len(snapshot.queued) - len(self._queued[slot])
        self._queued[slot] = deque(snapshot.queued)
        if isinstance(taken, Replay):
            plan = ResetPlan(taken.seed, taken.options)
            self.began([slot], [plan])
            self.action_log.take_back(slot, plan, taken.actions)
            self._rng[slot][:] = rng.packed(taken.rng)
            base = taken.base
        else:
            self.began([slot], [PLAIN_RESET])
            self._rng[slot][:] = rng.NOT_KNOWN  # it began elsewhere
            base = taken
        self._keep_starts([slot])
        if base is not None and self._known_starts is not None:
            self._bases[slot] = base
        self._seeds[slot], self._restarts[slot] = lineage.seed, lineage.restarts
        if lineage.pending is not None:
            self._restart_plans[slot] = lineage.pending

    def record(self, event: FailureEvent) -> Incident:
        """Turn a failure into an incident that can be replayed."""
        log = self.action_log.log_of(event.slot)
        if event.plan is not None:
            log = EpisodeLog(event.plan, (), is_complete=True)
        try:
            env_fn = cloudpickle.dumps(self._env_fns[event.slot])
        except Exception:  # it never had to travel, so it need not be picklable
            env_fn = None
        start = rng.unpacked(self._rng[event.slot].tobytes())
        is_start_known = log.plan.seed is not None or start is not None
        incident = Incident(
            kind=event.kind,
            slot=event.slot,
            slots=event.slots,
            worker=event.worker,
            doing=event.doing,
            reason=event.reason,
            traceback=event.text,
            exitcode=event.exit_code,
            seed=log.plan.seed,
            options=log.plan.options,
            actions=log.actions,
            rng=start,
            # nothing starts before there is an environment
            is_complete=log.is_complete and (is_start_known or event.doing == "the constructor"),
            env_fn=env_fn,
        )
        self.incidents.append(incident)
        return incident


def restart_plan(
    seed: int | None, num_restarts: int, options: Mapping[str, Any] | None = None
) -> ResetPlan:
    """How a restarted slot is reset: a seed that follows from its last one, so that runs repeat.

    `options` are those of the episode that was lost.
    """
    if seed is None:
        return ResetPlan(None, options)
    (derived,) = np.random.SeedSequence([seed, num_restarts]).generate_state(1)
    return ResetPlan(int(derived) & 0x7FFFFFFF, options)
