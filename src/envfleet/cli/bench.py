"""``envfleet bench ENV``: steps per second of every way to run it here, side by side.

Law: the conclusion follows from the measured numbers alone (``bench_conclusion`` is pure). It
claims no difference smaller than the spread of the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from envfleet.cli.arguments import add_option, add_pace_arguments, read_pace
from envfleet.cli.bench_speedup import measure_speedup
from envfleet.cli.command import Context, UsageError
from envfleet.cli.contenders import (
    FleetHalves,
    FleetStep,
    GymnasiumVector,
    PlainLoop,
    SB3Vector,
    Workload,
    has_sb3,
    in_opening_order,
)
from envfleet.cli.env_argument import add_env_arguments
from envfleet.cli.env_trial import choose_tried_env
from envfleet.cli.measure import Contender, Result, compare, duration, noise_warning, summarise
from envfleet.cli.report import Block, Heading, Report, Table, Text, plural
from envfleet.engine.machine import usable_cores
from envfleet.options import Count, literal_of

KEYS = (
    "loop",
    "gym-sync",
    "gym-async",
    "sb3-dummy",
    "sb3-subproc",
    "serial",
    "process",
    "process-halves",
    "auto",
    "thread",
    "ray",
    "ray-halves",
)
_BY_DEFAULT = KEYS[: KEYS.index("thread")]
_ON_RAY = ("ray", "ray-halves")
NUM_ENVS = 16
"""How many environments ``bench`` and ``tune`` measure by default."""
_IN_PROCESS = {"loop", "gym-sync", "sb3-dummy", "serial", "thread"}

_EPILOG = """\
examples:
  envfleet bench CartPole-v1 --num-envs 64
  envfleet bench Ant-v5 --num-envs 16 --num-workers 2 --rounds 9
  envfleet bench my_package:MyEnv --quick
  envfleet bench CartPole-v1 --contenders process,thread --baseline process
  envfleet bench CartPole-v1 --json > bench.json
  envfleet bench --speedup CartPole-v1
  envfleet bench Ant-v5 --backend ray --ray-address auto

