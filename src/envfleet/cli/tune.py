"""``envfleet tune ENV``: measures backends and numbers of workers, and prints the line to paste.

Law: the advice follows from the measured numbers alone (``advise`` is pure). Of settings that are
equally fast the simplest wins: fewer processes mean less memory, a shorter start and easier
debugging.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.cli.arguments import add_option, add_pace_arguments, read_pace
from envfleet.cli.bench import NUM_ENVS, result_json, speed_cells
from envfleet.cli.command import Context
from envfleet.cli.contenders import FleetHalves, FleetStep, Workload, in_opening_order
from envfleet.cli.env_argument import EnvChoice, add_env_arguments
from envfleet.cli.env_trial import choose_tried_env
from envfleet.cli.measure import Result, Slice, compare, duration, noise_warning, summarise
from envfleet.cli.report import Block, Code, Heading, Level, Report, Table, Text, plural
from envfleet.engine.machine import usable_cores
from envfleet.options import Count

_EPILOG = """\
examples:
  envfleet tune CartPole-v1
  envfleet tune Ant-v5 --num-envs 16 --rounds 9 --seconds 1
  envfleet tune my_package:MyEnv --num-envs 8 --start-method spawn

A first pass drops settings that are less than half as fast as the best; the others
are measured in interleaved rounds. Of settings within 3 % of the best, the simplest
is advised.
"""

_CLOSE_ENOUGH = 0.97
_HOPELESS = 0.5


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """One way to run the fleet."""

    backend: str
    num_workers: int
    lockstep: bool
    """True for ``step``; False for ``send``/``recv`` with two halves in flight."""

    @property
    def key(self) -> str:
        """A unique short name; threads sort last when they are started."""
        return f"{self.backend}-{self.num_workers}-{'step' if self.lockstep else 'halves'}"

    @property
    def label(self) -> str:
        """The name in progress bars."""
        how = "step" if self.lockstep else "send/recv"
        return f"{self.backend}, {self.num_workers} workers, {how}"

    @property
    def simplicity(self) -> tuple[int, int]:
        """Smaller is simpler."""
        return ("serial", "thread", "process").index(self.backend), self.num_workers


@dataclass(frozen=True, slots=True)
class TuneAdvice:
    """What to use, and why."""

    setting: FleetSetting
    why: str
    hint: str | None
    """What a different way of calling would gain, if anything."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``tune``."""
    parser.description = (
        "Measure backends, numbers of workers and both ways of stepping, and print the make_vec "
        "line that is fastest on this machine."
    )
    parser.epilog = _EPILOG
    add_env_arguments(parser)
    add_option(parser, "--num-envs", "N", Count, "environments", NUM_ENVS)
    add_option(parser, "--max-workers", "W", Count, "most workers to try (default: usable cores)")
    add_pace_arguments(parser, "setting")
    parser.add_argument(
        "--start-method",
        choices=multiprocessing.get_all_start_methods(),
        help="how worker processes start (default: envfleet's own choice)",
    )


def run(args: argparse.Namespace, context: Context) -> Report:
    """Measure, advise."""
    choice = choose_tried_env(args.env, args.env_kwargs)
    rounds, seconds = read_pace(args)
    cores = usable_cores()
    most = min(args.max_workers or cores, args.num_envs)
    settings = settings_for(worker_counts(most), args.num_envs)
    work = Workload(choice, args.num_envs, start_method=args.start_method)
    slices, failures = measure_settings(settings, work, rounds, seconds, context)
    labels = {setting.key: setting.label for setting in settings}
    results = summarise(slices, labels, "serial-1-step")
    by_key = {setting.key: setting for setting in settings}
    advice = advise(results, by_key, num_envs=args.num_envs, cores=cores)
    lines = line_to_paste(choice, args.num_envs, advice.setting, args.start_method)
    facts = {
        "env": choice.name,
        "num_envs": args.num_envs,
        "cores": cores,
        "rounds": rounds,
        "seconds": seconds,
        "start_method": args.start_method,
        "python": platform.python_version(),
    }
    return Report(
        ok=True,
        document=facts
        | {
            "results": [
                result_json(result)
                | {
                    "backend": by_key[result.key].backend,
                    "num_workers": by_key[result.key].num_workers,
                    "lockstep": by_key[result.key].lockstep,
                }
                for result in results
            ],
            "left_out": failures,
            "unrest": noise_warning(results),
            "advice": {
                "backend": advice.setting.backend,
                "num_workers": advice.setting.num_workers,
                "why": advice.why,
                "hint": advice.hint,
                "code": "\n".join(lines),
            },
        },
        blocks=tune_blocks(facts, results, by_key, failures, advice, lines),
    )


