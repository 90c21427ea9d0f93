"""Rows of llm_rollout.py's table on rollouts: scheduling, environments, journal, memory.

A scripted server answers over real HTTP, from a process of its own. How long it takes depends on
the content of a request only, so every contender meets the same times. `ASYNC_ROWS` has the rows
by name.
"""

from __future__ import annotations

import heapq
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rounds import Outcome, Pace, Row
from benchmarks.tables import Line, Target
from envfleet.llm.config import load_config
from envfleet.llm.environments.base import Mode, Step, TextEnv
from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.inference.scripted import ScriptedEngine
from envfleet.llm.inference.types import GenerateRequest
from envfleet.llm.parallel_rollout import ParallelRolloutManager, ParallelRolloutResult
from envfleet.llm.registry import register_env
from envfleet.llm.trajectories import Trajectory
from envfleet.observe.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
PLACES, NUM_TURNS = 32, 5


class Endless(TextEnv):
    """Goes on for ever; a step may keep a processor busy."""

    busy_s = 0.0

    def _begin(self, seed: int, mode: Mode) -> None:
        self._number = seed

    def _act(self, action: Any) -> Step:
        until_s = time.thread_time() + self.busy_s
        while time.thread_time() < until_s:
            pass
        self._number += 1
        return self._text(), 0.0, False, False, {}

    def _text(self) -> str:
        return f"number {self._number}"


class Busy(Endless):
    """Takes 50 ms of processor time for a step."""

    busy_s = 0.05


register_env("benchmark-endless", Endless)
register_env("benchmark-busy", Busy)


def config_for(env_type: str, num_trajectories: int, *changes: str) -> Any:
    """Trajectories of five turns in one environment each."""
    return load_config(
        "base",
        [
            f"+custom_envs.Row.env_type={env_type}",
            "+custom_envs.Row.max_actions_per_traj=100",
            f"es_manager.train.env_groups={num_trajectories}",
            "es_manager.train.group_size=1",
            "es_manager.train.env_configs.tags=[Row]",
            f"es_manager.train.env_configs.n_groups=[{num_trajectories}]",
            f"agent_proxy.max_turn={NUM_TURNS}",
            f"llm.max_concurrency={PLACES}",
            *changes,
        ],
    )


