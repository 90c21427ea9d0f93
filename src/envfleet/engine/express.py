"""Plain steps of whole workers: past the books, as long as there is nothing to be entered.

Nearly every step is one of these. A lane posts and collects them; whatever is special about a
slot, a worker or a reply is a matter of the books (`traffic`), into which what is under way on the
lane can be entered at any time.
"""

from __future__ import annotations

import time

from envfleet.engine.backends import Lane
from envfleet.engine.crew import Crew
from envfleet.engine.gather import Gatherer
from envfleet.engine.logbook import Logbook
from envfleet.engine.recovery import Recovery
from envfleet.engine.routes import Route, Router
from envfleet.engine.traffic import Traffic


class Express:
    """Decides what goes by the lane, and what is on it."""

    def __init__(
        self,
        crew: Crew,
        traffic: Traffic,
        router: Router,
        logbook: Logbook,
        gatherer: Gatherer,
        recovery: Recovery,
    ) -> None:
        self._crew, self._traffic, self._router = crew, traffic, router
        self._logbook, self._gatherer, self._recovery = logbook, gatherer, recovery
        self._num_slots = router.num_slots
        self._has_pages = crew.data.pages is not None
        self._clear: Lane | None = None
        """The lane, while nothing has been done by the books since they were found to be empty."""
        self.has_replies = False
        """Whether there were any when last somebody waited: such steps are none for the lane."""

    def lane_for(self, route: Route) -> Lane | None:
        """The lane, if there is nothing to be said against a plain step of this route."""
        if route.workers is None or self._logbook.num_needing_reset:
            return None
        lane = self._clear or self._found_clear()
        if lane is None:
            return None
        under_way = lane.under_way
        for worker in route.workers:
            if under_way[worker]:
                return None
        return lane

    def _found_clear(self) -> Lane | None:
        lane, traffic = self._crew.lane, self._traffic
        if (
            lane is not None
            and not self.has_replies
            and not self._gatherer.spills
            and not self._recovery.blocked
            and not any(handle.is_dead for handle in self._crew.handles)
            and (traffic.is_empty or traffic.hand_back(lane))
        ):
            self._clear = lane
        return self._clear

    def collect(
        self, chosen: Route | None, min_slots: int | None, limit_s: float | None
    ) -> tuple[Route, int] | None:
        """Wait for what is on the lane, of these slots if some are chosen.

        Returns what can be handed out, and its page; or None if that is not enough, or something
        about it is special.
        """
        lane, recovery = self._clear, self._recovery
        workers = self._router.everything.workers if chosen is None else chosen.workers
        if lane is None or workers is None:
            return None
        under_way = lane.under_way
        if chosen is None:
            if not any(under_way):
                return None
        elif not all(under_way[worker] for worker in workers):
            return None
        is_patient = chosen is None and min_slots is None
        if not is_patient and recovery.is_any_silent(lane, time.monotonic()):
            return None  # those who are done must not hide one who hangs
        check_s, num_slots = recovery.check_s, self._num_slots
        page = self._page_of(lane, workers) if self._has_pages else 0
        done = lane.collect(
            workers,
            num_slots if min_slots is None or min_slots > num_slots else min_slots,
            check_s if limit_s is None or limit_s > check_s else limit_s,
        )
        if done is None:
            return None
        return chosen or self._router.of_workers(done), page

    def _page_of(self, lane: Lane, workers: tuple[int, ...]) -> int:
        """The one page that these workers write what is under way into, if it is one."""
        pages = {lane.page_of(worker) for worker in workers if lane.under_way[worker]}
        return pages.pop() if len(pages) == 1 else 0

    def leave(self) -> bool:
        """Enter what is on the lane into the books, where all else can see it; is there any?"""
        self._clear = None
        lane = self._crew.lane
        if lane is None or not any(lane.under_way):
            return False
        self._traffic.enter(lane, self._router.everything.parts)
        return True
