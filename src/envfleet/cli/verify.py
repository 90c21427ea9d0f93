"""``envfleet verify ENV``: is every parallel run of it bit-equal to a plain loop?

``envfleet.testing`` records and compares the streams. Law: an environment that does not repeat
itself in a plain loop is reported as such, before any backend is blamed; a difference is named by
slot, step and field.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from envfleet.cli.arguments import add_option, add_worker_arguments
from envfleet.cli.command import Context, UsageError
from envfleet.cli.env_argument import add_env_arguments
from envfleet.cli.env_trial import choose_tried_env
from envfleet.cli.report import (
    Block,
    Finding,
    Findings,
    Heading,
    Level,
    Report,
    Table,
    Text,
    plural,
)
from envfleet.errors import ConfigError
from envfleet.options import Count, CountOrZero, literal_of
from envfleet.testing import (
    Difference,
    Streams,
    count_episodes,
    first_difference,
    fleet_driven,
    hand_driven,
    uses_global_random,
)

MODES = ("next_step", "same_step", "disabled")
BACKENDS = ("serial", "thread", "process")

_EPILOG = """\
examples:
  envfleet verify CartPole-v1
  envfleet verify my_package:MyEnv --steps 1000
  envfleet verify my_package:MyEnv --workers 1,4 --start-methods forkserver

