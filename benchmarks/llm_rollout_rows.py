"""The rows of llm_rollout.py's table: contenders, comparisons and targets.

A quick run makes fewer requests. `ROWS` has all rows by name.
"""

from __future__ import annotations

import statistics

from benchmarks.inference import Embedded, InProcess, OverHttp, PerRequest
from benchmarks.llm_rollout_async import ASYNC_ROWS
from benchmarks.peer_ragen import MAX_TURN, Ours, Ragen
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.tables import Line, Target
from envfleet.cli.measure import Contender
from envfleet.observe.progress import Progress


def broker(pace: Pace, progress: Progress, title: str) -> Outcome:
    """What the broker itself costs: a script answers at once, prompts have 2 KB."""
    here, http = InProcess(), OverHttp()
    contenders: list[Contender] = [here, http, PerRequest("loky")]
    bounds = {"in-process": 5_000.0, "http": 1_000.0, "loky": 2_500.0}
    name = "broker, an engine that answers at once, prompts of 2 KB"
    rounds = Rounds(name, contenders, pace, progress, title)
    lines = []
    for one in contenders:
        target, work = Target(bounds[one.key], "requests/s"), f"{name}: {one.label}"
        if one.key in rounds.failures:
            lines.append(Line(work, "", target, (), failure=rounds.failures[one.key]))
            continue
        rates = tuple(part.rate for part in rounds.slices[one.key])
        lines.append(Line(work, "", target, (statistics.median(rates),), (rates,)))
    notes = [
        f"{one.label}: {1e6 * statistics.median(one.cpu_s):.0f} us of this process for a request"
        for one in (here, http)
        if one.key not in rounds.failures
    ]
    return Outcome(lines, rounds.entries(), notes)


def batching(pace: Pace, progress: Progress, title: str) -> Outcome:
    """The embedded model must be kept busy: several conversations cost less together than alone."""
    num_tokens = max(4, round(48 * pace.part))
    shared, alone = Embedded("shared", 8, num_tokens), Embedded("alone", 1, num_tokens)
    name = "embedded model, 8 envs, tokens per CPU-second"
    # a slice takes about ten seconds, however long it should be
    rounds = Rounds(name, [shared, alone], pace.scaled(rounds=0.4), progress, title)
    line = rounds.line(f"{name}, shared", "one at a time", 1.14, shared.key, alone.key)
    return Outcome([line], rounds.entries())


def ragen(pace: Pace, progress: Progress, title: str) -> Outcome:
    """RAGEN's manager and loop get the same answers, in rooms of the same kind."""
    num_groups = max(1, round(8 * pace.part))
    ours, theirs = Ours(num_groups), Ragen(num_groups)
    name = f"Sokoban, {16 * num_groups} trajectories of {MAX_TURN} turns, answers at once: turns"
    # a slice of RAGEN takes many seconds, however long it should be
    rounds = Rounds(name, [ours, theirs], pace.scaled(rounds=0.4), progress, title)
    return Outcome([rounds.line(name, theirs.label, 20.0, ours.key, theirs.key)], rounds.entries())


ROWS: dict[str, Row] = {
    "broker": broker,
    "batching": batching,
    **ASYNC_ROWS,
    "ragen": ragen,
}
