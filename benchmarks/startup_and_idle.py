"""Contenders that measure start-up time, memory, and processor time while the policy computes.

They run in the same interleaved rounds as the others. What they measure besides the duration of a
slice is kept in a list, with one item per round.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
from gymnasium.vector import AsyncVectorEnv

import envfleet
from benchmarks.workload import ActionPool, Workload
from envfleet.cli.measure import Slice


class Start:
    """Builds and resets environments in spawned processes, once per round."""

    def __init__(self, key: str, label: str, work: Workload, build: Callable[[], Any]) -> None:
        self.key, self.label, self._work, self._build = key, label, work, build
        self.children_bytes: list[int] = []
        """Memory of all child processes after the reset, in each round."""

    def open(self) -> None:
        """Open nothing yet: `run` measures the opening."""
        # the first spawn starts it and it stays, so count it for every contender
        resource_tracker.ensure_running()

    def run(self, seconds: float) -> Slice:
        """Start, reset, measure the memory, stop."""
        start_s = time.perf_counter()
        with closing(self._build()) as envs:
            envs.reset(seed=self._work.seed)
            elapsed_s = time.perf_counter() - start_s
            self.children_bytes.append(memory_of_children())
        return Slice(self._work.num_envs, elapsed_s)

    def close(self) -> None:
        """Nothing is left open."""


def fleet_start(work: Workload) -> Start:
    """envfleet under spawn."""

    def build() -> envfleet.FleetVectorEnv:
        return envfleet.make_vec(
            work.env,
            work.num_envs,
            num_workers=work.num_workers,
            backend="process",
            start_method="spawn",
        )

    return Start("envfleet", f"envfleet, {work.num_workers} workers", work, build)


def async_start(work: Workload) -> Start:
    """Gymnasium's AsyncVectorEnv under spawn."""

    def build() -> AsyncVectorEnv:
        return AsyncVectorEnv(work.env_fns, context="spawn")

    return Start("async", "Gymnasium AsyncVectorEnv", work, build)


def memory_of_children() -> int:
    """Memory of all descendants in bytes. A page shared by n processes counts 1/n in each (PSS)."""
    return sum(_pss(child) for child in psutil.Process().children(recursive=True))


def own_memory() -> int:
    """Memory of this process in bytes, counted in the same way."""
    return _pss(psutil.Process())


def _pss(process: psutil.Process) -> int:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
    try:
        match = re.search(r"^Pss:\s+(\d+) kB$", rollup.read_text(), re.MULTILINE)
        assert match is not None
        return int(match.group(1)) * 1024
    except OSError:  # not Linux, or the process has just ended
        try:
            return int(process.memory_full_info().uss)
        except psutil.NoSuchProcess:
            return 0


class Thinking:
    """A policy that pauses between steps: how much processor time do the workers use meanwhile?"""

    key = "thinking"

    def __init__(self, work: Workload, think_s: float) -> None:
        self._work, self._think_s = work, think_s
        self.label = f"envfleet, step, then a pause of {think_s * 1e3:.0f} ms"
        self._pool = ActionPool(work)
        self._envs: envfleet.FleetVectorEnv | None = None
        self.percents_of_a_core: list[float] = []
        """Processor time of all workers together, in percent of the time that passed."""

    def open(self) -> None:
        """Start and reset."""
        self._envs = envfleet.make_vec(
            self._work.env,
            self._work.num_envs,
            num_workers=self._work.num_workers,
            backend="process",
            start_method="fork",
        )
        self._envs.reset(seed=self._work.seed)

    def run(self, seconds: float) -> Slice:
        """Step and pause in turn."""
        assert self._envs is not None
        workers = psutil.Process().children()
        steps, start_s, before_s = 0, time.perf_counter(), _processor_s(workers)
        while (elapsed_s := time.perf_counter() - start_s) < seconds:
            self._envs.step(self._pool.next(self._work.num_envs))
            time.sleep(self._think_s)
            steps += self._work.num_envs
        self.percents_of_a_core.append(100 * (_processor_s(workers) - before_s) / elapsed_s)
        return Slice(steps, elapsed_s)

    def close(self) -> None:
        """Close."""
        if self._envs is not None:
            self._envs.close()


def _processor_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)
