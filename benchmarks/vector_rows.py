"""The rows of vector.py's table: contenders, comparisons and targets.

The contenders of a row are open at the same time and take turns. Those that load PyTorch or start
threads come last, because the others fork when they are opened. `ROWS` has all rows by name.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import envfleet
from benchmarks import contenders as ways
from benchmarks.environments import Sleeper, StoredImages
from benchmarks.limit import Limit
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.startup_and_idle import Start, Thinking, async_start, fleet_start
from benchmarks.tables import Line, Target, joined
from benchmarks.without_c import FleetWithoutC
from benchmarks.workload import Workload
from envfleet.cli.measure import Contender, Slice
from envfleet.observe.progress import Progress

ASYNC, SYNC, SB3 = "Gymnasium AsyncVectorEnv", "Gymnasium SyncVectorEnv", "SB3 SubprocVecEnv"
BETTER = "the better of serial and process"


def cartpole(pace: Pace, progress: Progress, title: str) -> Outcome:
    """A step takes about 3 us, so the cost of the vector environment matters most."""
    work = Workload("CartPole-v1", 64, num_workers=2)
    name = "CartPole-v1, 64 envs, 2 workers"
    rounds = Rounds(
        name,
        [
            *_both_ways_and_the_limit(work),
            ways.gymnasium_async(work),
            ways.gymnasium_sync(work),
            ways.sb3_subproc(work),
        ],
        pace,
        progress,
        title,
    )
    lines = [
        rounds.line(f"{name}, step", ASYNC, 12.0, "step", "async"),
        rounds.line(f"{name}, step", SB3, 12.0, "step", "sb3"),
        rounds.line(f"{name}, step", SYNC, 1.2, "step", "sync"),
        rounds.line(f"{name}, step", "the limit", 0.65, "step", "limit"),
        rounds.line(f"{name}, send/recv in halves", "the limit", 0.75, "send/recv", "limit"),
    ]
    return Outcome(lines, rounds.entries())


def ant(pace: Pace, progress: Progress, title: str) -> Outcome:
    """A step takes about 100 us and has many infos."""
    work = Workload("Ant-v5", 16, num_workers=2)
    name = "Ant-v5, 16 envs, 2 workers"
    rounds = Rounds(
        name,
        [*_both_ways_and_the_limit(work), ways.gymnasium_async(work)],
        pace,
        progress,
        title,
    )
    lines = [
        rounds.line(f"{name}, step", ASYNC, 1.7, "step", "async"),
        rounds.line(f"{name}, step", "the limit", 0.80, "step", "limit"),
        rounds.line(f"{name}, send/recv in halves", "the limit", 0.90, "send/recv", "limit"),
    ]
    return Outcome(lines, rounds.entries())


def same_step(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Episodes that reset within the step that ends them, as SB3 and PPO need."""
    outcome = Outcome()
    for env, num_envs, target in (("CartPole-v1", 64, 0.72), ("Ant-v5", 16, 0.85)):
        work = Workload(env, num_envs, num_workers=2)
        name = f"{env}, {num_envs} envs, 2 workers, same_step"
        fleet = ways.FleetStep(work, num_workers=2, autoreset="same_step")
        rounds = Rounds(name, [fleet, Limit(work)], pace, progress, f"{title}: {name}")
        line = rounds.line(f"{name}, step", "the limit", target, fleet.key, Limit.key)
        outcome.lines.append(line)
        outcome.entries += rounds.entries()
    return outcome


def without_c(pace: Pace, progress: Progress, title: str) -> Outcome:
    """The package as it runs where no C compiler was found."""
    work = Workload("CartPole-v1", 64, num_workers=2)
    name = "CartPole-v1, 64 envs, 2 workers, without the C parts"
    contenders: list[Contender] = [FleetWithoutC(work), Limit(work)]
    rounds = Rounds(name, contenders, pace, progress, title)
    line = rounds.line(f"{name}, step", "the limit", 0.55, FleetWithoutC.key, Limit.key)
    return Outcome([line], rounds.entries())


