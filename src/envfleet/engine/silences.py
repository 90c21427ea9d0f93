"""Watching workers that owe an answer: how long each has stood at one place, and is it too long.

`Silence` and the functions below it are the rules; they are pure. `Silences` looks at the workers,
often enough, and finds those that have passed their deadline; what becomes of them is up to
`recovery`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from envfleet.engine.backends.base import WorkerHandle
from envfleet.engine.inflight import Inflight, Pending
from envfleet.engine.messages import Op, WorkerStatus
from envfleet.engine.options import Deadlines
from envfleet.engine.workers import Workers
from envfleet.errors import level_of_caller


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


@dataclass(frozen=True, slots=True)
class Overdue:
    """A worker that has passed its deadline."""

    handle: WorkerHandle
    oldest: Pending
    """What it was asked."""
    op: Op
    slot: int
    is_known: bool
    """The worker says that it is this slot; else it may be any of its slots."""
    limit_s: float
    option: str
    """The option that sets the limit."""
    since_s: float
    """Since when it has been silent."""


class Silences:
    """How long each worker has been silent."""

    def __init__(self, workers: Workers, inflight: Inflight, deadlines: Deadlines) -> None:
        self._workers, self._inflight, self._deadlines = workers, inflight, deadlines
        self._silences: dict[int, Silence] = {}
        self.check_s = check_every(deadlines)
        self._next_check_s = self._next_look_s = self._looked_s = 0.0

    def note_wait(self, waited_s: float, limit_s: float, now_s: float) -> None:
        """A wait of at most `limit_s` took so long: if far too long, silences are counted anew."""
        self._looked_s = now_s
        if is_gap(waited_s - limit_s, self.check_s):
            self._silences = {
                worker: silence.restarted(now_s) for worker, silence in self._silences.items()
            }

    def is_check_due(self, now_s: float) -> bool:
        """Whether it is time to look at silent workers again; replies must be taken in first."""
        if now_s < self._next_check_s:
            return False
        self._next_check_s = now_s + self.check_s
        return True

    def is_any_too_long(self, now_s: float) -> bool:
        """Whether a worker has stood at one place of a plain step for too long."""
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + self.check_s
        self._note_look(now_s)
        silences = [
            self._look(worker, self._inflight.steps.request_of(worker), now_s)
            for worker, is_plain in enumerate(self._inflight.plain)
            if is_plain
        ]
        is_any = any(self._is_too_long(one, now_s) for one in silences)
        if is_any:
            self._next_check_s = 0.0
        return is_any

    def overdue(self, now_s: float, coming: Set[int]) -> Iterator[Overdue]:
        """The workers that have passed their deadline; without one there is a warning.

        Workers that are `coming` have a deadline of their own.
        """
        self._note_look(now_s)
        for handle in list(self._workers.handles):
            owed = self._inflight.outstanding[handle.worker]
            if not owed or handle.is_dead or handle.worker in coming:
                continue
            silence = self._look(handle.worker, owed[0].command.request, now_s)
            op, slot = silence.status.op, silence.status.slot
            op = owed[0].command.op if op is Op.IDLE else op
            limit_s, option = limit_for(op, self._deadlines)
            whose = handle.first if slot is None else slot
            if limit_s is None:
                self._warn(handle, silence, now_s, f"slot {whose}", op, option)
            elif now_s - silence.since_s >= limit_s:
                is_known, since_s = slot is not None, silence.since_s
                yield Overdue(handle, owed[0], op, whose, is_known, limit_s, option, since_s)

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._silences.pop(worker, None)

    def _look(self, worker: int, request: int, now_s: float) -> Silence:
        status = self._workers.handles[worker].status()
        known = self._silences.get(worker) or Silence(request, status, now_s)
        self._silences[worker] = silence = known.look(request, status, now_s)
        return silence

    def _note_look(self, now_s: float) -> None:
        """The silences are looked at again; a long time without a look is excused once."""
        late_s, self._looked_s = now_s - self._looked_s - self.check_s, now_s
        if is_gap(late_s, self.check_s):
            self._silences = {
                worker: silence.excused(now_s) for worker, silence in self._silences.items()
            }

    def _is_too_long(self, silence: Silence, now_s: float) -> bool:
        op = silence.status.op
        limit_s, _ = limit_for(Op.STEP if op is Op.IDLE else op, self._deadlines)
        quiet_s = now_s - silence.since_s
        if limit_s is None:
            return quiet_s >= self._deadlines.warn_s and not silence.is_warned
        return quiet_s >= limit_s

    def _warn(
        self, handle: WorkerHandle, silence: Silence, now_s: float, whose: str, op: Op, option: str
    ) -> None:
        quiet_s = now_s - silence.since_s
        if quiet_s >= self._deadlines.warn_s and not silence.is_warned:
            self._silences[handle.worker] = replace(silence, is_warned=True)
            warnings.warn(
                f"the fleet has waited {quiet_s:.0f} s for {whose} (worker {handle.worker}) in "
                f"{op.phrase}; set {option} to end such waits. It stands at:\n{handle.stack()}",
                RuntimeWarning,
                stacklevel=level_of_caller(),
            )
