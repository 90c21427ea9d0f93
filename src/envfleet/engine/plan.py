"""What runs where, if the caller leaves it open: the decision, and why, as one sentence.

`probe` measures. What is decided here depends on nothing but its numbers.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from envfleet.engine.machine import NO_CHILDREN, may_have_children, usable_cores
from envfleet.engine.options import Deadlines, EnvFn, StartMethod
from envfleet.engine.probe import (
    WAITING_SHARE,
    NativeSteps,
    NotMeasured,
    StepCost,
    measure,
    measure_native,
)
from envfleet.engine.worker import NativeFn

ROUND_TRIP_S = 120e-6
"""Waking workers, waiting for the slower one, being woken: per batch, on small virtual machines."""
THREAD_TRIP_S = 30e-6
MIN_GAIN = 1.15
"""Parallel work must promise this much: below it the promise is noise."""
MAX_WAITING_WORKERS = 32
JOINT_TRIP_S = 25e-6
"""The same where this process has a share of its own to step meanwhile: it need not be woken."""
JOINT_GAIN = 1.05
"""Less than `MIN_GAIN`, because the observations are copied in either case."""
OWN_SHARE, WORKER_SHARE = 4, 3
"""How this process shares slots with workers, each of which begins later, and copies as well."""
_NO_DEADLINES = Deadlines()
_NOT_FORK_SAFE = ("torch", "jax", "tensorflow", "pyglet.gl", "pyglet.window", "OpenGL.GL")
"""Modules that have threads of their own once they are used, or a connection to a display."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs where, and why, as one sentence."""

    backend: str
    start_method: StartMethod
    num_workers: int
    why: str
    num_here: int = 0
    """Slots that live in this process beside worker processes; it is then one of the workers."""

    def describe(self, num_envs: int) -> str:
        """The sentence that `envs.plan` shows."""
        count = f"{num_envs} environment{'s' if num_envs > 1 else ''}"
        if self.backend == "serial":
            where = "in this process"
        elif self.num_here:
            away = self._among_workers(num_envs - self.num_here, self.num_workers - 1)
            where = f"of which {self.num_here} in this process and the others {away}"
        else:
            where = self._among_workers(num_envs, self.num_workers)
        return f"{count} {where}: {self.why}."

    def _among_workers(self, num_envs: int, num_workers: int) -> str:
        many = num_workers > 1
        if self.backend == "thread":
            kind = "threads" if many else "thread"
        elif self.backend != "process":
            kind = f"{'processes' if many else 'process'} ({self.backend})"
        else:
            kind = f"{'processes' if many else 'process'} ({self.start_method})"
        return f"in {num_workers} worker {kind}, up to {-(-num_envs // num_workers)} each"


def choose_start_method(asked: StartMethod | None) -> StartMethod:
    """Fork where it is safe, because it is fast and needs no guard; else forkserver, else spawn."""
    available = multiprocessing.get_all_start_methods()
    if asked is not None:
        return asked
    threads = threading.active_count() > 1
    if "fork" in available and sys.platform == "linux" and not threads:
        if not any(name in sys.modules for name in _NOT_FORK_SAFE):
            return "fork"
    return "forkserver" if "forkserver" in available else "spawn"