def images(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Observations of 28 KB and a step that computes nothing."""
    work = Workload(StoredImages, 32, num_workers=2)
    name = "4x84x84 uint8 observations, 32 envs, 2 workers"
    rounds = Rounds(
        name,
        [ways.FleetStep(work, num_workers=2), ways.gymnasium_async(work)],
        pace,
        progress,
        title,
    )
    return Outcome([rounds.line(name, ASYNC, 10.0, "step", "async")], rounds.entries())


def sleeping(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Steps of uneven length, received as they become ready."""
    work = Workload(Sleeper, 32, num_workers=32)
    name = "steps of 1 ms (9 in 10) or 20 ms, sleeping, 32 envs"
    rounds = Rounds(
        name,
        [
            ways.FleetStep(work, num_workers=32),
            ways.FleetFirstReady(
                work, min_slots=8, label="envfleet, recv(min_slots=8)", num_workers=32
            ),
        ],
        pace.scaled(seconds=2),
        progress,
        title,
    )
    line = rounds.line(
        f"{name}, recv(min_slots=8)", "envfleet's own step", 2.5, "send/recv", "step"
    )
    return Outcome([line], rounds.entries())


def native(pace: Pace, progress: Progress, title: str) -> Outcome:
    """A natively vectorised environment (Gymnasium's `vector_entry_point`)."""
    work = Workload("CartPole-v1", 4096)
    hosted = Workload(envfleet.native("CartPole-v1"), 4096, actions_of="CartPole-v1")
    name = "CartPole-v1 natively vectorised, 4096 envs"
    fleet = ways.FleetStep(hosted, backend="auto")
    rounds = Rounds(
        name,
        [
            fleet,
            ways.native_alone(work),
            ways.envpool_step(work, 1),
            ways.envpool_step(work, 2),
        ],
        pace,
        progress,
        title,
    )
    lines = [
        rounds.line(
            f"{name}, step", "EnvPool CartPole-v1", 10.0, "step", ["envpool-1", "envpool-2"]
        ),
        rounds.line(f"{name}, step", "the same env alone", 1.0, "step", "alone"),
    ]
    return Outcome(lines, rounds.entries(), _plans(fleet))


def auto(pace: Pace, progress: Progress, title: str) -> Outcome:
    """The choice of `backend="auto"` against the better of its two choices."""
    outcome = Outcome()
    for env, sizes in (("CartPole-v1", (1, 4, 64)), ("Ant-v5", (1, 4, 16))):
        lines = []
        for num_envs in sizes:
            name = f"{env}, {num_envs} env{'s' if num_envs > 1 else ''}"
            work = Workload(env, num_envs)
            fleets = [
                ways.FleetStep(work, key=key, label=f"envfleet, {key}", backend=key)
                for key in ("auto", "serial", "process")
            ]
            rounds = Rounds(name, fleets, pace, progress, f"{title}: {name}")
            lines.append(rounds.line(name, BETTER, 0.95, "auto", ["serial", "process"]))
            outcome.entries += rounds.entries()
            outcome.notes += _plans(fleets[0])
        counts = " / ".join(map(str, sizes))
        outcome.lines.append(joined(lines, f"backend='auto', {env}, {counts} envs"))
    return outcome


def startup(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Time and memory to start and reset under spawn."""
    work = Workload("CartPole-v1", 64, num_workers=2)
    name = "starting and resetting 64 CartPole-v1 envs under spawn"
    own, other = fleet_start(work), async_start(work)
    rounds = Rounds(name, [own, other], pace.scaled(rounds=1 / 20), progress, title)
    ceiling, failures = Target(0.2, is_ceiling=True), rounds.failures
    if failures:
        key, reason = next(iter(failures.items()))
        failed = f"{key}: {reason}"
        works = (f"{name}: time", f"{name}: memory of all children")
        return Outcome([Line(one, ASYNC, ceiling, (), failure=failed) for one in works])
    times = tuple(
        one.seconds / two.seconds
        for one, two in zip(rounds.slices[own.key], rounds.slices[other.key], strict=True)
    )
    weights = tuple(
        one / two for one, two in zip(own.children_bytes, other.children_bytes, strict=True)
    )
    lines = [
        Line(f"{name}: time", ASYNC, ceiling, (statistics.median(times),), (times,)),
        Line(
            f"{name}: memory of all children",
            ASYNC,
            ceiling,
            (statistics.median(weights),),
            (weights,),
        ),
    ]
    return Outcome(lines, notes=[_start_note(one, rounds.slices[one.key]) for one in (own, other)])


def thinking(pace: Pace, progress: Progress, title: str) -> Outcome:
    """A slow policy: workers must not use the processor while they wait for it."""
    fleet = Thinking(Workload("CartPole-v1", 64, num_workers=2), think_s=0.05)
    name = "policy takes 50 ms between steps, CartPole-v1, 64 envs, 2 workers"
    rounds = Rounds(name, [fleet], pace.scaled(rounds=1 / 12, seconds=24), progress, title)
    ceiling, against = Target(5.0, "%", is_ceiling=True), "share of one core used by all workers"
    if rounds.failures:
        return Outcome([Line(name, against, ceiling, (), failure=rounds.failures[fleet.key])])
    shares = tuple(fleet.percents_of_a_core)
    return Outcome([Line(name, against, ceiling, (statistics.median(shares),), (shares,))])


ROWS: dict[str, Row] = {
    "cartpole": cartpole,
    "ant": ant,
    "same-step": same_step,
    "without-c": without_c,
    "images": images,
    "sleeping": sleeping,
    "native": native,
    "auto": auto,
    "startup": startup,
    "thinking": thinking,
}


def _both_ways_and_the_limit(work: Workload) -> list[Contender]:
    halves = ways.FleetFirstReady(
        work,
        min_slots=work.num_envs // 2,
        label="envfleet, send/recv in halves",
        num_workers=work.num_workers,
    )
    return [ways.FleetStep(work, num_workers=work.num_workers), halves, Limit(work)]


def _plans(fleet: ways.FleetStep) -> list[str]:
    return [f"auto chose: {fleet.plan}"] if fleet.plan else []


def _start_note(contender: Start, slices: Sequence[Slice]) -> str:
    seconds = statistics.median(one.seconds for one in slices)
    megabytes = statistics.median(contender.children_bytes) / 1e6
    return f"{contender.label} under spawn: {seconds:.1f} s, {megabytes:,.0f} MB in all children"
