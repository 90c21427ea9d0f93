"""Wall time between the notes of a run, and where it went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from envfleet.observe.figures import SECONDS


class Clock:
    """Wall time between notes, and where it went."""

    def __init__(self, started_s: float, spent: Callable[[], Mapping[str, float]]) -> None:
        self._started_s = self._last_s = started_s
        self._spent, self._before = spent, dict[str, float]()

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._started_s

    @property
    def noted_s(self) -> float:
        """From the start to the last lap."""
        return self._last_s - self._started_s

    def lap(self) -> dict[str, float]:
        """As figures: the seconds since the last lap, and by what they were spent on."""
        now_s = time.perf_counter()
        laps = {"seconds": now_s - self._last_s}
        for name, total_s in self._spent().items():
            lap_s = total_s - self._before.get(name, 0.0)
            # a split may move what it took for waiting to another part: that is not time won
            if lap_s > 0:
                laps[SECONDS + name] = lap_s
                self._before[name] = total_s
        self._last_s = now_s
        return {name: round(value, 6) for name, value in laps.items()}