@contextmanager
def served(median_s: float) -> Iterator[str]:
    """The address of a scripted server in a process of its own."""
    words = [sys.executable, "-m", "tests.misbehaving_server", "--median-s", str(median_s)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            server.wait(10)


def played(config: Any, seed: int, num_rollouts: int = 1) -> ParallelRolloutResult:
    """The last of some rollouts with the same environments; the first one starts the workers."""
    with (
        SharedLLMInferenceManager.from_config(config) as llm,
        ParallelRolloutManager(config, llm) as manager,
    ):
        for number in range(num_rollouts):
            result = manager.rollout(seed=seed + 1000 * (num_rollouts - 1 - number))
        return result


def model_times(trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """How long the model took for each turn of each trajectory."""
    return [
        [turn.generation.times.prefill_s + turn.generation.times.decode_s for turn in one.turns]
        for one in trajectories
    ]


def ideal_s(times: Sequence[Sequence[float]], places: int) -> float:
    """How long these turns take if the oldest request is served at once wherever there is room."""
    waiting = [(0.0, number, 0) for number in range(len(times))]
    heapq.heapify(waiting)
    free = [0.0] * places
    end_s = 0.0
    while waiting:
        asked_s, number, turn = heapq.heappop(waiting)
        done_s = max(asked_s, heapq.heappop(free)) + times[number][turn]
        heapq.heappush(free, done_s)
        end_s = max(end_s, done_s)
        if turn + 1 < len(times[number]):
            heapq.heappush(waiting, (done_s, number, turn + 1))
    return end_s


def busy_share(trajectories: Sequence[Trajectory], places: int) -> float:
    """The share of places that were taken until nine tenths of the trajectories were over."""
    spans, ends = [], []
    for one in trajectories:
        for turn in one.turns:
            times = turn.generation.times
            begin_s = turn.times.start_s + times.queue_s
            spans.append((begin_s, begin_s + times.prefill_s + times.decode_s))
        ends.append(spans[-1][1])
    first_s = min(begin_s for begin_s, _ in spans)
    until_s = sorted(ends)[int(0.9 * (len(ends) - 1))]
    taken_s = sum(max(0.0, min(end_s, until_s) - begin_s) for begin_s, end_s in spans)
    return taken_s / (places * (until_s - first_s))


def scheduling(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Asynchronous against lock-step and against an ideal scheduler."""
    num, median_s = max(16, round(128 * pace.part)), 0.1
    gains, shares, capacities = [], [], []
    with served(median_s) as url:
        for number in range(max(1, round(pace.rounds * 0.3))):
            results = {}
            for mode in ("asynchronous", "lockstep"):
                config = config_for(
                    "benchmark-endless",
                    num,
                    f"llm.base_url={url}",
                    f"agent_proxy.rollout_mode={mode}",
                )
                results[mode] = played(config, 7 + number * 10_000)
            one, other = results["asynchronous"], results["lockstep"]
            gains.append(other.timings.wall_s / one.timings.wall_s)
            shares.append(ideal_s(model_times(one.trajectories), PLACES) / one.timings.wall_s)
            capacities.append(busy_share(one.trajectories, PLACES))
    name = f"{num} trajectories, {NUM_TURNS} turns, lognormal times (sigma 1.25), 32 in flight"
    return Outcome(
        [
            _line(f"{name}: asynchronous", "lock-step", 1.8, gains),
            _line(f"{name}: asynchronous", "ideal scheduler", 0.95, shares),
            _line("capacity kept busy until the last tenth", "", 0.95, capacities),
        ]
    )


def environments(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Steps of 50 ms of processor time must be hidden behind the model."""
    num, median_s = max(16, round(128 * pace.part)), 1.0 if pace.part == 1 else 0.1
    ratios = []
    with served(median_s) as url:
        here = config_for("benchmark-endless", num, f"llm.base_url={url}")
        away = config_for(
            "benchmark-busy",
            num,
            f"llm.base_url={url}",
            "agent_proxy.use_parallel_rollout=true",
            "agent_proxy.parallel_backend=fleet",
            "agent_proxy.parallel_n_jobs=2",
        )
        for number in range(max(1, round(pace.rounds * 0.1))):
            alone = played(here, 7 + number)
            busy = played(away, 7 + number)
            ratios.append(alone.timings.wall_s / busy.timings.wall_s)
    work = f"{num} trajectories, steps of 50 ms of processor time in 2 workers"
    return Outcome([_line(work, "the model alone", 0.95, ratios)])


def journal(pace: Pace, progress: Progress, title: str) -> Outcome:
    """What the journal costs in a rollout with the embedded model."""
    config = load_config("mixed", ["agent_proxy.max_turn=2"])
    with (
        SharedLLMInferenceManager.from_config(config) as llm,
        ParallelRolloutManager(config, llm, mode="val") as manager,
        tempfile.TemporaryDirectory() as folder,
    ):
        timings = manager.rollout(folder=Path(folder) / "run").timings
    share = 100 * timings.journal_s / timings.wall_s
    target = Target(2.0, "%", is_ceiling=True)
    work = "journal, share of the time of a rollout with the embedded model"
    return Outcome([Line(work, "", target, (share,))])


def memory(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Ten thousand trajectories of 64 KB must not be held in memory."""
    num, letters = max(200, round(10_000 * pace.part)), "abcdefghijklmnopqrstuvwxyz "

    def long_answer(request: GenerateRequest, dice: random.Random) -> str:
        thought = "".join(dice.choices(letters, k=64)) * 500
        return f"<think>{thought}</think><answer>1</answer>"

    config = config_for("benchmark-endless", num, "agent_proxy.max_turn=1", "llm.max_tokens=100000")
    engine = ScriptedEngine(long_answer, max_concurrency=PLACES, tells_tokens=False)
    with (
        SharedLLMInferenceManager(engine) as llm,
        ParallelRolloutManager(config, llm) as manager,
        tempfile.TemporaryDirectory() as folder,
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = manager.rollout(seed=1, folder=folder)
        kept = sum(len(one.turns[0].generation.text) for one in result.trajectories)
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    target = Target(100.0, "MB", is_ceiling=True)
    work = f"memory for {num:,} trajectories of {2 * kept // num // 1000} KB, above the start"
    return Outcome([Line(work, "", target, (grown_mb,))])


def _line(work: str, against: str, bound: float, values: Sequence[float]) -> Line:
    return Line(work, against, Target(bound), (statistics.median(values),), (tuple(values),))


ASYNC_ROWS: dict[str, Row] = {
    "scheduling": scheduling,
    "environments": environments,
    "journal": journal,
    "memory": memory,
}
