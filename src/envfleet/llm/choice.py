"""Parallel where it pays: measure a kind of environment, then choose where its episodes are played.

Stepping text takes microseconds, and crossing to a worker tens of them; making a level, searching,
checking an answer or waiting for somebody else may take milliseconds.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from envfleet.errors import level_of_caller
from envfleet.llm.moving import arrived, packed
from envfleet.llm.turns import Failure, Player

Where = Literal["here", "thread", "process"]
TRANSPORT_S = 30e-6
"""What an order and its answer cost between processes, per environment."""
CROSSING_S = 20e-6
"""What it costs to send for an episode begun elsewhere and to receive it, many at a time."""
START_S = 1e-3
"""Until all are at it."""
HANDOVER_S = 25e-6
"""What an order and its answer cost between threads, per environment."""
WORTH = 1.2
"""Leave this process only for at least this gain."""
LEAST_RESET_S = 10e-3
"""Beginnings of a whole batch below which nobody sends for them: it also costs warm caches."""
LEAST_S = 5e-3
"""Work of a whole batch below which nothing is worth leaving for."""
_PROBE_S = 0.05
_FIRST_PROBE_S = 1.0
"""The first may read and build what later ones find there, so it counts only if it takes longer."""
_MOST_PROBES = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds for one environment; those on a processor apart."""

    reset_s: float
    reset_cpu_s: float
    turn_s: float
    turn_cpu_s: float
    move_s: float | None
    """To pickle it and back, after a reset; None if it cannot be pickled."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where turns are played and where episodes begin."""

    turns: Where
    resets: Where
    why: str


def measure(make: Callable[[], Any]) -> Cost:
    """Play a few episodes' beginnings of an environment that nobody else sees."""
    env = make()
    player, begun_s = Player(env), time.perf_counter()
    resets, turns = _Clock(), _Clock()
    for seed in range(_MOST_PROBES):
        with resets:
            player.begin(seed, "train")
        with turns:
            player.play(_some_actions(env), 1)
        if time.perf_counter() - begun_s > (_PROBE_S if seed else _FIRST_PROBE_S):
            break
    move_s = _move_s(env)
    _close(env)
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
    """The place where one call of each takes the least time, and that time."""
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


def _close(env: Any) -> None:
    """One that cannot be closed can be played all the same."""
    try:
        getattr(env, "close", lambda: None)()
    except (Exception, SystemExit) as exc:
        warnings.warn(
            f"{type(env).__name__} failed in close: {Failure.of('close', exc).error}",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )


def _some_actions(env: Any) -> list[str]:
    lookup = getattr(getattr(env, "config", None), "action_lookup", None)
    return list(lookup.values())[:1] if lookup else ["1"]


def _move_s(env: Any) -> float | None:
    try:
        arrived(packed(env), env)  # the first time pays for what is imported or cached
        begun_s = time.perf_counter()
        arrived(packed(env), env)
    except Exception:
        return None
    return time.perf_counter() - begun_s


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


class _Clock:
    """Wall and processor time of this thread, over several stretches; the first may warm up.

    Who never gave the processor away did not wait: what passed beyond its processor time belonged
    to others on a busy machine, and is not counted.
    """

    def __init__(self) -> None:
        self._stretches: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._num_waits = _num_waits()
        self._begun = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        wall_s, cpu_s = time.perf_counter() - self._begun[0], time.thread_time() - self._begun[1]
        has_waited = self._num_waits is None or _num_waits() != self._num_waits
        self._stretches.append((wall_s if has_waited else cpu_s, cpu_s))

    @property
    def means(self) -> tuple[float, float]:
        kept = self._stretches[1:] or self._stretches
        walls, cpus = zip(*kept, strict=True)
        return sum(walls) / len(kept), sum(cpus) / len(kept)


def _num_waits() -> int | None:
    """How often this thread has given the processor away; None where nobody counts."""
    thread = getattr(resource, "RUSAGE_THREAD", None)
    return None if thread is None else resource.getrusage(thread).ru_nvcsw