def decide(
    num_envs: int,
    cores: int,
    measured: StepCost,
    start_method: StartMethod,
    *,
    may_be_serial: bool,
    min_gain: float = MIN_GAIN,
) -> Plan:
    """The fastest of serial, threads and processes by what was measured."""
    step_s = measured.step_s
    serial_s = num_envs * step_s
    workers = min(cores, num_envs)
    process_s = -(-num_envs // workers) * step_s + ROUND_TRIP_S
    took = f"one step takes {_micros(step_s)}"
    if measured.cpu_share < WAITING_SHARE:
        waiting = min(num_envs, MAX_WAITING_WORKERS)
        thread_s = -(-num_envs // waiting) * step_s + THREAD_TRIP_S
        if thread_s * min_gain < min(serial_s, process_s):
            why = (
                f"{took} and waits for {1 - measured.cpu_share:.0%} of it, so threads that wait "
                f"side by "
                f"side are {serial_s / thread_s:.1f} times as fast as one"
            )
            return Plan("thread", start_method, waiting, why)
    if process_s * min_gain < serial_s or not may_be_serial:
        gain = serial_s / process_s
        if not may_be_serial and process_s * min_gain >= serial_s:
            why = f"{took}, which does not pay for processes, but only they can be supervised"
        else:
            why = f"{took}, so {workers} of {cores} cores promise {gain:.1f} times the speed of one"
        return Plan("process", start_method, workers, why)
    why = (
        f"{took}, and a round trip to workers takes {_micros(ROUND_TRIP_S)}, so they would not pay"
    )
    return Plan("serial", start_method, 1, why)


def own_share(num_envs: int, workers: int) -> int:
    """How many slots this process takes where it is one of the workers."""
    share = num_envs * OWN_SHARE // (OWN_SHARE + WORKER_SHARE * (workers - 1))
    return min(max(share, 1), num_envs - (workers - 1))


def decide_native(
    num_envs: int,
    workers: int,
    step_s: NativeSteps,
    start_method: StartMethod,
    *,
    may_be_serial: bool,
) -> Plan:
    """One instance here, or one for each worker: vectorised work does not halve with its size.

    Where nothing must be supervised this process is one of the workers: it would only wait.
    """
    whole_s, share_s = step_s
    took = f"a step of all takes {_micros(whole_s)}"
    if may_be_serial:
        num_here = own_share(num_envs, workers)
        took = f"{took}, of {num_here} of them {_micros(share_s)}"
        if (share_s + JOINT_TRIP_S) * JOINT_GAIN < whole_s:
            return Plan("process", start_method, workers, f"{took}, so sharing pays", num_here)
        why = f"{took}, and sharing {_micros(JOINT_TRIP_S)}, so it would not pay"
        return Plan("serial", start_method, 1, why)
    took = f"{took}, of one of {workers} shares {_micros(share_s)}"
    why = f"{took}, so one natively vectorised environment in each worker pays"
    if (share_s + ROUND_TRIP_S) * MIN_GAIN >= whole_s:
        why = f"{took}, which does not pay for processes, but only they can be supervised"
    return Plan("process", start_method, workers, why)


def plan_without_children(start_method: StartMethod, num_threads: int | None) -> Plan:
    """Threads, or with None this thread, where other processes may not be started."""
    if num_threads is None:
        return Plan("serial", start_method, 1, NO_CHILDREN)
    return Plan("thread", start_method, num_threads, NO_CHILDREN)


def plan_fleet(
    env_fns: Sequence[EnvFn],
    start_method: StartMethod,
    *,
    may_be_serial: bool,
    min_gain: float = MIN_GAIN,
    deadlines: Deadlines = _NO_DEADLINES,
) -> Plan:
    """Measure and decide for these environments on this machine.

    Args:
        env_fns: The functions that build them.
        start_method: How worker processes are started.
        may_be_serial: Whether the environments may run in this process.
        min_gain: How many times as fast workers must promise to be.
        deadlines: They hold for each step and reset that is measured, too.
    """
    cores, num_envs, first = usable_cores(), len(env_fns), env_fns[0]
    if not may_have_children():
        return plan_without_children(start_method, None if may_be_serial else min(cores, num_envs))
    is_native = isinstance(first, NativeFn)
    workers = min(cores, num_envs)
    if may_be_serial:
        if is_native and workers == 1:
            return Plan("serial", start_method, 1, "a natively vectorised environment on one core")
        if not is_native and num_envs == 1:
            return Plan("serial", start_method, 1, "there is nothing to run beside it")
        if not is_native and cores == 1:
            return Plan("serial", start_method, 1, "there is one core to use")
    try:
        if isinstance(first, NativeFn):
            share = own_share(num_envs, workers) if may_be_serial else -(-num_envs // workers)
            step_s = measure_native(first, (num_envs, share), start_method, deadlines)
            return decide_native(
                num_envs, workers, step_s, start_method, may_be_serial=may_be_serial
            )
        cost = measure(first, start_method, deadlines)
        if cost.why_alone and num_envs > 1:
            return Plan("process", start_method, num_envs, cost.why_alone)
    except NotMeasured as exc:  # what becomes of the environment is decided by `on_failure`
        is_waiting = exc.is_waiting and not is_native
        workers = min(MAX_WAITING_WORKERS if is_waiting else cores, num_envs)
        return Plan("process", start_method, workers, exc.why)
    return decide(
        num_envs, cores, cost, start_method, may_be_serial=may_be_serial, min_gain=min_gain
    )


def _micros(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
