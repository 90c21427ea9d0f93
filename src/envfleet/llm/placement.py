"""Where each environment lives: in this process, in threads, or in workers.

With "auto", every tag is measured once and placed where it is played soonest: a step on text takes
microseconds and sending it to a worker tens of them, but making a level, searching, checking an
answer or waiting for a server may take milliseconds. True and "threads" put all tags but
`sequential_env_types` into workers or threads; "resets" has workers begin episodes that are played
here; False keeps everything here. Workers are started once and serve every rollout until the
placement changes.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from envfleet.engine import Fleet
from envfleet.engine.machine import usable_cores
from envfleet.llm.local import LocalEnvs, close_env
from envfleet.llm.prefetch import BegunEpisode, EpisodePrefetcher, pack_episode, unpack_episode
from envfleet.llm.remote import FleetOptions, RemoteEnvs
from envfleet.llm.settings import Settings, Tag, UseMultiprocessing
from envfleet.llm.turns import (
    EnvFailure,
    EpisodePlayer,
    EpisodeSoFar,
    EpisodeStart,
    TurnReply,
    TurnRequest,
    execute,
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
    player, begun_s = EpisodePlayer(env), time.perf_counter()
    resets, turns = _Stopwatch(), _Stopwatch()
    for seed in range(_MOST_PROBES):
        with resets:
            player.begin(seed, "train")
        with turns:
            player.play(_some_actions(env), 1)
        if time.perf_counter() - begun_s > (_PROBE_S if seed else _FIRST_PROBE_S):
            break
    move_s = _move_s(env)
    close_env(env)
    return Cost(*resets.means, *turns.means, move_s)


def choose(cost: Cost, num_envs: int, max_workers: int, cores: int) -> Placement:
    """Where `num_envs` environments of this cost are played soonest."""
    workers = min(max_workers, num_envs)
    turns, turn_s = _soonest(cost.turn_s, cost.turn_cpu_s, num_envs, workers, cores)
    if turns != "here":
        name = "workers" if turns == "process" else "threads"
        why = f"reset and step in {name}: {_time(cost.turn_s)} per step"
        return Placement(turns, turns, f"{why} > {_time(turn_s / num_envs)} shared by {workers}")
    step = f"step in-process: {_time(cost.turn_s)} < {_time(TRANSPORT_S)} transport"
    if cost.turn_s > TRANSPORT_S:
        step = f"step in-process: {_time(cost.turn_s)} each, too little to share"
    if cost.move_s is not None:
        here_s = num_envs * cost.reset_s
        at_once = min(workers, cores)
        num_away = num_envs * (at_once - 1) / at_once
        away_s = (here_s + num_away * (cost.move_s + CROSSING_S)) / at_once + START_S
        if at_once > 1 and here_s > LEAST_RESET_S and here_s > WORTH * away_s:
            return Placement("here", "process", f"reset in workers, {step}")
    return Placement("here", "here", f"reset in-process: {_time(cost.reset_s)}, {step}")


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


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


class _Stopwatch:
    """Mean wall and processor time of this thread over several runs, without the first.

    If the thread never gave up the processor by itself, it did not wait. Then the time beyond its
    processor time was taken by other programs, and is not counted.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._num_waits = _num_waits()
        self._begun = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        wall_s, cpu_s = time.perf_counter() - self._begun[0], time.thread_time() - self._begun[1]
        has_waited = self._num_waits is None or _num_waits() != self._num_waits
        self._runs.append((wall_s if has_waited else cpu_s, cpu_s))

    @property
    def means(self) -> tuple[float, float]:
        kept = self._runs[1:] or self._runs
        walls, cpus = zip(*kept, strict=True)
        return sum(walls) / len(kept), sum(cpus) / len(kept)


def _num_waits() -> int | None:
    """How often this thread has given up the processor; None where the system does not count."""
    thread = getattr(resource, "RUSAGE_THREAD", None)
    return None if thread is None else resource.getrusage(thread).ru_nvcsw


# ---- environments in their places ---------------------------------------------------------------


