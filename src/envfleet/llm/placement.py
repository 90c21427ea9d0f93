"""Where each environment lives: in this process, in threads, or in workers.

With "auto", every tag is measured once and placed where it is played soonest: a step on text takes
microseconds and sending it to a worker tens of them, but making a level, searching, checking an
answer or waiting for a server may take milliseconds. True and "threads" put all tags but
`sequential_env_types` into workers or threads; "resets" has workers begin episodes that are played
here; False keeps everything here. Workers are started once and serve every rollout until the
placement changes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from envfleet.engine import Fleet
from envfleet.engine.machine import usable_cores
from envfleet.engine.probe import CpuClock
from envfleet.llm.local import LocalEnvs, close_env
from envfleet.llm.prefetch import BegunEpisode, EpisodePrefetcher, pack_episode, unpack_episode
from envfleet.llm.remote import RemoteEnvs
from envfleet.llm.settings import Settings, Tag, UseMultiprocessing
from envfleet.llm.turns import (
    EpisodeFailure,
    EpisodeRequest,
    EpisodeSoFar,
    EpisodeStart,
    Request,
    TurnPlayer,
    TurnReply,
)

Where = Literal["here", "thread", "process"]
TRANSPORT_S = 30e-6
"""What a request and its reply cost between processes, per environment."""
CROSSING_S = 20e-6
"""What it costs to ask a worker for an episode and to receive it, many at a time."""
START_S = 1e-3
"""Time until all workers are busy."""
HANDOVER_S = 25e-6
"""What a request and its reply cost between threads, per environment."""
WORTH = 1.2
"""Leave this process only for at least this gain."""
LEAST_RESET_S = 10e-3
"""Time for all resets below which workers do not begin episodes: it also costs warm caches."""
LEAST_S = 5e-3
"""Time for a whole batch below which leaving this process does not pay."""
_PROBE_S = 0.05
_FIRST_PROBE_S = 1.0
"""The first reset may load what later ones find loaded, so it counts only if it takes longer."""
_MOST_PROBES = 8
_POLL_S = 2e-3
"""How long to wait for threads before looking at worker processes, and the other way round."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per environment, in all and on the processor."""

    reset_s: float
    reset_cpu_s: float
    turn_s: float
    turn_cpu_s: float
    move_s: float | None
    """To pickle and unpickle it after a reset; None if it cannot be pickled."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where turns are played and where episodes begin."""

    turns: Where
    resets: Where
    why: str


# ---- deciding -----------------------------------------------------------------------------------


def measure(make: Callable[[], Any]) -> Cost:
    """Play the first turns of a few episodes, in an environment made for this alone."""
    env = make()
    player, begun_s = TurnPlayer(env), time.perf_counter()
    resets, turns = CpuClock(), CpuClock()
    for seed in range(_MOST_PROBES):
        with resets:
            player.begin(seed, "train")
        with turns:
            player.play(_some_actions(env), 1)
        if time.perf_counter() - begun_s > (_PROBE_S if seed else _FIRST_PROBE_S):
            break
    move_s = _move_s(env)
    close_env(env)
    return Cost(*_means(resets), *_means(turns), move_s)


def choose(cost: Cost, num_envs: int, max_workers: int, cores: int) -> Placement:
    """Where `num_envs` environments of this cost are played soonest."""
    workers = min(max_workers, num_envs)
    turns, turn_s = _soonest(cost.turn_s, cost.turn_cpu_s, num_envs, workers, cores)
    if turns != "here":
        name = "workers" if turns == "process" else "threads"
        why = f"reset and step in {name}: {_seconds_text(cost.turn_s)} per step"
        return Placement(
            turns, turns, f"{why} > {_seconds_text(turn_s / num_envs)} shared by {workers}"
        )
    step = f"step in-process: {_seconds_text(cost.turn_s)} < {_seconds_text(TRANSPORT_S)} transport"
    if cost.turn_s > TRANSPORT_S:
        step = f"step in-process: {_seconds_text(cost.turn_s)} each, too little to share"
    if cost.move_s is not None:
        here_s = num_envs * cost.reset_s
        at_once = min(workers, cores)
        num_away = num_envs * (at_once - 1) / at_once
        away_s = (here_s + num_away * (cost.move_s + CROSSING_S)) / at_once + START_S
        if at_once > 1 and here_s > LEAST_RESET_S and here_s > WORTH * away_s:
            return Placement("here", "process", f"reset in workers, {step}")
    return Placement("here", "here", f"reset in-process: {_seconds_text(cost.reset_s)}, {step}")


