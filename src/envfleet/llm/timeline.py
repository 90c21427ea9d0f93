"""Where the time of each trajectory went: as a Chrome trace, and as a picture. Pure.

    start_s ─► queue ─► prefill ─► decode ─► transport ─► env        one turn, from left to right

A trace opens in chrome://tracing and https://ui.perfetto.dev: one process per group, one thread per
environment. Turns that overlap nothing are gaps: the trajectory waited for something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.llm.trajectories import Trajectory, TrajectoryTurn
from envfleet.observe.lanes import Lane, Part, lane_chart
from envfleet.observe.markup import Markup

PHASES = ("queue", "prefill", "decode", "transport", "env")
MOST_LANES = 40
_MEANINGS = {
    "queue": "waits for its turn at the model",
    "prefill": "the model reads the prompt",
    "decode": "the model writes",
    "transport": "between the processes",
    "env": "in the environment",
}


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of one turn."""

    name: str
    begin_s: float
    seconds: float


def phases_of(turn: TrajectoryTurn) -> list[Phase]:
    """The phases of a turn in their order, without those that took no time."""
    model, times = turn.generation.times, turn.times
    seconds = {
        "queue": model.queue_s,
        "prefill": model.prefill_s,
        "decode": model.decode_s,
        "transport": times.transport_s,
        "env": times.env_s,
    }
    found, now_s = [], times.start_s
    for name in PHASES:
        if seconds[name] > 0:
            found.append(Phase(name, now_s, seconds[name]))
            now_s += seconds[name]
    return found


def chrome_trace(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """A document for chrome://tracing and Perfetto; write it as JSON."""
    return {"traceEvents": list(_events(trajectories)), "displayTimeUnit": "ms"}


def _events(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    groups = set()
    for one in trajectories:
        where = {"pid": one.group_id, "tid": one.env_id}
        if one.group_id not in groups:
            groups.add(one.group_id)
            yield _timeline_name("process_name", f"group {one.group_id}, {one.tag}", where)
        yield _timeline_name("thread_name", f"environment {one.env_id}", where)
        for turn in one.turns:
            for phase in phases_of(turn):
                yield {
                    "name": phase.name,
                    "cat": "env" if phase.name in ("transport", "env") else "model",
                    "ph": "X",
                    "ts": round(phase.begin_s * 1e6, 3),
                    "dur": round(phase.seconds * 1e6, 3),
                    **where,
                    "args": {"turn": turn.number, **_timeline_facts(phase, turn)},
                }
        if one.failure is not None:
            yield {
                "name": f"failed: {one.failure.reason}",
                "ph": "i",
                "s": "t",
                "ts": round(end_of(one) * 1e6, 3),
                **where,
                "args": {"error": one.failure.error},
            }


def _timeline_name(what: str, name: str, where: dict[str, int]) -> dict[str, Any]:
    return {"name": what, "ph": "M", **where, "args": {"name": name}}


def _timeline_facts(phase: Phase, turn: TrajectoryTurn) -> dict[str, Any]:
    if phase.name == "prefill":
        return {"prompt_tokens": turn.generation.num_prompt_tokens}
    if phase.name == "decode":
        return {"tokens": turn.generation.num_tokens, "stop": turn.generation.stop_reason}
    return {"reward": turn.reward} if phase.name == "env" else {}


def end_of(trajectory: Trajectory) -> float:
    """When its last turn so far was over, in seconds from the start of the rollout."""
    return max(
        (
            phases[-1].begin_s + phases[-1].seconds
            for turn in trajectory.turns
            if (phases := phases_of(turn))
        ),
        default=0.0,
    )


def timeline_chart(trajectories: Sequence[Trajectory], most: int = MOST_LANES) -> Markup:
    """A picture of the rollout, those that ended first on top; a part of them if there are many.

    Trajectories that are read from disk are held one at a time, but for those that are drawn.
    """
    ends_s = [end_of(one) for one in trajectories]
    ordered = sorted(range(len(ends_s)), key=lambda place: (ends_s[place], place))
    shown = [trajectories[place] for place in _evenly_chosen(ordered, most)]
    lanes = [
        Lane(
            f"environment {one.env_id}",
            tuple(_timeline_part(phase, turn) for turn, phase in _all_phases(one)),
        )
        for one in shown
    ]
    note = "Those that ended first are on top."
    if len(shown) < len(ordered):
        note = f"{len(shown)} of {len(ordered)} trajectories, from the first to the last to end."
    return lane_chart("trajectories", lanes, PHASES, note)


def _all_phases(trajectory: Trajectory) -> Iterator[tuple[TrajectoryTurn, Phase]]:
    return ((turn, phase) for turn in trajectory.turns for phase in phases_of(turn))


def _timeline_part(phase: Phase, turn: TrajectoryTurn) -> Part:
    text = f"turn {turn.number + 1}, {phase.name} ({_MEANINGS[phase.name]}): {phase.seconds:.3g} s"
    return Part(phase.name, phase.begin_s, phase.begin_s + phase.seconds, text)


def _evenly_chosen(ordered: Sequence[int], most: int) -> list[int]:
    """Evenly chosen, the first and the last among them."""
    if len(ordered) <= most:
        return list(ordered)
    step = (len(ordered) - 1) / (most - 1)
    return [ordered[round(number * step)] for number in range(most)]
