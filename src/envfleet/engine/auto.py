"""What runs where, when the caller leaves it open: measure briefly, decide, and say why.

The measurement runs in a worker process, so an environment that crashes or hangs does it there. The
decision is a pure function of numbers.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gymnasium
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from envfleet.engine.machine import usable_cores
from envfleet.engine.options import BackendName, Deadlines, EnvFn, StartMethod
from envfleet.engine.servant import NativeFn
from envfleet.errors import ConfigError

PROBE_S = 0.05
"""How long the environment is stepped to learn what a step takes."""
ROUND_TRIP_S = 120e-6
"""Waking workers, waiting for the slower one, being woken: per batch, on small virtual machines."""
THREAD_TRIP_S = 30e-6
MIN_GAIN = 1.15
"""Parallel work must promise this much: below it the promise is noise."""
MAX_WAITING_WORKERS = 32
WAITING_SHARE = 0.5
"""An environment that uses the processor for less than this share of its time is mostly waiting."""
JOINT_TRIP_S = 25e-6
"""The same where this process has a share of its own to step meanwhile: it need not be woken."""
JOINT_GAIN = 1.05
"""Less than `MIN_GAIN`: what is copied is copied in either case."""
OWN_SHARE, WORKER_SHARE = 4, 3
"""How this process shares slots with workers, each of which begins later, and copies as well."""
NativeSteps = tuple[float, float]
"""Seconds of a step of one instance: for all slots, and for the share of whoever has most."""
_NOT_FORK_SAFE = ("torch", "jax", "tensorflow")


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs where, and why, as one sentence."""

    backend: BackendName
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
        else:
            kind = f"{'processes' if many else 'process'} ({self.start_method})"
        return f"in {num_workers} worker {kind}, up to {-(-num_envs // num_workers)} each"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step of the environment costs."""

    step_s: float
    cpu_share: float


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
    measured: Measured,
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


def plan_fleet(
    env_fns: Sequence[EnvFn],
    start_method: StartMethod,
    *,
    may_be_serial: bool,
    min_gain: float = MIN_GAIN,
) -> Plan:
    """Measure and decide for these environments on this machine.

    Args:
        env_fns: What builds them.
        start_method: Of worker processes.
        may_be_serial: Whether this process will do.
        min_gain: How many times as fast workers must promise to be.
    """
    cores = usable_cores()
    num_envs = len(env_fns)
    first = env_fns[0]
    if isinstance(first, NativeFn):
        workers = min(cores, num_envs)
        if workers == 1 and may_be_serial:
            return Plan("serial", start_method, 1, "a natively vectorised environment on one core")
        share = own_share(num_envs, workers) if may_be_serial else -(-num_envs // workers)
        sizes = num_envs, share
        step_s = cast(NativeSteps, _ask(partial(_NativeProbe, first, sizes), start_method))
        return decide_native(num_envs, workers, step_s, start_method, may_be_serial=may_be_serial)
    if num_envs == 1 and may_be_serial:
        return Plan("serial", start_method, 1, "there is nothing to run beside it")
    if cores == 1 and may_be_serial:
        return Plan("serial", start_method, 1, "there is one core to use")
    measured = measure(env_fns[0], start_method)
    return decide(
        num_envs, cores, measured, start_method, may_be_serial=may_be_serial, min_gain=min_gain
    )


def measure(env_fn: EnvFn, start_method: StartMethod) -> Measured:
    """Step one environment in a worker process for a moment."""
    return cast(Measured, _ask(partial(_Probe, env_fn), start_method))


def _ask(probe: EnvFn, start_method: StartMethod) -> Any:
    """What a probe measured, in a worker: what crashes or never returns must not do it here."""
    from envfleet.engine.fleet import Fleet

    fleet = Fleet(
        [probe], backend="process", start_method=start_method, deadlines=Deadlines(reset_s=60.0)
    )
    try:
        (result,) = fleet.call("result")
        return result
    finally:
        fleet.close()


class _Probe(gymnasium.Env[Any, Any]):
    """Measures another environment when it is built; its worker reports the result."""

    observation_space = spaces.Discrete(1)
    action_space = spaces.Discrete(1)

    def __init__(self, env_fn: EnvFn) -> None:
        env = env_fn()
        if isinstance(env, gymnasium.vector.VectorEnv):
            env.close()
            self.result = Measured(1.0, 1.0)
            return
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"the function returned {type(env).__name__}, not a gymnasium.Env")
        try:
            self.result = _timed(env)
        except _Refused:
            self.result = Measured(1.0, 1.0)
        env.close()


class _Refused(Exception):
    """An environment did not like an action drawn at random; whoever uses it knows better ones."""


def _step(env: gymnasium.Env[Any, Any], action: Any) -> Any:
    try:
        return env.step(action)
    except Exception as exc:
        raise _Refused from exc


def _timed(env: gymnasium.Env[Any, Any]) -> Measured:
    env.action_space.seed(0)
    env.reset(seed=0)
    _step(env, env.action_space.sample())  # the first step often builds caches
    actions = [env.action_space.sample() for _ in range(64)]
    env.reset(seed=0)
    steps = 0
    started_s, started_cpu_s, started_waits = time.perf_counter(), time.thread_time(), _waits()
    while (spent_s := time.perf_counter() - started_s) < PROBE_S or steps < 3:
        _, _, terminated, truncated, _ = _step(env, actions[steps % 64])
        steps += 1
        if terminated or truncated:
            env.reset()
    cpu_s, waits = time.thread_time() - started_cpu_s, _waits() - started_waits
    # on a busy machine a step takes longer than it needs: only one that gave up the processor by
    # itself was waiting, one that lost it to others was not
    if waits > steps / 4 and cpu_s < spent_s:
        return Measured(spent_s / steps, cpu_s / spent_s)
    return Measured(cpu_s / steps, 1.0)


class _NativeProbe(gymnasium.Env[Any, Any]):
    """Measures natively vectorised instances of several sizes when it is built."""

    observation_space = spaces.Discrete(1)
    action_space = spaces.Discrete(1)

    def __init__(self, env_fn: NativeFn, sizes: Sequence[int]) -> None:
        self._env_fn = env_fn
        with ExitStack() as undo:
            envs: list[VectorEnv] = []
            try:
                for size in sizes:
                    envs.append(env_fn.build(size))
                    undo.callback(envs[-1].close)
            except Exception:  # perhaps there may only be one at a time
                if not envs:
                    raise
                undo.close()
                envs = []
            self.result = _steps_s(envs) if envs else tuple(map(self._alone, sizes))

    def _alone(self, size: int) -> float:
        env = self._env_fn.build(size)
        try:
            return _steps_s([env])[0]
        finally:
            env.close()


def _steps_s(envs: Sequence[VectorEnv]) -> tuple[float, ...]:
    """The shortest of some steps of each: whatever else the machine does only lengthens them.

    They take turns, so that a while in which it does much counts for all of them.
    """
    for env in envs:
        env.action_space.seed(0)
        env.reset(seed=0)
    actions = [[env.action_space.sample() for _ in range(8)] for env in envs]
    shortest_s, rounds, started_s = [math.inf] * len(envs), 0, time.perf_counter()
    while time.perf_counter() - started_s < PROBE_S * len(envs) or rounds < 3:
        for index, env in enumerate(envs):
            action = actions[index][rounds % 8]
            begun_s = time.perf_counter()
            env.step(action)
            shortest_s[index] = min(shortest_s[index], time.perf_counter() - begun_s)
        rounds += 1
    return tuple(shortest_s)


def _waits() -> int:
    """How often this thread has given up the processor by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _micros(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms"
