"""Pure decisions about trouble: what a failure leads to, and when a silence is a failure.

No clock, process or file in here; the fleet tells what happened and when, and carries out the
verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np

from envfleet.engine.messages import Op, WorkerStatus
from envfleet.engine.options import Deadlines, OnFailure, ResetPlan, RestartPolicy


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


@dataclass(frozen=True, slots=True)
class RecentFailures:
    """When one slot failed, lately."""

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
) -> tuple[RecentFailures, Decision]:
    """What one more failure of a slot leads to; `is_lost` means that its whole worker is gone.

    "restart" and "resume" decide alike: they differ in where the slot goes on. A slot that
    `was_late` does not go on in this process, where nothing could end its next silence. `lost_s` is
    for how long it has done nothing.
    """
    recent = recent.moved(lost_s).add(now_s, policy.window_s)
    if on_failure == "raise" or (on_failure == "fallback" and (was_late or not is_lost)):
        return recent, Decision.RAISE
    if on_failure == "fallback":
        return recent, Decision.FALL_BACK
    if len(recent.failures) > policy.max_restarts:
        return recent, Decision.QUARANTINE
    return recent, Decision.RELAUNCH if is_lost else Decision.REBUILD


def restart_plan(
    seed: int | None, num_restarts: int, options: Mapping[str, Any] | None = None
) -> ResetPlan:
    """How a restarted slot is reset: a seed that follows from its last one, so that runs repeat.

    `options` are those of the episode that was lost.
    """
    if seed is None:
        return ResetPlan(None, options)
    (derived,) = np.random.SeedSequence([seed, num_restarts]).generate_state(1)
    return ResetPlan(int(derived) & 0x7FFFFFFF, options)


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a worker has stood at the same place of the same request."""

    request: int
    status: WorkerStatus
    since_s: float
    is_warned: bool = False
    is_excused: bool = False
    """It was counted anew once because no one had looked at it for long."""

    def look(self, request: int, status: WorkerStatus, now_s: float) -> Silence:
        """The same silence if nothing has moved, else a new one."""
        if (request, status) == (self.request, self.status):
            return self
        return Silence(request, status, now_s)

    def restarted(self, now_s: float) -> Silence:
        """Counted anew: this process stood still itself, and perhaps the worker with it."""
        return replace(self, since_s=now_s)

    def excused(self, now_s: float) -> Silence:
        """Counted anew, once: nothing tells whether this process stood still or had other work."""
        return self if self.is_excused else replace(self, since_s=now_s, is_excused=True)


def is_gap(late_s: float, check_s: float) -> bool:
    """Whether something that was due `late_s` ago shows that this process stood still.

    A suspended program (Ctrl-Z, a paused container) finds that its clock has jumped. `check_s` is
    how often it looks at its workers, a quarter of the shortest deadline.
    """
    return late_s >= max(2 * check_s, 0.05)


def limit_for(op: Op, deadlines: Deadlines) -> tuple[float | None, str]:
    """The deadline in force for what a worker is doing, and the option that sets it."""
    if op is Op.STEP:
        return deadlines.step_s, "step_timeout_s"
    return deadlines.reset_s, "reset_timeout_s"


def check_every(deadlines: Deadlines) -> float:
    """How often to look at silent workers: often enough to be a quarter late at most."""
    limits = [limit for limit in (deadlines.step_s, deadlines.reset_s) if limit is not None]
    return min(1.0, max(0.005, min([deadlines.warn_s, *limits]) / 4))
