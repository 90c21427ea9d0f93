"""How slots whose environment is gone go on in a new one: the orders that `EnvHost.resume` takes.

By "restart" a slot owes a truncated row, and then begins anew. By "resume" it is driven to where
the lost environment stood, so an order is a snapshot of that. What the caller has been told counts,
and not what a lost worker may have written since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envfleet.engine.batch_reader import BatchReader
from envfleet.engine.episodes import Episodes
from envfleet.engine.host import ReturnOrder, SlotState
from envfleet.engine.inflight import Inflight, Pending
from envfleet.engine.messages import Op
from envfleet.engine.options import Autoreset, ResetPlan
from envfleet.engine.slots import SlotSets
from envfleet.engine.snapshot import Snapshot
from envfleet.engine.workers import Workers

FleetParts = tuple[Workers, Inflight, SlotSets, Episodes, BatchReader]
"""What those who see to answers and failures of a fleet work on."""


class ReturnOrders:
    """Finds out how lost slots go on."""

    def __init__(self, parts: FleetParts, autoreset: Autoreset) -> None:
        self._workers, self._inflight, self._slot_sets, self._episodes, self._batch_reader = parts
        self._autoreset = autoreset

    def restart(self, slot: int, *, has_ended: bool = False) -> ReturnOrder:
        """The slot owes a truncated row, unless its episode `has_ended` already."""
        plan = self._episodes.plan_restart(slot, has_ended=has_ended)
        return plan, self._batch_reader.spills.get(slot), has_ended

    def restart_all(self, slots: Sequence[int]) -> list[ReturnOrder]:
        """The same for all slots of a lost worker."""
        control = self._workers.control
        # an end that was written but never answered is not known to the caller
        ended = self._episodes.ended.copy()
        told = list(self._inflight.unreceived())
        ended[told] = control.terminated[told] | control.truncated[told]
        waits_for_reset = self._autoreset == "next_step"
        if self._autoreset == "same_step":
            in_flight = self._inflight.in_flight
            self._batch_reader.take_back_resets([slot for slot in slots if in_flight[slot]])
        return [
            self.restart(slot, has_ended=waits_for_reset and bool(ended[slot])) for slot in slots
        ]

    def resume(self, slot: int, owed: Pending | None) -> Snapshot:
        """The slot as it was before what it owes: driven there, a new environment can do it.

        Raises:
            ResumeFailed: Too little is known of its episode.
        """
        episodes, control = self._episodes, self._workers.control
        op = None if owed is None else owed.command.op
        ended, has_begun = bool(episodes.ended[slot]), False
        if slot in self._inflight.unreceived() and slot not in self._inflight.reset_slots:
            # its caller knows neither the end nor the beginning that this row may be
            ended = bool(control.terminated[slot] or control.truncated[slot])
            is_reset_row = bool(control.invalid[slot]) and not ended
            has_begun = ended if self._autoreset == "same_step" else is_reset_row
        queued = episodes.queued_after(slot, has_begun=has_begun)
        lineage = episodes.lineage_of(slot)
        begins_anew = op is Op.RESTORE or (
            op is Op.RESET and self.plan_of(owed, slot).seed is not None
        )
        if begins_anew or not episodes.has_history[slot]:
            return Snapshot(None, None, SlotState.UNUSABLE, queued, lineage)
        replay = episodes.way_back(slot, is_step_owed=op is Op.STEP, has_begun=has_begun)
        reader = self._batch_reader
        obs = reader.observation(slot) if op is None else reader.kept_obs(slot)
        waits_for_reset = ended and self._autoreset == "next_step"
        state = SlotState.ENDED if waits_for_reset else SlotState.RUNNING
        return Snapshot(replay, obs, state, queued, lineage)

    def plan_of(self, pending: Pending | None, slot: int) -> ResetPlan:
        """How `slot` is reset by this command: as its caller said, or by itself."""
        if pending is None or pending.command.op is not Op.RESET:
            return self._episodes.next_plan(slot)
        return self._episodes.with_seed(slot, self.share_of(pending, slot))

    def share_of(self, pending: Pending, slot: int) -> Any:
        """What a command's payload has for this slot."""
        command = pending.command
        if command.slots is not None:
            return command.payload[list(command.slots).index(slot)]
        first, _ = self._workers.bounds[int(self._slot_sets.worker_of[slot])]
        return command.payload[slot - first]
