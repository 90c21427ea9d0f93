"""Wall time between the notes of a run, and what it was spent on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from envfleet.observe.figures import SECONDS

__all__ = ["Clock"]


class Clock:
    """Measures the time from one note of a run to the next."""

    def __init__(self, started_s: float, spent: Callable[[], Mapping[str, float]]) -> None:
        """Start at `started_s`; `spent` gives the seconds so far of each part of the work."""
        self._started_s = self._last_s = started_s
        self._spent, self._before = spent, dict[str, float]()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started_s

    @property
    def noted_s(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last_s - self._started_s

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap, in all and for each part, as figures."""
        now_s = time.perf_counter()
        laps = {"seconds": now_s - self._last_s}
        for name, total_s in self._spent().items():
            lap_s = total_s - self._before.get(name, 0.0)
            # time may move from one part to another when it is split again: no part gets negative
            if lap_s > 0:
                laps[SECONDS + name] = lap_s
                self._before[name] = total_s
        self._last_s = now_s
        return {name: round(value, 6) for name, value in laps.items()}
