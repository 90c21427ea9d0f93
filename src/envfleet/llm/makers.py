"""Episodes begun in workers and played here: for levels that take long to make and short to play.

    wanted ─► handfuls ─► workers begin them ─► episodes come back and go on here
                    └──► this process begins some too, whenever nothing has come back

What is lost with a worker is handed out again. A handful that a worker died of is begun by workers
only, one by one, and so is all of its kind from then on: what ends a worker would end this process.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle

from envfleet.engine import Fleet, Incident, ResetPlan
from envfleet.engine.options import StartMethod
from envfleet.llm.losses import FROM_OUTSIDE, Losses, Verdict
from envfleet.llm.moving import Beginner, Moved
from envfleet.llm.places import GIVEN_UP, Booth, batch_of, end_workers, is_worn, open_fleet
from envfleet.llm.settings import Tag
from envfleet.llm.turns import Failure, Opening

Wanted = tuple[str, int, str]
"""Tag, seed, mode."""
Made = tuple[Moved, Opening]
Handful = list[tuple[int, Wanted]]

_AHEAD = 2
"""Handfuls that a worker has at a time: the next one lies ready when it is done with one."""
_SHARE = 3
"""The part of what is left that makes a handful: 1 in `_SHARE` for each process, at least one."""
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
        self,
        tags: Mapping[str, Tag],
        *,
        num_workers: int,
        start_method: StartMethod | None,
        max_restarts: int,
        deadly: set[str],
    ) -> None:
        """Start the workers.

        Args:
            tags: Whose episodes they are to begin.
            num_workers: How many.
            start_method: And how.
            max_restarts: How many workers one beginning may cost.
            deadly: Tags that must not begin here, because workers have died of them; it grows.
        """
        self._tags, self._start_method = dict(tags), start_method
        self._num_processes = num_workers + 1
        self.fleet = self._open()
        self._deadly = deadly
        self._losses = Losses(max_restarts)
        self._waiting: deque[tuple[int, Wanted]] = deque()
        self._elsewhere: deque[tuple[int, Wanted]] = deque()
        """Those that only workers may begin, one at a time."""
        self._suspects: set[int] = set()
        """Whoever was in a handful that a worker died of, in this rollout."""
        self._handed: dict[int, Handful] = {}
        self._num_rollouts = 0
        """Since the last reset."""
        self._is_idle = False
        """Whether nothing can be left of the last rollout."""

    def send(self, wanted: Mapping[int, Wanted]) -> None:
        """Begin with these episodes."""
        self._mend()
        num_slots = self.fleet.num_slots
        self._waiting, self._handed = deque(wanted.items()), {}
        self._elsewhere.clear()
        self._suspects.clear()
        self._losses.begin_episodes()
        self._bar()
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

    def _mend(self) -> None:
        """Have workers that are there and owe nothing to a rollout that was broken off."""
        if not self._is_idle and self._handed:
            end_workers(self.fleet, self._handed)
        if self.fleet.quarantined or is_worn(self.fleet):
            with suppress(*GIVEN_UP):  # `recv` does without, if there are none to be had
                fleet = self._open()
                self.fleet.close()
                self.fleet, self._is_idle = fleet, False

    def _open(self) -> Fleet:
        tags, num_workers = self._tags, self._num_processes - 1
        makers = [lambda: _Maker(tags)] * (_AHEAD * num_workers)
        return open_fleet(makers, num_workers, self._start_method)

    def recv(
        self,
        take: Callable[[int, Made], None],
        begin_here: Callable[[int], None],
        fail: Callable[[int, Failure], None],
        others: Sequence[int] = (),
    ) -> None:
        """Go on until all have begun.

        Args:
            take: Is given what has come back.
            begin_here: Begins an episode in this process.
            fail: Is told of those that cannot begin.
            others: Who begins in this process anyway, before it lends a hand.
        """
        mine_alone = deque(others)
        try:
            self._share(take, begin_here, fail, mine_alone)
            self._num_rollouts += 1
            self._is_idle = True
        except GIVEN_UP as exc:
            if not self.fleet.quarantined:
                raise
            # no worker can be started any more: all that is left begins here, if it may
            error = f"workers died of its kind, and none is left: {str(exc).splitlines()[0]}"
            left = [one for handful in self._handed.values() for one in handful]
            for env_id, (tag, _, _) in [*left, *self._waiting, *self._elsewhere]:
                if tag in self._deadly:
                    fail(env_id, Failure("reset", error))
                else:
                    begin_here(env_id)
            for env_id in mine_alone:
                begin_here(env_id)

    def _share(
        self,
        take: Callable[[int, Made], None],
        begin_here: Callable[[int], None],
        fail: Callable[[int, Failure], None],
        mine_alone: deque[int],
    ) -> None:
        looked_s, each_s = 0.0, _LOOK_EVERY_S
        while self._handed or self._waiting or self._elsewhere or mine_alone:
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
                self.fleet.reset([ResetPlan()], [slot])
                handful = self._handed.pop(slot)
                incident = next((one for one in batch.incidents if slot in one.slots), None)
                if incident is None or incident.slot != slot:  # nobody had begun with it
                    self._waiting.extendleft(reversed(handful))
                    self._bar()
                elif incident.kind == "exception" and not any(map(self._is_barred, handful)):
                    for env_id, _ in handful:  # one of them cannot travel
                        begin_here(env_id)
                else:
                    self._blame(handful, incident, fail)
                self._hand(slot)
            looked_s = time.perf_counter()

    def _blame(
        self,
        handful: Handful,
        incident: Incident,
        fail: Callable[[int, Failure], None],
    ) -> None:
        """A worker died of one of these."""
        verdict = Verdict("again")
        if len(handful) == 1:
            verdict = self._losses.add(handful[0][0], incident)
        if verdict.what != "failed":  # it is alone in any case
            self._suspects.update(env_id for env_id, _ in handful)
            self._elsewhere.extendleft(reversed(handful))
        else:
            fail(handful[0][0], Failure("reset", verdict.why))
        if verdict.what == "failed" or incident.exitcode not in FROM_OUTSIDE:
            self._deadly.update(tag for _, (tag, _, _) in handful)
        self._bar()

    def _bar(self) -> None:
        """Keep suspects, and all of a deadly kind, from beginning here."""
        if self._deadly or self._suspects:
            waiting, self._waiting = self._waiting, deque()
            for one in waiting:
                (self._elsewhere if self._is_barred(one) else self._waiting).append(one)

    def _is_barred(self, one: tuple[int, Wanted]) -> bool:
        env_id, (tag, _, _) = one
        return env_id in self._suspects or tag in self._deadly

    def _patience_s(self, each_s: float) -> float:
        """How long nobody has to look, if one beginning takes so long."""
        if not self._handed:
            return math.inf
        return min(_LOOK_EVERY_S, each_s * min(map(len, self._handed.values())))

    def close(self) -> None:
        """End the workers."""
        self.fleet.close()

    def _hand(self, slot: int) -> None:
        if self._elsewhere:
            handful = [self._elsewhere.popleft()]
        elif self._waiting:
            size = max(1, len(self._waiting) // (_SHARE * self._num_processes))
            handful = [self._waiting.popleft() for _ in range(size)]
        else:
            return
        self._handed[slot] = handful
        # As bytes, because the fleet keeps a copy of what it sends, and theirs costs nothing.
        self.fleet.send(batch_of([pickle.dumps(handful)]), [slot])
