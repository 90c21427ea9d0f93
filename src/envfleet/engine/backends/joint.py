"""The lane where some workers are processes and the others are hosts in this process.

The processes begin first; while they step, this process steps its own.
"""

from __future__ import annotations

import time
from collections.abc import Set

from envfleet.engine.backends.process.fast_path import ProcessFastPath
from envfleet.engine.backends.serial import SerialFastPath
from envfleet.engine.interrupts import uninterrupted

SPIN_S = 50e-6
"""Being woken takes as long. Elsewhere this process must not spin, because its core is a worker's;
here it is one of the workers."""


class JointFastPath:
    """One lane over two; each knows its own workers."""

    def __init__(self, away: ProcessFastPath, here: SerialFastPath, workers_here: Set[int]) -> None:
        self._away, self._here, self._workers_here = away, here, frozenset(workers_here)
        self.under_way = here.under_way = away.under_way
        self._splits: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Start the processes; what is to be done here waits for `collect`."""
        here, away = self._split(workers)
        with uninterrupted:
            self._away.post(away, request, page)
            self._here.post(here, request, page)

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float
    ) -> tuple[int, ...] | None:
        """Do what is to be done here, then wait for the others; unless these are enough already."""
        here, away = self._split(workers)
        ports, under_way = self._away.ports, self.under_way
        if min_slots <= sum([ports[worker][-1] for worker in away if under_way[worker]]):
            done_away = self._away.collect(away, min_slots, 0.0)
            if done_away is not None:
                return done_away
        give_up_s = time.perf_counter() + limit_s
        done_here = self._here.serve(here, min_slots, limit_s)
        if done_here is None:
            return None
        num_missing = max(min_slots - sum(handle.count for handle in done_here), 0)
        left_s = max(give_up_s - time.perf_counter(), 0.0)
        done_away = self._away.collect(away, num_missing, left_s, SPIN_S)
        if done_away is None:
            return None  # those here keep what they have done until it is asked for again
        self._here.take(done_here)
        done = (*(handle.worker for handle in done_here), *done_away)
        return done if len(done) == 1 else tuple(sorted(done))

    def request_of(self, worker: int) -> int:
        """The identity of what this worker has under way."""
        return self._of(worker).request_of(worker)

    def page_of(self, worker: int) -> int:
        """Where what this worker has under way is put as well."""
        return self._of(worker).page_of(worker)

    def resume(self, workers: tuple[int, ...]) -> bool:
        """Both must be able to."""
        here, away = self._split(workers)
        return self._here.can_resume(here) and self._away.resume(away) and self._here.resume(here)

    def _of(self, worker: int) -> ProcessFastPath | SerialFastPath:
        return self._here if worker in self._workers_here else self._away

    def _split(self, workers: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of them that are here, and the others."""
        split = self._splits.get(workers)
        if split is None:
            here = tuple(worker for worker in workers if worker in self._workers_here)
            away = tuple(worker for worker in workers if worker not in self._workers_here)
            split = self._splits[workers] = here, away
        return split