class MoveHere(Protocol):
    """Moves an environment to this process that workers cannot keep, and asks it there."""

    def __call__(self, env_id: int, request: TurnRequest, why: str) -> TurnReply:
        """Its reply."""
        ...


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
                options = FleetOptions(
                    backend, settings.max_workers, settings.start_method, settings.step_timeout_s
                )
                remote = RemoteEnvs(env_fns[backend], options, settings.max_restarts)
                self._remote.append(remote)
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
        """Get ready for new episodes: environments that moved here go back to the workers."""
        for remote in self._remote:
            for env_id in remote.ids:
                self.local.remove(env_id)
            remote.refresh()

    def begin(
        self,
        requests: Mapping[int, TurnRequest],
        move_here: MoveHere,
        meanwhile: Callable[[], None],
        on_reply: Callable[[int, TurnReply], None],
    ) -> None:
        """Begin an episode in every environment.

        Args:
            requests: By environment.
            move_here: For environments that workers cannot keep.
            meanwhile: Called once, as soon as workers have begun and before the first reply.
            on_reply: Called with each reply as soon as it is there.
        """
        prefetched = {
            env_id: (tag, request.seed, request.mode)
            for env_id, request in requests.items()
            if (tag := self._tags[env_id].name) in self._prefetched
        }
        if not prefetched or self._prefetcher is None:
            meanwhile()
            for env_id, reply in self.play(requests, _not_begun, move_here).items():
                on_reply(env_id, reply)
            return
        self._prefetcher.send(prefetched)
        rest = {one: request for one, request in requests.items() if one not in prefetched}
        self._send(rest)
        meanwhile()

        def take(env_id: int, begun: BegunEpisode) -> None:
            packed, start = begun
            player = self.local.players[env_id]
            env = unpack_episode(packed, player.env)
            if env is not player.env:
                self.local.add(env_id, env)
            on_reply(env_id, start)

        def begin_here(env_id: int) -> None:
            on_reply(env_id, execute(self.local.players[env_id], requests[env_id]))

        def fail(env_id: int, failure: EnvFailure) -> None:
            on_reply(env_id, EpisodeStart("", failure=failure))

        others = [one for one in rest if one in self.local.players]
        self._prefetcher.recv(take, begin_here, fail, others)
        for env_id, reply in self._recv(rest, _not_begun, move_here).items():
            on_reply(env_id, reply)

    def play(
        self,
        requests: Mapping[int, TurnRequest],
        so_far_of: Callable[[int], EpisodeSoFar],
        move_here: MoveHere,
    ) -> dict[int, TurnReply]:
        """Carry out all requests, in workers and in this process at the same time."""
        self._send(requests)
        here = self.local.players
        replies = self.local.execute({one: requests[one] for one in requests if one in here})
        return replies | self._recv(requests, so_far_of, move_here)

    def worker_pids(self) -> list[int]:
        """Every other process that environments live in, or that begins episodes."""
        fleets: list[Fleet] = [fleet for remote in self._remote for fleet in remote.fleets]
        if self._prefetcher is not None:
            fleets.append(self._prefetcher.fleet)
        return [pid for fleet in fleets for pid in fleet.worker_pids() if pid is not None]

    def move_all_here(
        self, requests: Mapping[int, TurnRequest], failed: Collection[int]
    ) -> dict[int, EnvFailure]:
        """Rebuild every environment in this process, and end the workers.

        Args:
            requests: What brings each environment back whose episode goes on.
            failed: Environments that are left out until the next reset: what they did to a worker
                they would do to this process.

        Returns:
            Environments that could not be brought back, and why.
        """
        failures: dict[int, EnvFailure] = {}
        for env_id in [one for remote in self._remote for one in remote.ids]:
            if env_id in self.local.players or env_id in failed:
                continue
            make = partial(Tag.make, self._tags[env_id])
            if env_id not in requests:
                self.local.add(env_id, make())
                continue
            reply = self.local.rebuild(env_id, make, requests[env_id])
            if reply.failure is not None:
                failures[env_id] = reply.failure
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

    def _send(self, requests: Mapping[int, TurnRequest]) -> None:
        here = self.local.players
        for remote in self._remote:
            ids = [one for one in remote.ids if one in requests and one not in here]
            remote.send({one: requests[one] for one in ids})

    def _recv(
        self,
        requests: Mapping[int, TurnRequest],
        so_far_of: Callable[[int], EpisodeSoFar],
        move_here: MoveHere,
    ) -> dict[int, TurnReply]:
        """The replies from workers; environments that workers cannot keep reply from here."""
        replies: dict[int, TurnReply] = {}
        for remote in self._remote:
            found, leaving = remote.recv(so_far_of)
            replies |= found
            for env_id, why in leaving.items():
                replies[env_id] = move_here(env_id, requests[env_id], why)
        return replies


def _not_begun(env_id: int) -> EpisodeSoFar:
    """The history of an episode that has not begun."""
    return (), ""
