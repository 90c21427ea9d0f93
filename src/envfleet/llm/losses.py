"""How many workers each environment has cost, and what to do with one that is lost again.

Law: an environment that may end its process is never tried in this one. If its workers were killed,
from outside or by itself, it first has to survive the same request in a worker of its own.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from envfleet.engine import Incident

FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of workers that were killed from outside: by the kernel, short of memory, say."""
ALONE = 3
"""An environment whose own worker is killed this often at one place is itself the cause."""
_ANSWERING = ("step", "sending an observation")
"""What an incident says a slot was doing when its reply could not be pickled."""


@dataclass(frozen=True, slots=True)
class LossDecision:
    """What to do with a lost environment, and why if it is not asked again."""

    what: Literal["again", "alone", "failed"]
    why: str = ""


class Losses:
    """Counts losses by environment."""

    def __init__(self, max_restarts: int) -> None:
        """Allow each environment this many workers in one episode."""
        self._max_restarts = max_restarts
        self._in_episode: Counter[int] = Counter()
        self._alone: Counter[tuple[int, int]] = Counter()
        """Losses beyond the budget, by environment and place."""

    def begin_episodes(self) -> None:
        """Give every environment its whole budget again."""
        self._in_episode.clear()
        self._alone.clear()

    def add(self, env_id: int, incident: Incident, place: int = 0) -> LossDecision:
        """Count a loss; `place` says how far the environment had come with its request."""
        self._in_episode[env_id] += 1
        losses = self._in_episode[env_id]
        # What an environment raises is caught next to it, so here its reply could not be pickled,
        # and the next one cannot be either.
        if incident.kind == "exception" and incident.doing in _ANSWERING:
            return LossDecision("failed", f"its answer cannot leave its worker: {incident.reason}")
        if losses <= self._max_restarts:
            return LossDecision("again")
        times = f"{'once' if losses == 1 else f'{losses} times'} in one episode"
        if incident.kind == "exception":
            return LossDecision("failed", f"{incident.reason} in {incident.doing}, {times}")
        if incident.kind == "timeout":
            return LossDecision("failed", f"its worker passed its deadline {times}")
        if incident.exitcode not in FROM_OUTSIDE:
            return LossDecision("failed", f"its worker died {times}")
        killed = f"its worker was killed {times} (exit code {incident.exitcode})"
        if losses > self._max_restarts + 1:  # from the first one on that is beyond the budget
            self._alone[env_id, place] += 1
        if self._alone[env_id, place] < ALONE:
            return LossDecision("alone", killed)
        return LossDecision("failed", f"{killed}, {ALONE} times in a worker of its own")
