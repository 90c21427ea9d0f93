"""The rows of state_manager.py's table: contenders, comparisons and targets.

A quick run uses fewer environments, products and turns. `ROWS` has all rows by name.
"""

from __future__ import annotations

import gc
import statistics
import time

from benchmarks.peer_sokoban import NUM_BOXES, SIDE, OurSteps, TheirLevels, TheirSteps
from benchmarks.rollouts import Managed, OneTurn, Rollouts, SeparateProcesses, both_ways
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.startup_and_idle import memory_of_children, own_memory
from benchmarks.tables import Line, Target, ratios
from benchmarks.text_environments import Computing, Waiting
from benchmarks.webshop_search import NUM_WORKERS, Searching, Weighed, built, size_of
from envfleet.llm.registry import register_env
from envfleet.observe.progress import Progress

ONE_PROCESS = "one process"
ENDLESS = 10**9


ROOM: dict[str, object] = {"dim_room": [SIDE, SIDE], "num_boxes": NUM_BOXES, "search_depth": 300}
"""The usual Sokoban room of the benchmarks."""


def sokoban_levels(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Levels take long to make, and their steps take microseconds."""
    num = _part(256, pace)
    rollouts = Rollouts({"Room": num}, 0, {"Room": _sokoban(ROOM)})
    name = f"Sokoban: making {num} levels, {SIDE}x{SIDE}, {NUM_BOXES} boxes"
    ours, theirs, separate = both_ways(rollouts), TheirLevels(), SeparateProcesses(rollouts)
    rounds = Rounds(name, [*ours, separate, theirs], pace, progress, title)
    lines = [
        rounds.line(f"{name}, auto, 2 workers", ONE_PROCESS, 1.7, "auto", "here"),
        rounds.line(f"{name}, one process", "gym-sokoban", 5.0, "here", theirs.key),
    ]
    notes = [*ours[0].plan, *_against_the_limit(rounds, separate)]
    return Outcome(lines, rounds.entries(), notes)


def _against_the_limit(rounds: Rounds, separate: SeparateProcesses) -> list[str]:
    """A note on the largest possible gain here, and how much of it was reached."""
    if rounds.failures.keys() & {"auto", "here", separate.key}:
        return []
    limit = statistics.median(ratios(rounds.slices[separate.key], rounds.slices["here"]))
    part = statistics.median(ratios(rounds.slices["auto"], rounds.slices[separate.key]))
    return [
        f"making levels: {separate.label} were {limit:.2f} times as fast as one, and auto reached "
        f"{part:.2f} of that"
    ]


def sokoban_step(pace: Pace, progress: Progress, title: str) -> Outcome:
    """A step with a text observation."""
    name = f"Sokoban: a step, {SIDE}x{SIDE}, {NUM_BOXES} boxes"
    theirs = [
        TheirSteps("rgb_array", "gym-sokoban, picture"),
        TheirSteps("tiny_rgb_array", "gym-sokoban, a pixel for each cell"),
    ]
    rounds = Rounds(name, [OurSteps(), *theirs], pace, progress, title)
    against, keys = "gym-sokoban, its quicker observation", [one.key for one in theirs]
    return Outcome([rounds.line(name, against, 20.0, "text", keys)], rounds.entries())


def mixed(pace: Pace, progress: Progress, title: str) -> Outcome:
    """All six types together: environments that stay in this process must not get slower."""
    counts = {
        "SimpleSokoban": 16,
        "Room": 40,
        "FrozenLake": 24,
        "Bandit": 16,
        "Countdown": 12,
        "MetamathQA": 12,
        "WebShop": 8,
    }
    some = {tag: _part(count, pace, least=2) for tag, count in counts.items()}
    rollouts = Rollouts(some, num_turns=5, custom_envs={"Room": _sokoban(ROOM)})
    name = f"all six types, {rollouts.num_envs} envs, reset and 5 turns"
    return _shared(name, rollouts, 1.0, pace, progress, title)


def cpu_bound(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Large levels and expensive steps, which workers must speed up."""
    register_env("computing", Computing, replace=True)
    num = _part(64, pace, least=4)
    rollouts = Rollouts(
        {"Rooms": num, "Computing": num},
        num_turns=5,
        custom_envs={
            "Rooms": _sokoban({"dim_room": [10, 10], "num_boxes": 4}),
            "Computing": {"env_type": "computing", "max_actions_per_traj": ENDLESS},
        },
    )
    name = f"{num} Sokoban rooms of 10x10 and {num} envs of 2 ms, reset and 5 turns"
    return _shared(name, rollouts, 1.6, pace, progress, title)


def waiting(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Steps that wait, for example for a remote service, must wait in parallel."""
    register_env("waiting", Waiting, replace=True)
    rollouts = Rollouts(
        {"Waiting": _part(64, pace)},
        num_turns=1,
        custom_envs={"Waiting": {"env_type": "waiting", "max_actions_per_traj": ENDLESS}},
        max_workers=8,
    )
    name = f"steps that wait 20 ms, {rollouts.num_envs} envs, 8 workers, turn by turn"
    return _shared(name, rollouts, 6.0, pace.scaled(rounds=1 / 4), progress, title, OneTurn)


def webshop(pace: Pace, progress: Progress, title: str) -> Outcome:
    """All workers search one catalogue on disk."""
    num = _part(100_000, pace)
    folder, built_s = built(num, progress)
    searching, weighed = Searching(num), Weighed(num, num_turns=_part(20, pace, least=3))
    name = f"WebShop, {num:,} generated products"
    searches = Rounds(f"{name}, searches", [searching], pace, progress, title)
    weights = Rounds(name, [weighed], pace.scaled(rounds=1 / 10), progress, title)
    limit, copy = Target(10.0, "ms", is_ceiling=True), Target(1.3, is_ceiling=True)
    times_ms = tuple(1e3 * one for one in searching.times_s)
    copies = tuple(one / size_of(folder) for one in weighed.extra_bytes)
    lines = [
        _median(f"{name}: a search", "time, median", limit, times_ms, searches.failures),
        _median(
            f"{name}: memory of {NUM_WORKERS} workers that shop",
            "the size of the catalogue",
            copy,
            copies,
            weights.failures,
        ),
    ]
    took = "was there already" if built_s is None else f"was built in {built_s:.0f} s"
    notes = [f"{name}: the catalogue of {size_of(folder) / 1e6:,.0f} MB {took}"]
    return Outcome(lines, searches.entries(), notes)


def scale(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Ten times as many environments must not take much more than ten times as long."""
    few, many = (_Sized(_part(number, pace)) for number in (1_000, 10_000))
    name = "FrozenLake, Bandit and Sokoban in one manager, reset and 1 turn"
    contenders = [few, many]
    rounds = Rounds(name, contenders, pace.scaled(rounds=1 / 4), progress, title)
    work, against = f"{name}: time for each of {many.num_envs:,}", f"of {few.num_envs:,}"
    values: tuple[float, ...] = ()
    if not rounds.failures:
        values = ratios(rounds.slices[few.key], rounds.slices[many.key])
    ceiling = Target(1.3, is_ceiling=True)
    line = _median(work, against, ceiling, values, rounds.failures)
    return Outcome([line], rounds.entries(), [one.note for one in contenders])


ROWS: dict[str, Row] = {
    "sokoban-levels": sokoban_levels,
    "sokoban-step": sokoban_step,
    "mixed": mixed,
    "cpu-bound": cpu_bound,
    "waiting": waiting,
    "webshop": webshop,
    "scale": scale,
}


class _Sized(Managed):
    """A manager that reports its build time and its memory."""

    def __init__(self, num_envs: int) -> None:
        kinds = ("FrozenLake", "Bandit", "SimpleSokoban")
        counts = {kind: (num_envs + place) // len(kinds) for place, kind in enumerate(kinds)}
        rollouts = Rollouts(counts, num_turns=1)
        self.num_envs = rollouts.num_envs
        label = f"envfleet, {self.num_envs:,} environments"
        super().__init__(rollouts, f"{num_envs}", label, "auto")
        self.note = ""

    def open(self) -> None:
        """Build, play once, and note time and memory."""
        assert self._rollouts.recorded  # record before the memory is measured
        gc.collect()
        before, start_s = own_memory() + memory_of_children(), time.perf_counter()
        super().open()
        built_s = time.perf_counter() - start_s
        self.play()
        weight = own_memory() + memory_of_children() - before
        self.note = (
            f"{self.label}: {weight / self.num_envs / 1e3:,.1f} KB for each after a turn, "
            f"built in {built_s:.1f} s"
        )


def _shared(
    name: str,
    rollouts: Rollouts,
    target: float,
    pace: Pace,
    progress: Progress,
    title: str,
    kind: type[Managed] = Managed,
) -> Outcome:
    """A line that compares automatic placement with one process."""
    ways = both_ways(rollouts, kind)
    rounds = Rounds(name, ways, pace, progress, title)
    line = rounds.line(f"{name}, auto", ONE_PROCESS, target, "auto", "here")
    return Outcome([line], rounds.entries(), ways[0].plan)


def _median(
    work: str,
    against: str,
    target: Target,
    values: tuple[float, ...],
    failures: dict[str, str],
) -> Line:
    failed = next((f"{key}: {reason}" for key, reason in failures.items()), None)
    if failed is not None:
        return Line(work, against, target, (), failure=failed)
    return Line(work, against, target, (statistics.median(values),), (values,))


def _sokoban(settings: dict[str, object]) -> dict[str, object]:
    return {"env_type": "sokoban", "max_actions_per_traj": 100, "env_config": settings}


def _part(number: int, pace: Pace, least: int = 8) -> int:
    """`number`, or fewer in a quick run."""
    return max(least, round(number * pace.part))
