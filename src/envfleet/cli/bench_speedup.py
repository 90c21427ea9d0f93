"""``envfleet bench --speedup ENV``: how much faster do more environments go, on this machine?

A fleet of 1, 2, 4, 8 and 16 environments, run as ``backend="auto"`` would run it, against one
environment in a plain loop, in interleaved rounds. Law: what is said follows from the measured
numbers and the number of cores alone (``speedup_conclusion`` is pure).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.cli.command import Context
from envfleet.cli.contenders import FleetStep, PlainLoop, Workload
from envfleet.cli.env_argument import EnvChoice
from envfleet.cli.measure import Contender, Result, compare, duration, noise_warning, summarise
from envfleet.cli.report import BarChart, BarRow, Block, Heading, Report, Table, Text, plural
from envfleet.engine.machine import usable_cores
from envfleet.engine.plan import ROUND_TRIP_S

COUNTS = (1, 2, 4, 8, 16)
EXPECTED: Mapping[int, float] = {1: 1.0, 4: 2.5, 8: 4.0, 16: 6.0}
"""The speed-up often promised for a number of environments, on as many cores."""
BASELINE = "loop"
PAYS = 1.15
"""A smaller gain counts as none."""


@dataclass(frozen=True, slots=True)
class Point:
    """The speed of a number of environments, and what runs them."""

    num_envs: int
    rate: float
    speedup: float
    spread: float
    plan: str

    @property
    def expected(self) -> float | None:
        """The speed-up often promised for this number."""
        return EXPECTED.get(self.num_envs)


def measure_speedup(
    choice: EnvChoice, rounds: int, seconds: float, start_method: str | None, context: Context
) -> Report:
    """Measure, draw and explain."""
    loop = PlainLoop(Workload(choice, 1), BASELINE, "one environment in a plain loop")
    fleets = [
        FleetStep(
            Workload(choice, count, start_method=start_method),
            str(count),
            plural(count, "env"),
            "auto",
        )
        for count in COUNTS
    ]
    contenders: list[Contender] = [*fleets, loop]
    slices, failures = compare(
        contenders, rounds=rounds, seconds=seconds, progress=context.progress, title="speed-up"
    )
    if BASELINE in failures:
        raise RuntimeError(f"one environment in a plain loop failed: {failures[BASELINE]}")
    results = {
        result.key: result
        for result in summarise(slices, {one.key: one.label for one in contenders}, BASELINE)
    }
    points = [
        _point(fleet.work.num_envs, results[fleet.key], str(fleet.envs.plan))
        for fleet in fleets
        if fleet.key in results
    ]
    cores, step_us = usable_cores(), 1e6 / results[BASELINE].rate
    settings: dict[str, Any] = {
        "env": choice.name,
        "cores": cores,
        "rounds": rounds,
        "seconds": seconds,
        "python": platform.python_version(),
        "loop_steps_per_s": round(results[BASELINE].rate, 1),
    }
    conclusion = speedup_conclusion(points, cores=cores, step_us=step_us)
    warning = noise_warning(list(results.values()))
    return Report(
        ok=bool(points),
        document=settings
        | {
            "points": [_speedup_json(point) for point in points],
            "left_out": failures,
            "conclusion": conclusion,
            "unrest": warning,
        },
        blocks=speedup_blocks(settings, points, failures, conclusion, warning),
    )


def _point(count: int, result: Result, plan: str) -> Point:
    return Point(count, result.rate, result.score, result.spread, plan)


def _speedup_json(point: Point) -> dict[str, Any]:
    return {
        "num_envs": point.num_envs,
        "steps_per_s": round(point.rate, 1),
        "speedup": round(point.speedup, 4),
        "expected": point.expected,
        "plan": point.plan,
    }


def speedup_conclusion(points: Sequence[Point], *, cores: int, step_us: float) -> str:
    """What this machine can do, and why, in two sentences at most."""
    if not points:
        return "Nothing could be measured."
    best = max(points, key=lambda point: point.speedup)
    many = plural(best.num_envs, "environment")
    took = f"a step takes {duration(step_us)}"
    if best.speedup > PAYS * cores:
        return (
            f"{plural(cores, 'core')}, but {took} and mostly waits, so more environments than "
            f"cores pay: {many} are {best.speedup:.1f}x as fast as one."
        )
    limit = f"{plural(cores, 'core')}: at most {cores}x for environments that compute"
    if best.speedup < PAYS:
        return f"{limit}; here nothing is gained, because {_why_not(cores, step_us)}."
    text = f"{limit}; {many} reach {best.speedup:.1f}x ({took})."
    beyond = [point for point in points if (point.expected or 0.0) > cores]
    if beyond:
        wish = beyond[-1]
        text += f" The usual ~{wish.expected:.1f}x of {wish.num_envs} needs {_enough(wish)} cores."
    return text


def _why_not(cores: int, step_us: float) -> str:
    if cores == 1:
        return "there is no second core to use"
    if step_us < 2e6 * ROUND_TRIP_S:
        return (
            f"a step of {duration(step_us)} is short beside a round trip to workers "
            f"({duration(1e6 * ROUND_TRIP_S)})"
        )
    return f"something else is using the cores: steps of {duration(step_us)} should pay"


def _enough(point: Point) -> str:
    """How many cores the promised speed-up needs at least."""
    return f"{int(-(-(point.expected or 1.0) // 1))} or more"


def speedup_blocks(
    settings: Mapping[str, Any],
    points: Sequence[Point],
    failures: Mapping[str, str],
    conclusion: str,
    warning: str | None,
) -> tuple[Block, ...]:
    """The same facts for people."""
    cores = settings["cores"]
    rows = [
        (
            str(point.num_envs),
            f"{point.rate:,.0f}",
            f"{point.speedup:.2f}x",
            "" if point.expected is None else f"~{point.expected:.1f}x",
            f"{point.spread:.0%}",
        )
        for point in points
    ]
    blocks: list[Block] = [
        Heading(
            f"{settings['env']}: speed-up over one environment in a plain loop "
            f"({settings['loop_steps_per_s']:,.0f} steps/s), {plural(cores, 'core')}, "
            f"{settings['rounds']} rounds of {settings['seconds']:g} s"
        ),
        Table(
            columns=("envs", "steps/s", "speed-up", "expected", "+-"),
            rows=tuple(rows),
            right=frozenset({"envs", "steps/s", "speed-up", "expected", "+-"}),
            notes=(
                "expected: what is usually promised for so many environments, on as many cores; "
                "+-: half the range of the rounds.",
            ),
        ),
        BarChart(
            tuple(
                BarRow(
                    plural(point.num_envs, "env"),
                    point.speedup,
                    f"{point.speedup:.2f}x",
                    point.expected,
                )
                for point in points
            )
        ),
    ]
    blocks += [Text(f"left out: {key} envs: {why}", "warn") for key, why in failures.items()]
    blocks += [Text(f"auto: {point.plan}") for point in points[-1:]]
    blocks.append(Text(conclusion, "ok" if points else "bad"))
    if warning is not None:
        blocks.append(Text(warning, "warn"))
    return tuple(blocks)