Every contender runs one slice per round, in an order that changes; ratios are taken within a round
and their median is shown. With next_step autoreset a reset counts as a step, except for SB3, which
always resets within the step.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench``."""
    parser.description = (
        "Measure environment steps per second: a plain loop, Gymnasium's vectorisers, "
        "Stable-Baselines3's when installed, and envfleet, in interleaved rounds."
    )
    parser.epilog = _EPILOG
    add_env_arguments(parser)
    parser.add_argument(
        "--speedup",
        action="store_true",
        help="how much faster 1, 2, 4, 8 and 16 environments go than one in a plain loop",
    )
    add_option(parser, "--num-envs", "N", Count, f"environments (default: {NUM_ENVS})")
    add_option(parser, "--num-workers", "W", Count, "envfleet's workers (default: usable cores)")
    add_pace_arguments(parser, "contender")
    parser.add_argument(
        "--start-method",
        choices=multiprocessing.get_all_start_methods(),
        help="how worker processes start, for all contenders (default: each library's own)",
    )
    parser.add_argument(
        "--autoreset",
        choices=("next_step", "same_step"),
        help="when an ended episode is reset (default: next_step)",
    )
    keys = f"what takes part, of {', '.join(KEYS)} (default: all but thread and ray)"
    add_option(parser, "--contenders", "KEY,...", literal_of(*KEYS), keys)
    parser.add_argument(
        "--backend",
        choices=("ray",),
        help="let this one take part too: workers in a Ray cluster",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="the cluster; auto is the one of this machine (default: one that is started here)",
    )
    parser.add_argument(
        "--baseline",
        choices=KEYS,
        metavar="KEY",
        help="whose speed is 1.00x (default: loop)",
    )


def run(args: argparse.Namespace, context: Context) -> Report:
    """Measure and conclude."""
    rounds, seconds = read_pace(args)
    if args.speedup:
        for name in (
            "num_envs",
            "num_workers",
            "autoreset",
            "contenders",
            "baseline",
            "backend",
            "ray_address",
        ):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"--speedup compares fleets as auto runs them; leave out {flag}")
        choice = choose_tried_env(args.env, args.env_kwargs)
        return measure_speedup(choice, rounds, seconds, args.start_method, context)
    choice = choose_tried_env(args.env, args.env_kwargs)
    num_envs, baseline = args.num_envs or NUM_ENVS, args.baseline or "loop"
    autoreset = args.autoreset or "next_step"
    cores = usable_cores()
    num_workers = min(args.num_workers or cores, num_envs)
    work = Workload(choice, num_envs, autoreset, args.start_method, ray_address=args.ray_address)
    keys = list(args.contenders or _BY_DEFAULT)
    if args.backend == "ray":
        keys += [key for key in _ON_RAY if key not in keys]
    elif args.ray_address is not None and not set(keys) & set(_ON_RAY):
        raise UsageError("--ray-address is of use with --backend ray only")
    left_out: dict[str, str] = {}
    if not has_sb3():
        for key in ("sb3-dummy", "sb3-subproc"):
            if key in keys:
                keys.remove(key)
                left_out[key] = "not installed (pip install 'envfleet[sb3]')"
    if baseline not in keys:
        keys.insert(0, baseline)
    if not keys:
        raise UsageError("nothing is left to measure; choose other --contenders")
    contenders = contenders_for(keys, work, num_workers)
    slices, failures = compare(
        in_opening_order(contenders),
        rounds=rounds,
        seconds=seconds,
        progress=context.progress,
        title="bench",
    )
    labels = {contender.key: contender.label for contender in contenders}
    results = summarise(slices, labels, baseline)
    left_out |= failures
    auto_plan = next(
        (str(one.envs.plan) for one in contenders if one.key == "auto" and one.key in slices), None
    )
    conclusion = bench_conclusion(
        results, num_envs=num_envs, num_workers=num_workers, cores=cores, auto_plan=auto_plan
    )
    settings: dict[str, Any] = {
        "env": choice.name,
        "num_envs": num_envs,
        "num_workers": num_workers,
        "cores": cores,
        "rounds": rounds,
        "seconds": seconds,
        "autoreset": autoreset,
        "start_method": args.start_method,
        "baseline": baseline,
        "python": platform.python_version(),
    }
    return Report(
        ok=bool(results),
        document=settings
        | {
            "results": [result_json(result) for result in results],
            "left_out": left_out,
            "auto_plan": auto_plan,
            "conclusion": conclusion,
            "unrest": noise_warning(results),
        },
        blocks=bench_blocks(settings, results, left_out, auto_plan, conclusion),
    )


def contenders_for(keys: Sequence[str], work: Workload, num_workers: int) -> list[Any]:
    """The contenders behind ``keys``, in a fixed order."""
    workers = plural(num_workers, "worker")
    every: dict[str, Contender] = {
        "gym-async": GymnasiumVector(work, parallel=True),
        "sb3-subproc": SB3Vector(work, parallel=True),
        "process": FleetStep(work, "process", f"envfleet step, {workers}", "process", num_workers),
        "process-halves": FleetHalves(
            work, "process-halves", f"envfleet send/recv, {workers}", "process", num_workers
        ),
        "auto": FleetStep(work, "auto", "envfleet auto", "auto"),
        "loop": PlainLoop(work),
        "gym-sync": GymnasiumVector(work, parallel=False),
        "sb3-dummy": SB3Vector(work, parallel=False),
        "serial": FleetStep(work, "serial", "envfleet serial", "serial"),
        "thread": FleetStep(work, "thread", f"envfleet thread, {workers}", "thread", num_workers),
        "ray": FleetStep(work, "ray", f"envfleet ray, {workers}", "ray", num_workers),
        "ray-halves": FleetHalves(
            work, "ray-halves", f"envfleet ray, send/recv, {workers}", "ray", num_workers
        ),
    }
    return [contender for key, contender in every.items() if key in keys]


def bench_conclusion(
    results: Sequence[Result],
    *,
    num_envs: int,
    num_workers: int,
    cores: int,
    auto_plan: str | None = None,
) -> str:
    """One sentence: what is fastest here, and why."""
    if not results:
        return "Nothing could be measured."
    best = results[0]
    opening = f"Fastest here: {best.label}"
    rival = results[1] if len(results) > 1 else None
    if rival is not None and best.score / rival.score < 1 + max(0.02, best.spread / 2):
        opening += f" (about as fast: {rival.label})"
    if best.key == "auto" and auto_plan:
        return f"{opening}: {auto_plan.rstrip('.')}."
    step_us = env_step_us(results)
    because = why_fastest(best, step_us, num_envs=num_envs, num_workers=num_workers, cores=cores)
    return f"{opening}: {because}."


def env_step_us(results: Sequence[Result]) -> float | None:
    """What one step costs inside the environment, in microseconds, from the plainest contender."""
    by_key = {result.key: result for result in results}
    for key in ("loop", "serial", "gym-sync"):
        if key in by_key:
            return 1e6 / by_key[key].rate
    return None


def why_fastest(
    best: Result, step_us: float | None, *, num_envs: int, num_workers: int, cores: int
) -> str:
    """Why ``best`` won, as the second half of a sentence."""
    step = f"a step takes about {duration(step_us)}" if step_us is not None else "steps are short"
    if best.key in _IN_PROCESS:
        if num_envs == 1:
            return f"with one environment there is nothing to run side by side, and {step}"
        if cores == 1:
            return f"only one core may be used, so worker processes only add their own cost; {step}"
        return (
            f"{step}, so all {num_envs} environments together cost less than "
            "waking worker processes and fetching their answers would save"
        )
    if best.shares is None:
        return f"{step}, so it pays to use {cores} cores although every environment has its process"
    inside = f"{best.shares.env:.0%} of the workers' time is spent inside environments"
    if best.key in ("process-halves", "ray-halves"):
        return f"{inside}, because one half of them steps while the other is served; {step}"
    per_worker = -(-num_envs // num_workers)
    return f"{inside}, and one wake-up is shared by {per_worker} environments; {step}"


def result_json(result: Result) -> dict[str, Any]:
    """One contender's numbers for scripts."""
    shares = result.shares
    return {
        "key": result.key,
        "label": result.label,
        "steps_per_s": round(result.rate, 1),
        "ratio": None if result.ratio is None else round(result.ratio, 4),
        "rates": [round(rate, 1) for rate in result.rates],
        "ratios": [round(ratio, 4) for ratio in result.ratios],
        "shares": shares
        and {name: round(getattr(shares, name), 4) for name in ("env", "waiting", "copying")},
    }


