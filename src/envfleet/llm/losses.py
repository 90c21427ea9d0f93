"""What environments have cost in workers, and what is to become of one that is lost again.

Law: what may end this process is never tried in it. An environment whose workers were killed, by
somebody outside or by itself, has first to live through the same in a worker of its own.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from envfleet.engine import Incident

FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of workers that somebody else ended, the kernel short of memory say."""
ALONE = 3
"""Whose worker is killed so often at one place, with nobody else in it, did that by itself."""
_ANSWERING = ("step", "sending an observation")
"""What a slot does when its answer cannot be pickled, in a thread and in a worker."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to become of an environment, and why if it is not asked again."""

    what: Literal["again", "alone", "failed"]
    why: str = ""


class Losses:
    """Counts them, by environment."""

    def __init__(self, max_restarts: int) -> None:
        """Let each environment cost so many workers in one episode."""
        self._max_restarts = max_restarts
        self._in_episode: Counter[int] = Counter()
        self._alone: Counter[tuple[int, int]] = Counter()
        """Those beyond the budget, by place too."""

    def begin_episodes(self) -> None:
        """Everybody has their whole budget again."""
        self._in_episode.clear()
        self._alone.clear()

    def add(self, env_id: int, incident: Incident, place: int = 0) -> Verdict:
        """An environment was lost by this, when it had come so far in what it was asked."""
        self._in_episode[env_id] += 1
        losses = self._in_episode[env_id]
        # what an environment raises is caught beside it: here its answer could not be pickled, and
        # the next one cannot either
        if incident.kind == "exception" and incident.doing in _ANSWERING:
            return Verdict("failed", f"its answer cannot leave its worker: {incident.reason}")
        if losses <= self._max_restarts:
            return Verdict("again")
        times = f"{'once' if losses == 1 else f'{losses} times'} in one episode"
        if incident.kind == "exception":
            return Verdict("failed", f"{incident.reason} in {incident.doing}, {times}")
        if incident.kind == "timeout":
            return Verdict("failed", f"its worker passed its deadline {times}")
        if incident.exitcode not in FROM_OUTSIDE:
            return Verdict("failed", f"its worker died {times}")
        killed = f"its worker was killed {times} (exit code {incident.exitcode})"
        if losses > self._max_restarts + 1:  # from the first one on that is beyond the budget
            self._alone[env_id, place] += 1
        if self._alone[env_id, place] < ALONE:
            return Verdict("alone", killed)
        return Verdict("failed", f"{killed}, {ALONE} times with nobody else in it")