Every slot gets seed + slot and its own actions. A loop over single environments is the reference;
each backend, layout and autoreset mode has to give the same observations, rewards, flags and infos,
bit by bit. The exit code is 1 when anything differs or the environment uses global random state.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One way to run the fleet that has to equal the plain loop."""

    backend: str
    num_workers: int
    start_method: str | None
    autoreset: str
    min_slots: int | None = None
    """Driven with ``send`` and ``recv(min_slots=...)`` when given, else with ``step``."""

    @property
    def label(self) -> str:
        """For progress bars and sentences."""
        method = f" {self.start_method}" if self.start_method else ""
        workers = plural(self.num_workers, "worker")
        return f"{self.backend}{method}, {workers}, {self.autoreset}"

    @property
    def kwargs(self) -> dict[str, Any]:
        """What ``fleet_driven`` passes on to ``make_vec``."""
        kwargs: dict[str, Any] = {"backend": self.backend}
        if self.backend != "serial":
            kwargs["num_workers"] = self.num_workers
        if self.start_method:
            kwargs["start_method"] = self.start_method
        if self.backend == "process":
            # a hang in a worker has to end as an error that names it
            kwargs |= {"step_timeout_s": 60.0, "reset_timeout_s": 60.0}
        if self.min_slots is not None:
            kwargs["min_slots"] = self.min_slots
        return kwargs


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one run."""

    run: Run
    seconds: float
    difference: Difference | None = None
    error: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the run gave the reference's streams."""
        return self.difference is None and self.error is None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verify``."""
    parser.description = (
        "Prove that the environment gives the same streams on every backend, with any number of "
        "workers and in every autoreset mode, as in a plain loop; find use of global random state."
    )
    parser.epilog = _EPILOG
    add_env_arguments(parser)
    add_option(parser, "--num-envs", "N", Count, "environments", 5)
    add_option(parser, "--steps", "T", Count, "steps of every environment", 200)
    add_option(parser, "--seed", "N", CountOrZero, "seed of slot 0", 0)
    add_worker_arguments(parser)
    add_option(parser, "--autoreset", "MODE,...", literal_of(*MODES), "autoreset modes", MODES)
    add_option(parser, "--backends", "B,...", literal_of(*BACKENDS), "backends", BACKENDS)
    parser.add_argument(
        "--ignore-infos",
        action="store_true",
        help="compare all but the infos, for an environment that does not seed what these hold",
    )


def run(args: argparse.Namespace, context: Context) -> Report:
    """Record the reference, compare every run with it."""
    choice = choose_tried_env(args.env, args.env_kwargs)
    workers = [number for number in args.workers if number <= args.num_envs]
    if not workers:
        raise UsageError(
            f"--workers {','.join(map(str, args.workers))} are all more than --num-envs "
            f"{args.num_envs}; a worker needs an environment"
        )
    runs = runs_for(args.backends, workers, args.start_methods, args.autoreset, args.num_envs)
    comparisons: list[Comparison] = []
    by_hand = partial(hand_driven, choice.env_fn, args.num_envs, args.steps, args.seed)
    with context.progress.bar("verify", len(runs) + len(args.autoreset) + 2) as bar:
        bar.note("global random state")
        shared_random = uses_global_random(choice.env_fn, args.steps, args.seed)
        bar.advance()
        references: dict[str, Streams] = {}
        for mode in args.autoreset:
            bar.note(f"by hand, {mode}")
            references[mode] = by_hand(mode)
            bar.advance()
        bar.note("by hand, again")
        first_mode = args.autoreset[0]
        unrepeatable = first_difference(
            references[first_mode], by_hand(first_mode), ignore_infos=args.ignore_infos
        )
        bar.advance()
        for one in runs:
            bar.note(one.label)
            comparisons.append(compared(one, references[one.autoreset], choice.env_fn, args))
            bar.advance()
    episodes = {
        mode: sum(count_episodes(slot) for slot in streams.slots)
        for mode, streams in references.items()
    }
    conclusion, ok = verify_conclusion(comparisons, unrepeatable, shared_random)
    facts = {
        "env": choice.name,
        "num_envs": args.num_envs,
        "steps": args.steps,
        "seed": args.seed,
        "episodes": episodes,
    }
    return Report(
        ok=ok,
        document=facts
        | {
            "comparisons": [comparison_json(one) for one in comparisons],
            "repeats_itself": unrepeatable is None,
            "unrepeatable": unrepeatable and difference_json(unrepeatable),
            "global_random": shared_random,
            "conclusion": conclusion,
        },
        blocks=verify_blocks(facts, comparisons, unrepeatable, shared_random, conclusion, ok),
    )


def runs_for(
    backends: Sequence[str],
    workers: Sequence[int],
    start_methods: Sequence[str],
    modes: Sequence[str],
    num_envs: int,
) -> list[Run]:
    """Every run to compare: backends, layouts and modes by ``step``, and first-ready once."""
    runs = []
    for mode in modes:
        if "serial" in backends:
            runs.append(Run("serial", 1, None, mode))
        if "thread" in backends:
            runs += [Run("thread", number, None, mode) for number in workers]
        if "process" in backends:
            for method in start_methods:
                runs += [Run("process", number, method, mode) for number in workers]
    # first-ready order is compared once per parallel backend, with most workers: the number of
    # workers changes nothing else
    if num_envs > 1:
        first_ready = max(1, num_envs // 2)
        if "thread" in backends:
            runs.append(Run("thread", max(workers), None, modes[0], first_ready))
        if "process" in backends:
            runs.append(Run("process", max(workers), start_methods[0], modes[0], first_ready))
    return runs


def compared(
    one: Run, reference: Streams, env_fn: Callable[[], Any], args: argparse.Namespace
) -> Comparison:
    """Record one run and compare it with the reference."""
    start_s = time.perf_counter()
    try:
        streams = fleet_driven(
            env_fn, args.num_envs, args.steps, args.seed, one.autoreset, **one.kwargs
        )
    except ConfigError:
        raise
    except Exception as exc:
        error = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
        return Comparison(one, time.perf_counter() - start_s, error=error)
    seconds = time.perf_counter() - start_s
    difference = first_difference(reference, streams, ignore_infos=args.ignore_infos)
    return Comparison(one, seconds, difference=difference)


def verify_conclusion(
    comparisons: Sequence[Comparison], unrepeatable: Difference | None, shared_random: str | None
) -> tuple[str, bool]:
    """One sentence about all comparisons, and whether everything is well."""
    differing = [one for one in comparisons if not one.is_equal]
    if unrepeatable is not None:
        cause = shared_random or (
            "no backend can make it reproducible; draw from self.np_random only, and keep time, "
            "ids and shared objects out of what it returns."
        )
        return (
            "The environment does not repeat itself: two plain loops with the same seed already "
            f"differ at slot {unrepeatable.slot}, step {unrepeatable.step}, field "
            f"{unrepeatable.field}; {cause}",
            False,
        )
    if differing:
        first = differing[0]
        where = f"it failed with {first.error}"
        if (found := first.difference) is not None:
            where = f"slot {found.slot}, step {found.step}, field {found.field}"
        return (
            f"{len(differing)} of {len(comparisons)} runs differ from the plain loop; the first "
            f"({first.run.label}): {where}.",
            False,
        )
    if shared_random is not None:
        return (
            "All runs were equal, but the environment uses random state that others in its process "
            "share, so this holds only as long as nothing else uses it.",
            False,
        )
    return f"All {len(comparisons)} runs equal the plain loop, bit by bit.", True


def difference_json(difference: Difference) -> dict[str, Any]:
    """A difference for scripts; the values as text, because they may be anything."""
    return {
        "slot": int(difference.slot),
        "step": int(difference.step),
        "field": difference.field,
        "expected": repr(difference.expected)[:500],
        "got": repr(difference.got)[:500],
        "text": str(difference),
    }


def comparison_json(one: Comparison) -> dict[str, Any]:
    """One comparison for scripts."""
    return {
        "backend": one.run.backend,
        "num_workers": one.run.num_workers,
        "start_method": one.run.start_method,
        "autoreset": one.run.autoreset,
        "first_ready": one.run.min_slots is not None,
        "equal": one.is_equal,
        "seconds": round(one.seconds, 3),
        "difference": one.difference and difference_json(one.difference),
        "error": one.error,
    }


def verify_blocks(
    facts: dict[str, Any],
    comparisons: Sequence[Comparison],
    unrepeatable: Difference | None,
    shared_random: str | None,
    conclusion: str,
    ok: bool,
) -> tuple[Block, ...]:
    """The same facts for people."""
    blocks: list[Block] = [
        Heading(
            f"{facts['env']}: {facts['num_envs']} environments, {facts['steps']} steps each, seeds "
            f"from {facts['seed']}, against a plain loop"
        ),
        table_of(comparisons),
    ]
    details = [
        Finding(one.run.label, "bad", str(one.difference or one.error))
        for one in comparisons
        if not one.is_equal
    ]
    # if the plain loop does not repeat itself, differences from it mean nothing
    if details and unrepeatable is None:
        blocks.append(Findings(tuple(details[:3])))
    checks = [
        Finding("repeats itself", "ok", "two plain loops with the same seed are equal")
        if unrepeatable is None
        else Finding("repeats itself", "bad", loop_difference(unrepeatable)),
        Finding("global random state", "ok", "not used")
        if shared_random is None
        else Finding("global random state", "bad", shared_random),
        episodes_finding(facts["episodes"]),
    ]
    blocks += [Findings(tuple(checks)), Text(conclusion, "ok" if ok else "bad")]
    return tuple(blocks)


def loop_difference(difference: Difference) -> str:
    """Where two plain loops differ, in half a sentence."""
    values = [short(value) for value in (difference.expected, difference.got)]
    return (
        f"two plain loops with the same seed differ at slot {difference.slot}, step "
        f"{difference.step}: {difference.field} is {values[0]} in one and {values[1]} in the other"
    )


def short(value: object) -> str:
    """A value as text that fits on a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}"