def speed_cells(result: Result) -> tuple[str, str, str]:
    """A contender's speed for a table: its rate, its ratio and its spread."""
    ratio = "-" if result.ratio is None else f"{result.ratio:.2f}x"
    return f"{result.rate:,.0f}", ratio, f"{result.spread:.0%}"


def bench_blocks(
    settings: Mapping[str, Any],
    results: Sequence[Result],
    left_out: Mapping[str, str],
    auto_plan: str | None,
    conclusion: str,
) -> tuple[Block, ...]:
    """The same facts for people."""
    baseline = next((one.label for one in results if one.key == settings["baseline"]), None)
    rows = []
    for result in results:
        shares = result.shares
        parts = () if shares is None else (shares.env, shares.waiting, shares.copying)
        cells = [f"{part:.0%}" for part in parts] or [""] * 3
        rows.append((result.label, *speed_cells(result), *cells))
    note = (
        "+-: half the range of the rounds. in env, waiting: share of the workers' time; copying: "
        "share of this process's time."
    )
    if baseline:
        note = f"ratio: to {baseline}, median of the rounds; {note}"
    blocks: list[Block] = [
        Heading(
            f"{settings['env']}: {settings['num_envs']} environments on "
            f"{plural(settings['cores'], 'core')}, {settings['rounds']} rounds of "
            f"{settings['seconds']:g} s, {settings['autoreset']} autoreset"
        ),
        Table(
            columns=("contender", "steps/s", "ratio", "+-", "in env", "waiting", "copying"),
            rows=tuple(rows),
            right=frozenset({"steps/s", "ratio", "+-", "in env", "waiting", "copying"}),
            levels=tuple("ok" if row is rows[0] else "info" for row in rows),
            notes=(note,),
        ),
    ]
    blocks += [Text(f"left out: {key}: {why}", "warn") for key, why in left_out.items()]
    if auto_plan:
        blocks.append(Text(f"auto: {auto_plan}"))
    blocks.append(Text(conclusion, "ok" if results else "bad"))
    if (warning := noise_warning(results)) is not None:
        blocks.append(Text(warning, "warn"))
    return tuple(blocks)