def worker_counts(most: int) -> list[int]:
    """Numbers of workers to try: all up to eight, then doubling, and always the last two.

    One core less than all leaves room for the process that learns.
    """
    counts = set(range(1, min(most, 8) + 1))
    number = 8
    while number < most:
        counts.add(number)
        number *= 2
    return sorted(count for count in counts | {most - 1, most} if count >= 1)


def settings_for(counts: Sequence[int], num_envs: int) -> list[FleetSetting]:
    """Every setting worth a measurement."""
    settings = [FleetSetting("serial", 1, lockstep=True)]
    for count in counts:
        settings.append(FleetSetting("process", count, lockstep=True))
        # one environment cannot be in two halves
        if num_envs > 1:
            settings.append(FleetSetting("process", count, lockstep=False))
    settings += [FleetSetting("thread", count, lockstep=True) for count in counts if count > 1]
    return settings


def measure_settings(
    settings: Sequence[FleetSetting], work: Workload, rounds: int, seconds: float, context: Context
) -> tuple[dict[str, list[Slice]], dict[str, str]]:
    """A short pass over everything, then the rounds with what is left."""
    shown = min(0.1, seconds)
    first, failures = compare(
        in_opening_order([contender(setting, work) for setting in settings]),
        rounds=2,
        seconds=shown,
        progress=context.progress,
        title="first pass",
    )
    kept = promising(first)
    slices, later = compare(
        in_opening_order([contender(one, work) for one in settings if one.key in kept]),
        rounds=rounds,
        seconds=seconds,
        progress=context.progress,
        title="tune",
    )
    dropped = {
        key: f"dropped after the first pass at {max(one.rate for one in own):,.0f} steps/s"
        for key, own in first.items()
        if key not in kept
    }
    return slices, failures | dropped | later


def promising(first: Mapping[str, Sequence[Slice]]) -> set[str]:
    """The settings that may still be the best; serial always stays, for comparison."""
    best = {key: max(one.rate for one in own) for key, own in first.items()}
    limit = _HOPELESS * max(best.values(), default=0.0)
    return {key for key, rate in best.items() if rate >= limit or key == "serial-1-step"}


def contender(setting: FleetSetting, work: Workload) -> FleetStep:
    """Something that can run the setting."""
    kind = FleetStep if setting.lockstep else FleetHalves
    workers = None if setting.backend == "serial" else setting.num_workers
    return kind(work, setting.key, setting.label, setting.backend, workers)


def advise(
    results: Sequence[Result], settings: Mapping[str, FleetSetting], *, num_envs: int, cores: int
) -> TuneAdvice:
    """The simplest setting for ``step`` that is as good as the best, and why.

    Raises:
        RuntimeError: Nothing could be measured.
    """
    if not results:
        raise RuntimeError("no setting could be measured; try envfleet doctor, then --traceback")
    lockstep = [result for result in results if settings[result.key].lockstep] or list(results)
    best = max(lockstep, key=lambda result: result.score)
    near = [result for result in lockstep if result.score >= _CLOSE_ENOUGH * best.score]
    chosen = min(near, key=lambda result: settings[result.key].simplicity)
    setting = settings[chosen.key]
    serial = next((one for one in results if settings[one.key].backend == "serial"), None)
    why = advice_reasons(chosen, setting, serial, num_envs=num_envs, cores=cores)
    if chosen is not best:
        gain = best.score / chosen.score - 1
        why += f"; {settings[best.key].label} is only {gain:.1%} faster"
    halves = [result for result in results if not settings[result.key].lockstep]
    hint = None
    if halves:
        top = max(halves, key=lambda result: result.score)
        if top.score > 1.05 * chosen.score:
            other = settings[top.key]
            hint = (
                f"With send/recv and two halves in flight, {other.backend} with "
                f"{other.num_workers} workers makes {top.rate:,.0f} steps/s, "
                f"{top.score / chosen.score:.2f}x of that."
            )
    return TuneAdvice(setting, why + ".", hint)