def _soonest(
    wall_s: float, cpu_s: float, num_envs: int, workers: int, cores: int
) -> tuple[Where, float]:
    """The place where one call of each environment takes the least time, and that time."""
    here_s = num_envs * wall_s
    shared_s = here_s / workers
    away: dict[Where, float] = {
        "thread": max(num_envs * cpu_s, shared_s) + num_envs * HANDOVER_S,
        "process": max(num_envs * cpu_s / min(workers, cores), shared_s) + num_envs * TRANSPORT_S,
    }
    best = min(away, key=lambda where: away[where])
    if workers > 1 and here_s > LEAST_S and here_s > WORTH * away[best]:
        return best, away[best]
    return "here", here_s


def placement_of(tag: Tag, count: int, wish: UseMultiprocessing, settings: Settings) -> Placement:
    """Where the `count` environments of a tag live."""
    if tag.type_name in settings.sequential_env_types or wish is False:
        return Placement("here", "here", "in this process, as asked")
    if wish is True:
        return Placement("process", "process", "in workers, as asked")
    if wish == "threads":
        return Placement("thread", "thread", "in threads, as asked")
    if wish == "resets":
        return Placement("here", "process", "reset in workers, step here, as asked")
    if settings.step_timeout_s is not None:
        why = "reset and step in workers: only there step_timeout_s can be kept"
        return Placement("process", "process", why)
    return choose(measure(tag.make), count, settings.max_workers, usable_cores())


def _some_actions(env: Any) -> list[str]:
    lookup = getattr(getattr(env, "config", None), "action_lookup", None)
    return list(lookup.values())[:1] if lookup else ["1"]


def _move_s(env: Any) -> float | None:
    try:
        unpack_episode(pack_episode(env), env)  # the first time pays for imports and caches
        begun_s = time.perf_counter()
        unpack_episode(pack_episode(env), env)
    except Exception:
        return None
    return time.perf_counter() - begun_s


def _seconds_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _means(clock: CpuClock) -> tuple[float, float]:
    """Own and processor time of a stretch, on average, without the first."""
    kept = clock.stretches[1:] or clock.stretches
    own_s, cpu_s = sum(one.own_s for one in kept), sum(one.cpu_s for one in kept)
    return own_s / len(kept), cpu_s / len(kept)


# ---- environments in their places ---------------------------------------------------------------