def table_of(comparisons: Sequence[Comparison]) -> Table:
    """One row per backend and layout, one column per autoreset mode."""
    modes = list(dict.fromkeys(one.run.autoreset for one in comparisons))
    layouts: dict[tuple[str, str, str, str], dict[str, Comparison]] = {}
    for one in comparisons:
        calls = "step" if one.run.min_slots is None else "send/recv"
        layout = (one.run.backend, one.run.start_method or "", str(one.run.num_workers), calls)
        layouts.setdefault(layout, {})[one.run.autoreset] = one
    rows = []
    levels: list[Level] = []
    for layout, by_mode in layouts.items():
        cells = [comparison_word(by_mode[mode]) if mode in by_mode else "" for mode in modes]
        rows.append((*layout, *cells, f"{sum(one.seconds for one in by_mode.values()):.2f}"))
        levels.append("info" if all(one.is_equal for one in by_mode.values()) else "bad")
    return Table(
        columns=("backend", "start", "workers", "calls", *modes, "seconds"),
        rows=tuple(rows),
        right=frozenset({"workers", "seconds"}),
        levels=tuple(levels),
    )


def comparison_word(one: Comparison) -> str:
    """The word for a comparison in a table."""
    if one.error is not None:
        return "FAILED"
    return "equal" if one.difference is None else "DIFFERS"


def episodes_finding(episodes: dict[str, int]) -> Finding:
    """Whether resets were part of what was compared."""
    fewest = min(episodes.values())
    if fewest == 0:
        return Finding(
            "episodes",
            "warn",
            "no episode ended, so resets were not compared",
            "raise --steps until some do",
        )
    return Finding("episodes", "ok", f"{fewest} ended in the reference, resets included")
