"""The lane to processes: plain steps posted, awaited and collected in C, if that was compiled."""

from __future__ import annotations

from envfleet.engine.backends.process.bell import HAS_EVENTFD
from envfleet.engine.backends.process.main import PAGE_SHIFT
from envfleet.engine.messages import Op
from envfleet.engine.rows import WorkerPort, collect_steps, post_steps

POSTED, DONE, TAKEN = range(3)
"""What is counted of a worker's commands."""


class ProcessFastPath:
    """Ports of all workers, and what each has under way."""

    def __init__(self, num_workers: int, urgent_fd: int) -> None:
        self.ports: list[WorkerPort] = [()] * num_workers  # type: ignore[list-item]  # until launched
        self.under_way = bytearray(num_workers)
        self._urgent_fd = urgent_fd

    @classmethod
    def open(cls, num_workers: int, urgent_fd: int | None) -> ProcessFastPath | None:
        """A lane, if there can be one here."""
        return None if urgent_fd is None or not HAS_EVENTFD else cls(num_workers, urgent_fd)

    def post(self, workers: tuple[int, ...], request: int, page: int) -> None:
        """Write it into their rings and ring their bells."""
        post_steps(self.ports, self.under_way, workers, request, Op.STEP, page << PAGE_SHIFT)

    def collect(
        self, workers: tuple[int, ...], min_slots: int, limit_s: float, spin_s: float = 0.0
    ) -> tuple[int, ...] | None:
        """Wait for their bells, by looking again and again for a while, and then asleep."""
        return collect_steps(
            self.ports, self.under_way, workers, min_slots, self._urgent_fd, limit_s, spin_s
        )

    def request_of(self, worker: int) -> int:
        """The identity of what this worker has under way."""
        return self._last(worker, 0)

    def page_of(self, worker: int) -> int:
        """Where what this worker has under way is put as well."""
        return self._last(worker, 2) >> PAGE_SHIFT

    def _last(self, worker: int, index: int) -> int:
        """Of what was written into its ring last."""
        ring, _, counts, *_ = self.ports[worker]
        return int(ring[(int(counts[POSTED]) - 1) * 3 % len(ring) + index])

    def resume(self, workers: tuple[int, ...]) -> bool:
        """Wait for bells of theirs that have not been taken."""
        counts = [self.ports[worker][2] for worker in workers]
        if any(count[TAKEN] != count[DONE] for count in counts):
            return False
        for worker in workers:
            self.under_way[worker] = 1
        return True
