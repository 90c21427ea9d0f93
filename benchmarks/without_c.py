"""A contender that runs envfleet without its compiled parts.

The choice between C and Python is made when envfleet is imported, so this contender has its own
interpreter, started with ENVFLEET_NO_C=1. It opens the fleet there and runs a slice whenever the
benchmark asks for one. Between slices it blocks on a pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.contenders import FleetStep
from benchmarks.limit import ANSWER_S
from benchmarks.workload import Workload
from envfleet.cli.measure import Slice
from envfleet.engine.rows import IS_COMPILED

VARIABLE = "ENVFLEET_NO_C"


class FleetWithoutC:
    """envfleet in Python alone: all slots by one `step`."""

    key, label = "without_c", "envfleet, step, without the C parts"

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def open(self) -> None:
        """Start the interpreter, and the fleet in it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        # a copy, because cached functions of the original may not pickle
        process = context.Process(target=_serve, args=(there, replace(self._work)))
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "1"
        try:
            process.start()
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
            there.close()
        self._process = process
        if self._hear(ANSWER_S):
            raise RuntimeError(f"envfleet loaded its C parts in spite of {VARIABLE}=1")

    def run(self, seconds: float) -> Slice:
        """Ask for a slice."""
        assert self._pipe is not None
        self._pipe.send(seconds)
        measured = self._hear(seconds + ANSWER_S)
        assert isinstance(measured, Slice)
        return measured

    def close(self) -> None:
        """End the interpreter."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._pipe.close()
        if self._process is not None:
            self._process.join(10)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def _hear(self, limit_s: float) -> Any:
        assert self._pipe is not None
        if not self._pipe.poll(limit_s):
            raise TimeoutError(f"the interpreter without C did not answer for {limit_s:g} s")
        return self._pipe.recv()


def _serve(pipe: Connection, work: Workload) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with closing(FleetStep(work, num_workers=work.num_workers)) as fleet:
        fleet.open()
        pipe.send(IS_COMPILED)
        with contextlib.suppress(EOFError):  # the benchmark has ended
            while (seconds := pipe.recv()) is not None:
                pipe.send(fleet.run(seconds))
