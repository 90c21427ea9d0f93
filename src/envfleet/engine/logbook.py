"""What the fleet remembers of each slot: its episode so far, and how often it failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle
import numpy as np
import numpy.typing as npt

from envfleet.engine import rng
from envfleet.engine.batch import Batch, any_set
from envfleet.engine.incident import Incident
from envfleet.engine.journal import EpisodeLog, Journal
from envfleet.engine.options import PLAIN_RESET, EnvFn, ResetPlan
from envfleet.engine.routes import Slots
from envfleet.engine.rows import note_ends
from envfleet.engine.slab import Control
from envfleet.engine.snapshot import Lineage, Replay
from envfleet.engine.supervise import Ledger, restart_plan
from envfleet.errors import SnapshotError


@dataclass(frozen=True, slots=True)
class Event:
    """A failure as the fleet sees it, before the logbook adds how the slot got there."""

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


class Logbook:
    """Seeds, plans, actions and failures of every slot."""

    def __init__(self, env_fns: Sequence[EnvFn], control: Control) -> None:
        self._env_fns = env_fns
        self._rng = [cell.data for cell in control.rng]
        num_slots = len(env_fns)
        self.journal = Journal(num_slots)
        self._queued: list[deque[ResetPlan]] = [deque() for _ in env_fns]
        self._num_queued = 0
        self._restart_plans: dict[int, ResetPlan] = {}
        self._seeds: list[int | None] = [None] * num_slots
        self._restarts = [0] * num_slots
        self.ledgers = [Ledger()] * num_slots
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

    def note_rows(self, first: int, batch: Batch) -> bool:
        """Keep the ends and beginnings of a batch of neighbours in next_step, if all are plain."""
        journal = self.journal
        if self._restart_plans or self._num_queued or journal.plans:
            return False
        self.has_ended = note_ends(
            batch.terminated,
            batch.truncated,
            batch.valid,
            self.ended,
            journal.starts,
            first,
            journal.now,
        )
        return True

    # ---- episodes -------------------------------------------------------------------------------

    def began(self, slots: Sequence[int], plans: Sequence[ResetPlan]) -> None:
        """These slots were reset by these plans."""
        plans = [self.with_seed(slot, plan) for slot, plan in zip(slots, plans, strict=True)]
        for slot, plan in zip(slots, plans, strict=True):
            if plan.seed is not None:
                self._seeds[slot] = plan.seed
            self._restart_plans.pop(slot, None)
        self.journal.began(slots, plans)
        self.set_needs_reset(slots, False)
        self.ended[slots] = False

    def began_by_itself(self, slots: Slots) -> None:
        """These slots reset themselves, by the next plan in their queue if there was one."""
        if not self._restart_plans and not self._num_queued:  # by far the most common
            self.journal.began_plainly(slots)
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

    def queued(self, slot: int) -> tuple[ResetPlan, ...]:
        """Plans that the slot has not used yet."""
        return tuple(self._queued[slot])

    def set_needs_reset(self, slots: Any, value: bool) -> None:
        """Note whether these slots have a running episode."""
        if value or self.num_needing_reset:
            self.needs_reset[slots] = value
            self.num_needing_reset = int(np.count_nonzero(self.needs_reset))

    def plan_restart(self, slot: int) -> ResetPlan:
        """How the slot's next episode begins if its environment must be replaced."""
        self._restarts[slot] += 1
        plan = restart_plan(self._seeds[slot], self._restarts[slot])
        self._restart_plans[slot] = plan
        return plan

    # ---- states and failures --------------------------------------------------------------------

    def replay_of(self, slot: int) -> Replay:
        """How to bring a new environment to where this slot stands."""
        log = self.journal.log_of(slot)
        start = rng.unpacked(self._rng[slot].tobytes())
        if not log.is_complete or (log.plan.seed is None and start is None):
            raise SnapshotError(
                f"slot {slot} cannot be pickled and its episode cannot be replayed (no seed, or "
                "too many actions); give the environment the methods get_state and set_state"
            )
        return Replay(log.plan.seed, log.plan.options, start, log.actions)

    def lineage_of(self, slot: int) -> Lineage:
        """What the seeds of the slot's coming restarts follow from."""
        return Lineage(self._seeds[slot], self._restarts[slot], self._restart_plans.get(slot))

    def restored(
        self, slot: int, queued: Sequence[ResetPlan], replay: Replay | None, lineage: Lineage
    ) -> None:
        """The slot was brought to another state."""
        self._num_queued += len(queued) - len(self._queued[slot])
        self._queued[slot] = deque(queued)
        if replay is None:
            self.began([slot], [PLAIN_RESET])
            self._rng[slot][:] = rng.NOT_KNOWN  # it began elsewhere
        else:
            plan = ResetPlan(replay.seed, replay.options)
            self.began([slot], [plan])
            self.journal.take_back(slot, plan, replay.actions)
            self._rng[slot][:] = rng.packed(replay.rng)
        self._seeds[slot], self._restarts[slot] = lineage.seed, lineage.restarts
        if lineage.pending is not None:
            self._restart_plans[slot] = lineage.pending

    def record(self, event: Event) -> Incident:
        """Turn a failure into an incident that can be replayed."""
        log = self.journal.log_of(event.slot)
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
