"""The limit: as many processes as envfleet has workers, each stepping its environments in a loop.

    parent ── how many passes ──► process   warms up
           ◄── armed ────────────
           ── go ────────────────►          steps its environments with prepared actions
           ◄── start, end ───────

Between the first step and the last, a process receives no action, keeps no observation and reads no
clock. The rate is the number of all steps over the time from the first start to the last end, so
the slower process counts. An ended episode is reset in the next pass, and that counts as a step, as
in the next-step mode of every vector environment. So the environments do the same work per counted
step. (A fleet in same-step mode resets without counting a step, so it does slightly more work per
counted step than the limit.) Between slices the processes block on a pipe.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.workload import WARM_SHARE, Workload
from envfleet.cli.measure import Slice
from envfleet.engine.slots import deal

_GO, _STOP = -1, 0
ANSWER_S = 120.0
"""How long a process may take to answer, beyond the slice itself."""


class Limit:
    """The environments in `num_workers` processes that exchange nothing."""

    key = "limit"

    def __init__(self, work: Workload) -> None:
        self._work = work
        self.label = f"the limit: {work.num_workers} processes, no communication"
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._passes_per_s = 0.0

    def open(self) -> None:
        """Start the processes and measure their speed."""
        # the start method of all other contenders
        context = multiprocessing.get_context("fork")
        for first, end in deal(self._work.num_envs, self._work.num_workers):
            here, there = context.Pipe()
            process = context.Process(
                target=_loop, args=(there, self._work, first, end), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._run(20)
        passes, elapsed_s = self._run(50)
        self._passes_per_s = passes / elapsed_s

    def run(self, seconds: float) -> Slice:
        """Let all processes make as many passes as take about `seconds`."""
        passes, elapsed_s = self._run(max(1, round(self._passes_per_s * seconds)))
        self._passes_per_s = passes / elapsed_s
        return Slice(passes * self._work.num_envs, elapsed_s)

    def close(self) -> None:
        """Stop the processes."""
        # send a message: closing the pipe is not enough, because processes forked later hold copies
        with contextlib.suppress(OSError):
            self._tell(_STOP)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def _run(self, passes: int) -> tuple[int, float]:
        self._tell(passes)
        self._hear()
        self._tell(_GO)
        times = self._hear()
        return passes, max(end for _, end in times) - min(start for start, _ in times)

    def _tell(self, message: int) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _hear(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_S):
                raise TimeoutError(f"a process of the limit did not answer for {ANSWER_S:g} s")
            answers.append(pipe.recv())
        return answers


def _loop(pipe: Connection, work: Workload, first: int, end: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    envs = [env_fn() for env_fn in work.env_fns[first:end]]
    for slot, env in enumerate(envs, first):
        env.reset(seed=work.seed + slot)
    batches = work.single_actions(first, end)
    has_ended = [False] * len(envs)
    gc.collect()
    gc.freeze()  # envfleet's workers do so too
    steps, resets = [env.step for env in envs], [env.reset for env in envs]

    def run(passes: int) -> None:
        for number in range(passes):
            actions = batches[number % len(batches)]
            for index, step in enumerate(steps):
                if has_ended[index]:
                    resets[index]()
                    has_ended[index] = False
                    continue
                _, _, terminated, truncated, _ = step(actions[index])
                if terminated or truncated:
                    has_ended[index] = True

    while (passes := pipe.recv()) != _STOP:
        run(round(passes * WARM_SHARE) + 1)
        pipe.send("armed")
        pipe.recv()
        start_s = time.perf_counter()
        run(passes)
        pipe.send((start_s, time.perf_counter()))
    for env in envs:
        env.close()
