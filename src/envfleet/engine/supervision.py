"""What a failure leads to: a pure decision.

No clock, process or file in here; `recovery` tells what happened and when, and carries out the
decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from envfleet.engine.options import OnFailure, RestartPolicy


class Decision(Enum):
    """What the fleet does about an incident."""

    RAISE = auto()
    REBUILD = auto()
    """A new environment in the same worker."""
    RELAUNCH = auto()
    """A new worker for all its slots."""
    FALL_BACK = auto()
    """The slots go on in this process."""
    QUARANTINE = auto()


COMES_BACK = Decision.REBUILD, Decision.RELAUNCH


@dataclass(frozen=True, slots=True)
class RecentFailures:
    """When one slot failed, lately or since it last worked."""

    failures: tuple[float, ...] = ()

    def add(self, now_s: float, window_s: float) -> RecentFailures:
        """Count a failure and forget those outside the window."""
        recent = tuple(when for when in self.failures if now_s - when < window_s)
        return RecentFailures((*recent, now_s))

    def moved(self, lost_s: float) -> RecentFailures:
        """The slot did nothing for this long: that time is not part of the window.

        Else a slot that hangs at every step would outlive any budget, if its deadline is long.
        """
        return RecentFailures(tuple(when + lost_s for when in self.failures))


def decide(
    recent: RecentFailures,
    now_s: float,
    on_failure: OnFailure,
    policy: RestartPolicy,
    *,
    is_lost: bool,
    was_late: bool = False,
    lost_s: float = 0.0,
    has_worked: bool = True,
) -> tuple[RecentFailures, Decision]:
    """What one more failure of a slot leads to; `is_lost` means that its whole worker is gone.

    "restart" and "resume" decide alike: they differ in where the slot goes on. A slot that
    `was_late` does not go on in this process, where nothing could end its next silence. `lost_s` is
    how long it has done nothing. Old failures are forgotten only if it `has_worked` since the last
    one: otherwise a slot that always fails, but slowly, would be restarted for ever.
    """
    recent = recent.moved(lost_s).add(now_s, policy.window_s if has_worked else math.inf)
    if on_failure == "raise" or (on_failure == "fallback" and (was_late or not is_lost)):
        return recent, Decision.RAISE
    if on_failure == "fallback":
        return recent, Decision.FALL_BACK
    if len(recent.failures) > policy.max_restarts:
        return recent, Decision.QUARANTINE
    return recent, Decision.RELAUNCH if is_lost else Decision.REBUILD
