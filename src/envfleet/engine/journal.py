"""What was done to each slot since its episode began: enough to do it again.

One entry per send, kept while some running episode needs it; a bound on the bytes keeps endless
episodes from filling the memory, after which a slot's log is marked as no longer complete.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine.options import PLAIN_RESET, ResetPlan
from envfleet.engine.whole import whole

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


class Journal:
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
        """Keep actions, which must be the journal's own, of these slots (None: all)."""
        self._entries.append((slots, actions))
        self._bytes += _ENTRY_BYTES + _weight(actions)
        if len(self._entries) % _TRIM_EVERY == 0 or self._bytes > LIMIT_BYTES:
            self._trim()

    def take_out(self, number: int) -> None:
        """Forget the entries from this number on: what they say was never done."""
        while self.now > number and self._entries:
            self._bytes -= _ENTRY_BYTES + _weight(self._entries.pop()[1])

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
        with whole:
            while self._entries and (self._base < needed_from or self._bytes > LIMIT_BYTES):
                _, actions = self._entries.popleft()
                self._bytes -= _ENTRY_BYTES + _weight(actions)
                self._base += 1


def _weight(value: Any) -> int:
    """About how many bytes a value takes."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_weight, value.values())) + sys.getsizeof(value)
    if isinstance(value, list | tuple):
        return sum(map(_weight, value)) + sys.getsizeof(value)
    return sys.getsizeof(value)
