"""Which worker plays which trajectory.

Every worker begins with a share of its own, the longest trajectories first. One that has no more
takes from the worker that has most left. A worker that rests, because the machine is short of
memory or of cores, leaves its share to the others. A trajectory that was lost with its worker, once
or twice, may be what the worker died of: from then on it is played alone, so that no other is lost
with it.

Law: a trajectory belongs to one worker at a time, and every trajectory is played to its end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from envfleet.llm.play_rules import TrajectoryTask

_LEAST_MEMORY = 0.1
"""Share of the memory that must be free for another worker; below half of it one has to rest."""
_MOST_LOAD = 2.0
"""Processes per core that run or want to, beyond which one worker after another has to rest."""

Key = tuple[int, int]
"""Environment and attempt."""


def split(tasks: Sequence[TrajectoryTask], num_workers: int) -> list[list[TrajectoryTask]]:
    """Neighbouring trajectories for each worker; sizes differ by one at most."""
    least, more = divmod(len(tasks), num_workers)
    shares, begin = [], 0
    for worker in range(num_workers):
        end = begin + least + (worker < more)
        shares.append(list(tasks[begin:end]))
        begin = end
    return shares


class WorkShare:
    """Hands out tasks; may be called from any thread."""

    def __init__(
        self,
        tasks: Sequence[TrajectoryTask],
        num_workers: int,
        expected: Callable[[TrajectoryTask], float] = lambda task: 0.0,
        num_losses: dict[Key, int] | None = None,
        suspect_after: int = 2,
    ) -> None:
        """Share out tasks.

        Args:
            tasks: All of them.
            num_workers: How many workers ask.
            expected: How long a trajectory is expected to be, in any unit.
            num_losses: How often trajectories were lost with their workers, counted on here.
            suspect_after: How often a trajectory is lost before it is played alone.
        """
        self._lock = threading.Lock()
        self._expected, self._suspect_after = expected, suspect_after
        self._shares = [
            deque(sorted(one, key=expected, reverse=True)) for one in split(tasks, num_workers)
        ]
        self._owner: dict[Key, int] = {}
        self.num_losses = {} if num_losses is None else num_losses
        self.active = num_workers
        """How many workers may begin trajectories."""
        self.num_stolen = 0

    def env_ids(self) -> list[list[int]]:
        """The environments in the share of each worker."""
        with self._lock:
            return [sorted(task.env_id for task in share) for share in self._shares]

    def next(self, worker: int) -> TrajectoryTask | None:
        """A task for a worker; None if there is none for it now."""
        with self._lock:
            if worker >= self.active:
                return None
            own = [key for key, owner in self._owner.items() if owner == worker]
            if any(map(self._is_suspect, own)):
                return None
            share = self._shares[worker]
            if not share:
                share = max(self._shares, key=len)
            for task in share:
                key = task.env_id, task.attempt
                if not own or not self._is_suspect(key):
                    self.num_stolen += share is not self._shares[worker]
                    share.remove(task)
                    self._owner[key] = worker
                    return task
            return None

    def _is_suspect(self, key: Key) -> bool:
        return self.num_losses.get(key, 0) >= self._suspect_after

    def grow(self, count: int) -> None:
        """So many workers more may begin trajectories; they take some of the others' shares."""
        with self._lock:
            self._shares += [deque() for _ in range(count)]
            self.active += count

    def add(self, tasks: Iterable[TrajectoryTask]) -> None:
        """More tasks, for those who have least to do."""
        with self._lock:
            for task in tasks:
                min(self._shares[: self.active], key=len).append(task)

    def is_owner(self, worker: int, key: Key) -> bool:
        """Whether a worker plays this trajectory; what another says about it is out of date."""
        with self._lock:
            return self._owner.get(key) == worker

    def ended(self, key: Key) -> None:
        """A trajectory is over."""
        with self._lock:
            self._owner.pop(key, None)

    def lost(self, worker: int) -> list[Key]:
        """A worker is gone: the trajectories that it was playing, which belong to none now."""
        with self._lock:
            keys = [key for key, owner in self._owner.items() if owner == worker]
            for key in keys:
                del self._owner[key]
                self.num_losses[key] = self.num_losses.get(key, 0) + 1
            return keys

    @property
    def num_waiting(self) -> int:
        """Tasks that have not been handed out."""
        with self._lock:
            return sum(map(len, self._shares))

    def rest(self) -> list[TrajectoryTask]:
        """All tasks that have not been handed out; there are none afterwards."""
        with self._lock:
            left = [task for share in self._shares for task in share]
            for share in self._shares:
                share.clear()
            return left


@dataclass(frozen=True, slots=True)
class MachineState:
    """What an adaptive number of workers depends on."""

    load: float
    """Processes that run or want to."""
    cores: int
    free_memory: float
    """The share that is free."""


def wanted_workers(
    active: int, most: int, num_waiting: int, now: MachineState
) -> tuple[int, str | None]:
    """How many workers should play, and why that is another number than before."""
    memory = f"{now.free_memory:.0%} of the memory is free"
    load = f"the load is {now.load:.1f} on {now.cores} cores"
    if active > 1 and now.free_memory < _LEAST_MEMORY / 2:
        return active - 1, f"{active - 1} of {most} workers go on: only {memory}"
    if active > 1 and now.load > _MOST_LOAD * now.cores:
        return active - 1, f"{active - 1} of {most} workers go on: {load}"
    # well below what makes a worker rest: what follows a change must not be its opposite
    has_room = now.free_memory > _LEAST_MEMORY and now.load < 0.75 * _MOST_LOAD * now.cores
    if active < most and num_waiting > 0 and has_room:
        return active + 1, (
            f"{active + 1} of {most} workers go on: {num_waiting} trajectories wait, {load}, and "
            f"{memory}"
        )
    return active, None


def free_memory() -> float:
    """The share of this machine's memory that is free; 1 where it cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return found["MemAvailable"] / found["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return 1.0
