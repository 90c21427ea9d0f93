"""Environments for trajectories, used by one after another.

A trajectory takes a seat of its tag, plays in the environment that sits there, and gives the seat
back. Seats last from one rollout to the next, so environments are built once. Law: an episode in a
used environment is the one of a new environment; an environment that has failed is not used again,
and others take its place, so that trajectories that end workers cost the others none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from envfleet.errors import ConfigError
from envfleet.llm.local import LocalEnvs
from envfleet.llm.placement import Placement, placement_of
from envfleet.llm.remote import FLEET_ERRORS, RemoteEnvs
from envfleet.llm.settings import Settings, Tag, UseMultiprocessing
from envfleet.llm.turns import Request, TurnReply


@dataclass(frozen=True, slots=True)
class SeatReply:
    """What an environment replied."""

    seat: int
    reply: TurnReply
    env_s: float
    """Until the reply was there."""


class SeatsLost(Exception):
    """There is no environment of a kind, and there will be none."""


class EnvSeats:
    """The seats of some tags, in this process or in the workers of a fleet."""

    def __init__(
        self,
        tags: Mapping[str, Tag],
        counts: Mapping[str, int],
        settings: Settings,
        wish: UseMultiprocessing,
        num_workers: int,
    ) -> None:
        """Decide where environments live, and start the workers that this needs.

        Args:
            tags: By name.
            counts: How many trajectories of each tag there are at once.
            settings: Of the manager of environments.
            wish: As `es_manager.use_multiprocessing`.
            num_workers: The most workers.
        """
        self._tags = dict(tags)
        settings = replace(settings, max_workers=num_workers)
        placements: dict[str, Placement] = {
            name: placement_of(tags[name], count, wish, settings) for name, count in counts.items()
        }
        self.plan = tuple(f"{name}: {_why(one)}" for name, one in placements.items())
        self.local = LocalEnvs()
        self._free: dict[str, list[int]] = {name: [] for name in counts}
        self._tag_of: dict[int, str] = {}
        self._remote: list[RemoteEnvs] = []
        self._spare: list[RemoteEnvs] = []
        """Those of `_remote` that took the place of lost seats; they last for a rollout."""
        self._host: dict[int, RemoteEnvs] = {}
        """The fleet of each seat that is not in this process."""
        self._settings, self._counts = settings, dict(counts)
        self._turns = {name: one.turns for name, one in placements.items()}
        self._replies: list[SeatReply] = []
        self._sent_s: dict[int, float] = {}
        """When each seat in another process was asked."""
        self._next_seat = 0
        for backend in ("thread", "process"):
            self._open(backend, [name for name in counts if self._turns[name] == backend])

    def _open(self, backend: Any, tags: Sequence[str]) -> None:
        """Start a fleet with the seats of these tags."""
        seats = {
            self._new_seat(name): partial(Tag.make, self._tags[name])
            for name in tags
            for _ in range(self._counts[name])
        }
        if not seats:
            return
        remote = RemoteEnvs(seats, backend, self._settings)
        self._remote.append(remote)
        self._host |= dict.fromkeys(seats, remote)
        for seat in reversed(seats):
            self._free[self._tag_of[seat]].append(seat)

    def _new_seat(self, tag: str) -> int:
        seat, self._next_seat = self._next_seat, self._next_seat + 1
        self._tag_of[seat] = tag
        return seat

    @property
    def num_away(self) -> int:
        """How many seats in other processes have been asked and have not replied."""
        return len(self._sent_s)

    @property
    def num_built(self) -> int:
        """How many environments there are."""
        return len(self.local.players) + len(self._host)

    def take(self, tag: str) -> int | None:
        """A free seat of this tag; None if all are taken, so that one will be free.

        Raises:
            SeatsLost: All are lost, and no others can be started.
        """
        if tag not in self._free:
            raise ConfigError(f"there is no seat for {tag!r}; there are {', '.join(self._free)}")
        if self._turns[tag] == "here":
            if self._free[tag]:
                return self._free[tag].pop()
            seat = self._new_seat(tag)
            self.local.add(seat, self._tags[tag].make())
            return seat
        if not any(self._tag_of[seat] == tag and not self._is_lost(seat) for seat in self._host):
            try:
                self._open(self._turns[tag], [tag])
            except FLEET_ERRORS as exc:
                raise SeatsLost(f"every {tag} is lost, and no other can be started: {exc}") from exc
            self._spare.append(self._remote[-1])
        while self._free[tag]:
            seat = self._free[tag].pop()
            if not self._is_lost(seat):
                return seat
        return None

    def give_back(self, seat: int, *, has_failed: bool = False) -> None:
        """The trajectory in this seat is over."""
        if has_failed and seat not in self._host:
            self.local.remove(seat)
            return
        self._free[self._tag_of[seat]].append(seat)

    def _is_lost(self, seat: int) -> bool:
        """Whether the fleet has given this seat up."""
        remote = self._host[seat]
        lost = remote.fleet.quarantined
        return bool(lost) and remote.ids.index(seat) in lost

    def send(self, seat: int, request: Request) -> None:
        """Ask the environment of this seat; one in this process replies at once."""
        if seat in self._host:
            self._sent_s[seat] = time.monotonic()
            self._host[seat].send({seat: request})
            return
        begun_s = time.monotonic()
        reply = request.execute(self.local.players[seat])
        self._replies.append(SeatReply(seat, reply, time.monotonic() - begun_s))

    def recv(self) -> list[SeatReply]:
        """The replies that are there, without waiting."""
        found, self._replies = self._replies, []
        for remote in self._remote:
            if remote.is_busy:
                now_s = time.monotonic()
                for seat, reply in remote.recv(1, 0.0).items():
                    found.append(SeatReply(seat, reply, now_s - self._sent_s.pop(seat)))
        return found

    def refresh(self) -> None:
        """Get ready for another rollout: every seat is free, and nothing is in flight."""
        self._replies.clear()
        self._sent_s.clear()
        for remote in self._spare:
            remote.close()
            self._remote.remove(remote)
            for seat in remote.ids:
                del self._host[seat]
        self._spare.clear()
        for remote in self._remote:
            remote.refresh()
        for name in self._free:
            seats = [*self.local.players, *self._host]
            self._free[name] = [one for one in reversed(seats) if self._tag_of[one] == name]

    def worker_pids(self) -> list[int]:
        """Every other process that environments live in."""
        pids = [pid for remote in self._remote for pid in remote.fleet.worker_pids()]
        return [pid for pid in pids if pid is not None]

    def close(self) -> None:
        """Close every environment and end the workers; closing twice changes nothing."""
        self.local.close()
        for remote in self._remote:
            remote.close()


def _why(placement: Placement) -> str:
    """Why turns are played where they are; where episodes begin is the same place here."""
    if placement.turns == "here" and placement.resets != "here":
        return "in-process: a step takes less than its way to a worker"
    return placement.why
