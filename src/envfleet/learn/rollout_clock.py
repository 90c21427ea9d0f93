"""What the time of rollouts goes into: environments, the way to them, acting, and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from envfleet.runs.time_report import OF_ROLLOUTS, fleet_seconds


class RolloutClock:
    """Adds up seconds over all rollouts; the collector says what it spends them on."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.inference_s = self.fleet_s = 0.0
        """Seconds of this rollout in acting and judging, and in the fleet's send and recv."""
        self.seconds = dict.fromkeys(OF_ROLLOUTS, 0.0)
        """What the time of all rollouts went into."""

    @contextmanager
    def rollout(self, fleet: Any) -> Iterator[None]:
        """Account for one rollout of this fleet."""
        before = fleet.timings
        self.inference_s = self.fleet_s = 0.0
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            timings = {name: now_s - before[name] for name, now_s in fleet.timings.items()}
            parts = fleet_seconds(timings, len(fleet.bounds), self.fleet_s)
            parts["inference"] = self.inference_s
            elapsed_s = time.perf_counter() - begun_s
            parts["bookkeeping"] = elapsed_s - self.fleet_s - self.inference_s
            for name, spent_s in parts.items():
                self.seconds[name] += spent_s
