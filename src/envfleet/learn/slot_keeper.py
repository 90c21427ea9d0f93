"""The states of a fleet's environments, for checkpoints.

Environments that can only be replayed are tried, one before the first step and all of them at the
first checkpoint: where a replay does not lead back, that is said then, and not when a run is to go
on.
"""

from __future__ import annotations

import warnings
from typing import Any

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.engine.snapshot import Replay, does_not_repeat
from envfleet.errors import SnapshotError


class SlotKeeper:
    """Takes the states of all slots of one fleet."""

    def __init__(self, envs: FleetVectorEnv) -> None:
        """Nothing is tried before `take`."""
        self._envs = envs
        self._repeats = True
        """False once a replay did not lead back."""
        self._tried: set[bool] = set()
        """Whether replays of episodes with a seed and of those without have been tried."""
        self._has_tried_reset = False

    def take(self) -> Any:
        """The states, or None with a warning if they cannot be taken."""
        if not self._repeats:
            return None
        try:
            slots = self._envs.snapshot()
            self._try_replays(slots)
        except SnapshotError as exc:
            warnings.warn(
                f"{exc}. Until then states are kept without the environments: a run that goes on "
                "from one begins new episodes",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return slots

    def _try_replays(self, slots: Any) -> None:
        """Replay all episodes of a kind that was not tried yet, in other environments."""
        untried = [
            slot
            for slot, one in enumerate(slots)
            if isinstance(one.taken, Replay)
            and len(one.taken.actions)
            and one.lineage.pending is None
            and (one.taken.seed is None) not in self._tried
        ]
        if not untried:
            self._try_reset(slots)
            return
        self._tried |= {slots[slot].taken.seed is None for slot in untried}
        self._rehearse(slots, untried)

    def _try_reset(self, slots: Any) -> None:
        """Before the first step, see whether the first environment begins as another one does."""
        if self._tried or self._has_tried_reset:
            return
        self._has_tried_reset = True
        first = slots[0]
        if isinstance(first.taken, Replay) and first.lineage.pending is None:
            self._rehearse(slots, [0])

    def _rehearse(self, slots: Any, numbers: list[int]) -> None:
        found = self._envs.fleet.rehearse([slots[slot] for slot in numbers], numbers)
        for slot, repeats in zip(numbers, found, strict=True):
            if repeats is False:
                self._repeats = False
                raise does_not_repeat(slot)
