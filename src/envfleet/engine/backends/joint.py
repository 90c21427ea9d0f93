"""Plain steps where some workers run beside this process and the others are hosts in it.

The others begin first; while they step, this process steps its own.
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

from envfleet.engine.backends.base import Backend
from envfleet.engine.interrupts import uninterrupted

SPIN_S = 50e-6
"""Waking this process takes as long. Elsewhere it must not spin, because its core is a worker's;
here it is one of the workers."""


class JointFastPath:
    """One `FastPath` over two backends; each knows its own workers."""

    def __init__(self, away: Backend[Any], here: Backend[Any], workers_here: Set[int]) -> None:
        self._away, self._here, self._workers_here = away, here, frozenset(workers_here)
        self.under_way = here.under_way = away.under_way
        away.spin_s = SPIN_S
        self._splits: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Start the others; what is to be done here waits for `collect`."""
        here, away = self._split(workers)
        with uninterrupted:
            self._away.post(away, request, page)
            self._here.post(here, request, page)

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Do what is to be done here, unless the others are enough; then wait for the others."""
        here, away = self._split(workers)
        give_up_s = time.perf_counter() + limit_s
        if min_slots <= self._num_slots(self._away, away):
            done_away = self._away.collect(away, min_slots, 0.0)
            if done_away is not None:
                return done_away
        done_here = self._here.wait_for_steps(here, min_slots, limit_s)
        if done_here is None:
            return None
        num_missing = max(min_slots - self._num_slots(self._here, done_here), 0)
        left_s = max(give_up_s - time.perf_counter(), 0.0)
        done_away = self._away.collect(away, num_missing, left_s)
        if done_away is None:
            return None  # those here keep what they have done until it is collected again
        self._here.take_steps(done_here)
        done = (*done_here, *done_away)
        return done if len(done) == 1 else tuple(sorted(done))

    def request_of(self, worker: int) -> int:
        """The identity of what this worker has under way."""
        return self._of(worker).request_of(worker)

    def page_of(self, worker: int) -> int:
        """The page that this worker has been told to write."""
        return self._of(worker).page_of(worker)

    def _of(self, worker: int) -> Backend[Any]:
        return self._here if worker in self._workers_here else self._away

    def _num_slots(self, backend: Backend[Any], workers: tuple[int, ...]) -> int:
        """How many slots of these workers are under way."""
        return sum([backend.handles[worker].count for worker in workers if self.under_way[worker]])

    def _split(self, workers: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The workers in this process, and the others."""
        split = self._splits.get(workers)
        if split is None:
            here = tuple(worker for worker in workers if worker in self._workers_here)
            away = tuple(worker for worker in workers if worker not in self._workers_here)
            split = self._splits[workers] = here, away
        return split
