"""Episodes begun in workers and played here: for levels that take long to make and short to play.

    wanted ─► handfuls ─► workers begin them ─► episodes come back and go on here
                    └──► this process begins some too, whenever nothing has come back

What is lost with a worker is handed out again, and what is lost too often is begun here.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle

from envfleet.engine import ResetPlan
from envfleet.engine.options import StartMethod
from envfleet.llm.moving import Beginner, Moved
from envfleet.llm.places import GIVEN_UP, Booth, batch_of, open_fleet
from envfleet.llm.settings import Tag
from envfleet.llm.turns import Opening

Wanted = tuple[str, int, str]
"""Tag, seed, mode."""
Made = tuple[Moved, Opening]
Handful = list[tuple[int, Wanted]]

_AHEAD = 2
"""Handfuls that a worker has at a time: the next one lies ready when it is done with one."""
_SHARE = 3
"""The part of what is left that makes a handful: 1 in `_SHARE` for each process, at least one."""
_MOST_LOSSES = 3
_LOOK_EVERY_S = 3e-3
"""How long this process begins episodes of its own before it looks what has come back, at most:
sooner where the least that a worker was handed must be done by then."""

_RESET_EVERY = 16
"""After so many rollouts the fleet is to forget what it was sent. A reset finds workers asleep."""


class _Maker(Booth):
    """In a slot: a step begins the episodes it is handed."""

    def __init__(self, tags: Mapping[str, Tag]) -> None:
        self._beginners = {name: Beginner(partial(Tag.make, tag)) for name, tag in tags.items()}

    def step(self, action: bytes) -> tuple[bytes, float, bool, bool, dict[str, Any]]:
        made = [
            (env_id, self._beginners[name].begin(seed, mode))
            for env_id, (name, seed, mode) in pickle.loads(action)
        ]
        return _pickled(made), 0.0, False, False, {}


def _pickled(made: list[tuple[int, Made]]) -> bytes:
    try:
        return pickle.dumps(made, pickle.HIGHEST_PROTOCOL)
    except Exception:  # an answer of a class that only its own script knows
        blob: bytes = cloudpickle.dumps(made)
        return blob


class Makers:
    """A fleet whose workers begin episodes for environments of this process."""

    def __init__(
        self, tags: Mapping[str, Tag], *, num_workers: int, start_method: StartMethod | None
    ) -> None:
        known, num_slots = dict(tags), _AHEAD * num_workers
        self._num_processes = num_workers + 1
        self.fleet = open_fleet([lambda: _Maker(known)] * num_slots, num_workers, start_method)
        self._waiting: deque[tuple[int, Wanted]] = deque()
        self._handed: dict[int, Handful] = {}
        self._num_rollouts = 0
        """Since the last reset."""
        self._is_idle = False
        """Whether nothing can be left of the last rollout."""

    def send(self, wanted: Mapping[int, Wanted]) -> None:
        """Begin with these episodes."""
        num_slots = self.fleet.num_slots
        self._waiting, self._handed = deque(wanted.items()), {}
        try:
            if not self._is_idle or self._num_rollouts == _RESET_EVERY:
                self.fleet.reset([ResetPlan()] * num_slots)
                self._num_rollouts = 0
            self._is_idle = False
            # A worker's slots are neighbours: each worker gets its first before any a second.
            for slot in sorted(range(num_slots), key=lambda slot: slot % _AHEAD):
                self._hand(slot)
        except GIVEN_UP:
            if not self.fleet.quarantined:
                raise  # else `recv` begins them here

    def recv(
        self,
        take: Callable[[int, Made], None],
        begin_here: Callable[[int], None],
        others: Sequence[int] = (),
    ) -> None:
        """Go on until all have begun.

        Args:
            take: Is given what has come back.
            begin_here: Begins an episode in this process.
            others: Who begins in this process anyway, before it lends a hand.
        """
        mine_alone = deque(others)
        try:
            self._share(take, begin_here, mine_alone)
            self._num_rollouts += 1
            self._is_idle = True
        except GIVEN_UP:
            if not self.fleet.quarantined:
                raise
            # no worker can be started any more: all that is left begins here
            left = [env_id for handful in self._handed.values() for env_id, _ in handful]
            for env_id in [*left, *(env_id for env_id, _ in self._waiting), *mine_alone]:
                begin_here(env_id)

    def _share(
        self,
        take: Callable[[int, Made], None],
        begin_here: Callable[[int], None],
        mine_alone: deque[int],
    ) -> None:
        losses, looked_s, each_s = 0, 0.0, _LOOK_EVERY_S
        while self._handed or self._waiting or mine_alone:
            has_work = bool(mine_alone or self._waiting)
            begun_s = time.perf_counter()
            if has_work and begun_s < looked_s + self._patience_s(each_s):
                begin_here(mine_alone.popleft() if mine_alone else self._waiting.pop()[0])
                each_s = time.perf_counter() - begun_s
                continue
            batch = self.fleet.recv(min_slots=1, timeout_s=0 if has_work else None)
            for row, slot in enumerate(batch.slots.tolist()):
                if batch.valid[row]:
                    del self._handed[slot]
                    self._hand(slot)
                    for env_id, made in pickle.loads(batch.obs[row]):
                        take(env_id, made)
                    continue
                losses += 1
                self.fleet.reset([ResetPlan()], [slot])
                mine = self._handed.pop(slot)
                if losses <= _MOST_LOSSES:
                    self._waiting.extend(mine)
                else:
                    for env_id, _ in mine:
                        begin_here(env_id)
                self._hand(slot)
            looked_s = time.perf_counter()

    def _patience_s(self, each_s: float) -> float:
        """How long nobody has to look, if one beginning takes so long."""
        if not self._handed:
            return math.inf
        return min(_LOOK_EVERY_S, each_s * min(map(len, self._handed.values())))

    def close(self) -> None:
        """End the workers."""
        self.fleet.close()

    def _hand(self, slot: int) -> None:
        if self._waiting:
            size = max(1, len(self._waiting) // (_SHARE * self._num_processes))
            self._handed[slot] = [self._waiting.popleft() for _ in range(size)]
            # As bytes, because the fleet keeps a copy of what it sends, and theirs costs nothing.
            self.fleet.send(batch_of([pickle.dumps(self._handed[slot])]), [slot])
