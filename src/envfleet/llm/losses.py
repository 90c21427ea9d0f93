"""What environments have cost in workers, and what is to become of one that is lost again.

Law: what may end this process is never tried in it. Somebody outside who kills workers may kill one
at any time; but not always while one and the same environment does one and the same thing.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from envfleet.engine import Incident

FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of workers that somebody else ended, the kernel short of memory say."""
NO_CHANCE = 3
"""So many workers killed in one turn of one environment are its own doing."""
_ANSWERING = ("step", "sending an observation")
"""What a slot does when its answer cannot be pickled, in a thread and in a worker."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to become of an environment, and why if it is not asked again."""

    what: Literal["again", "here", "failed"]
    why: str = ""


class Losses:
    """Counts them, by environment."""

    def __init__(self, max_restarts: int) -> None:
        """Let each environment cost so many workers in one episode."""
        self._max_restarts = max_restarts
        self._in_episode: Counter[int] = Counter()
        self._in_turn: Counter[tuple[int, int | None]] = Counter()
        """By exit code too."""

    def begin_episodes(self) -> None:
        """Everybody has their whole budget again."""
        self._in_episode.clear()
        self._in_turn.clear()

    def begin_turn(self) -> None:
        """Something else is asked now."""
        self._in_turn.clear()

    def add(self, env_id: int, incident: Incident) -> Verdict:
        """An environment was lost by this."""
        self._in_episode[env_id] += 1
        self._in_turn[env_id, incident.exitcode] += 1
        losses, alike = self._in_episode[env_id], self._in_turn[env_id, incident.exitcode]
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
        if alike < NO_CHANCE:
            return Verdict("here", killed)
        return Verdict("failed", f"{killed}, {alike} times while it did the same thing")