def advice_reasons(
    chosen: Result, setting: FleetSetting, serial: Result | None, *, num_envs: int, cores: int
) -> str:
    """Why a setting is the one to use, as a sentence without its full stop."""
    cost = "" if serial is None else f"a step takes about {duration(1e6 / serial.rate)}"
    if setting.backend == "serial":
        if num_envs == 1:
            return f"With one environment nothing can run side by side ({cost})"
        if cores == 1:
            return f"Only one core may be used here, and workers would only add their cost ({cost})"
        return f"Workers would cost more than they save: {cost}, {num_envs} environments"
    gain = "" if serial is None else f"{chosen.score / serial.score:.2f}x of serial"
    inside = "" if chosen.shares is None else f"{chosen.shares.env:.0%} of their time in envs"
    workers = plural(setting.num_workers, f"{setting.backend} worker")
    facts = ", ".join(part for part in (gain, inside, cost) if part)
    return f"{workers} make {chosen.rate:,.0f} steps/s: {facts}"


def line_to_paste(
    choice: EnvChoice, num_envs: int, setting: FleetSetting, start_method: str | None
) -> list[str]:
    """The lines that build the advised fleet."""
    arguments = [choice.expression, f"num_envs={num_envs}", f'backend="{setting.backend}"']
    if setting.backend != "serial":
        arguments.append(f"num_workers={setting.num_workers}")
    if setting.backend == "process" and start_method:
        arguments.append(f'start_method="{start_method}"')
    if choice.env_kwargs:
        arguments.append(f"env_kwargs={choice.env_kwargs}")
    lines = [choice.imports] if choice.imports else []
    return [*lines, f"envs = envfleet.make_vec({', '.join(arguments)})"]


def tune_blocks(
    facts: Mapping[str, Any],
    results: Sequence[Result],
    settings: Mapping[str, FleetSetting],
    failures: Mapping[str, str],
    advice: TuneAdvice,
    lines: Sequence[str],
) -> tuple[Block, ...]:
    """The same facts for people."""
    rows = []
    levels: list[Level] = []
    for result in results:
        setting = settings[result.key]
        shares = result.shares
        is_advised = setting == advice.setting
        rows.append(
            (
                setting.backend,
                str(setting.num_workers),
                "step" if setting.lockstep else "send/recv",
                *speed_cells(result),
                "" if shares is None else f"{shares.env:.0%}",
                "<- advised" if is_advised else "",
            )
        )
        levels.append("ok" if is_advised else "info")
    blocks: list[Block] = [
        Heading(
            f"{facts['env']}: {facts['num_envs']} environments on "
            f"{plural(facts['cores'], 'core')}, {facts['rounds']} rounds of {facts['seconds']:g} s"
        ),
        Table(
            columns=("backend", "workers", "calls", "steps/s", "vs serial", "+-", "in env", ""),
            rows=tuple(rows),
            right=frozenset({"workers", "steps/s", "vs serial", "+-", "in env"}),
            levels=tuple(levels),
        ),
    ]
    if failures:
        left = (f"{settings[key].label}: {why}" for key, why in failures.items())
        blocks += [Text(f"left out: {line}", "warn") for line in left]
    blocks += [Text(advice.why, "ok"), Code(tuple(lines))]
    if advice.hint:
        blocks.append(Text(advice.hint))
    if (warning := noise_warning(results)) is not None:
        blocks.append(Text(warning, "warn"))
    return tuple(blocks)