class PlacedEnvs:
    """All environments of one manager, each where its placement says."""

    def __init__(self, tags: Sequence[Tag], settings: Settings) -> None:
        self._tags, self._settings = list(tags), settings
        self.local = LocalEnvs()
        self.plan = ""
        self._remote: list[RemoteEnvs] = []
        self._prefetcher: EpisodePrefetcher | None = None
        self._prefetched: set[str] = set()
        """Tags whose episodes workers begin and this process plays."""
        self._fatal_tags: set[str] = set()
        """Tags that workers have died of while they began an episode."""
        self._placed_by: UseMultiprocessing | None = None
        self._here: dict[int, Request] = {}
        """Requests to environments of this process that have not been carried out."""

    def place(self, wish: UseMultiprocessing) -> None:
        """Build every environment where it is to live, unless they are placed like this."""
        if wish == self._placed_by:
            return
        self.close()
        by_name = {tag.name: tag for tag in self._tags}
        placements = {
            name: placement_of(by_name[name], count, wish, self._settings)
            for name, count in Counter(tag.name for tag in self._tags).items()
        }
        self.plan = "\n".join(f"{name}: {one.why}" for name, one in placements.items())
        env_fns: dict[Where, dict[int, Any]] = {"here": {}, "thread": {}, "process": {}}
        for env_id, tag in enumerate(self._tags):
            env_fns[placements[tag.name].turns][env_id] = partial(Tag.make, tag)
        for env_id, make in env_fns["here"].items():
            self.local.add(env_id, make())
        settings = self._settings
        for backend in ("thread", "process"):
            if env_fns[backend]:
                self._remote.append(RemoteEnvs(env_fns[backend], backend, settings))
        self._prefetched = {
            name
            for name, one in placements.items()
            if one.turns == "here" and one.resets == "process"
        }
        if self._prefetched:
            self._prefetcher = EpisodePrefetcher(
                {name: by_name[name] for name in self._prefetched},
                num_workers=max(1, min(settings.max_workers, usable_cores()) - 1),
                start_method=settings.start_method,
                max_restarts=settings.max_restarts,
                fatal_tags=self._fatal_tags,
            )
        self._placed_by = wish

    def refresh(self) -> None:
        """Get ready for new episodes; what is in flight is dropped."""
        self._here = {}
        for remote in self._remote:
            remote.refresh()

    def begin(
        self,
        requests: Mapping[int, EpisodeRequest],
        meanwhile: Callable[[], None],
        on_reply: Callable[[int, TurnReply], None],
    ) -> None:
        """Begin an episode in every environment.

        Args:
            requests: By environment.
            meanwhile: Called once, as soon as workers have begun and before the first reply.
            on_reply: Called with each reply as soon as it is there.
        """
        prefetched = {
            env_id: (tag, request.seed, request.mode)
            for env_id, request in requests.items()
            if (tag := self._tags[env_id].name) in self._prefetched
        }
        if prefetched and self._prefetcher is not None:
            self._prefetcher.send(prefetched)
        self.send({one: request for one, request in requests.items() if one not in prefetched})
        meanwhile()
        if prefetched and self._prefetcher is not None:
            others, self._here = list(self._here), {}
            self._take_prefetched(self._prefetcher, requests, on_reply, others)
        for env_id, reply in self.recv().items():
            on_reply(env_id, reply)

    def _take_prefetched(
        self,
        prefetcher: EpisodePrefetcher,
        requests: Mapping[int, EpisodeRequest],
        on_reply: Callable[[int, TurnReply], None],
        others: Sequence[int],
    ) -> None:
        """Take in the episodes that workers begin, and begin `others` here meanwhile."""

        def take(env_id: int, begun: BegunEpisode) -> None:
            packed, start = begun
            player = self.local.players[env_id]
            env = unpack_episode(packed, player.env)
            if env is not player.env:
                self.local.add(env_id, env)
            on_reply(env_id, start)

        def begin_here(env_id: int) -> None:
            on_reply(env_id, requests[env_id].execute(self.local.players[env_id]))

        def fail(env_id: int, failure: EpisodeFailure) -> None:
            on_reply(env_id, EpisodeStart("", failure=failure))

        prefetcher.recv(take, begin_here, fail, others)

    def send(self, requests: Mapping[int, Request]) -> None:
        """Send requests to workers; `recv` carries out those to environments of this process."""
        for remote in self._remote:
            remote.send({one: requests[one] for one in remote.ids if one in requests})
        here = self.local.players
        self._here |= {one: request for one, request in requests.items() if one in here}

    def recv(
        self, min_envs: int | None = None, timeout_s: float | None = None
    ) -> dict[int, TurnReply]:
        """The replies that are there: at least `min_envs` (None: all), unless the time is up.

        All requests to environments of this process are carried out first.
        """
        give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        here, self._here = self._here, {}
        replies = self.local.execute(here)
        while busy := [remote for remote in self._remote if remote.is_busy]:
            for remote in busy:
                num_missing = None if min_envs is None else max(1, min_envs - len(replies))
                wait_s = None if timeout_s is None else max(0.0, give_up_s - time.monotonic())
                if min_envs is not None and len(replies) >= min_envs:
                    wait_s = 0.0
                elif min_envs is not None and len(busy) > 1:  # either may be ready first
                    wait_s = _POLL_S if wait_s is None else min(wait_s, _POLL_S)
                replies |= remote.recv(num_missing, wait_s)
            is_enough = min_envs is not None and len(replies) >= min_envs
            if is_enough or time.monotonic() >= give_up_s:
                break
        return replies

    def worker_pids(self) -> list[int]:
        """Every other process that environments live in, or that begins episodes."""
        fleets: list[Fleet] = [remote.fleet for remote in self._remote]
        if self._prefetcher is not None:
            fleets.append(self._prefetcher.fleet)
        return [pid for fleet in fleets for pid in fleet.worker_pids() if pid is not None]

    def move_all_here(
        self, episodes: Mapping[int, EpisodeSoFar], failed: Collection[int]
    ) -> dict[int, EpisodeFailure]:
        """Rebuild every environment in this process, and end the workers.

        Args:
            episodes: Episodes that go on, by environment.
            failed: Environments that are left out until the next reset: what they did to a worker
                they would do to this process.

        Returns:
            Environments that could not be brought back, and why.
        """
        failures: dict[int, EpisodeFailure] = {}
        for env_id in [one for remote in self._remote for one in remote.ids]:
            if env_id in failed:
                continue
            make = partial(Tag.make, self._tags[env_id])
            if env_id not in episodes:
                self.local.add(env_id, make())
                continue
            failure = self.local.rebuild(env_id, make, episodes[env_id])
            if failure is not None:
                failures[env_id] = failure
        self._end_workers()
        names = dict.fromkeys(tag.name for tag in self._tags)
        self.plan = "\n".join(f"{name}: in this process, as asked" for name in names)
        is_complete = len(self.local.players) == len(self._tags)
        self._placed_by = False if is_complete else None
        return failures

    def close(self) -> None:
        """Close every environment and end the workers."""
        self._placed_by = None
        self.local.close()
        self._end_workers()

    def _end_workers(self) -> None:
        for remote in self._remote:
            remote.close()
        self._remote = []
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        self._prefetched = set()
