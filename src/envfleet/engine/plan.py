"""What runs where, when the caller leaves it open: measure briefly, decide, and say why.

The measurement runs in a worker process, so an environment that crashes or hangs does it there, and
by the caller's deadlines. The decision is a pure function of numbers.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from envfleet.engine.machine import usable_cores
from envfleet.engine.options import Deadlines, EnvFn, ResetPlan, StartMethod
from envfleet.engine.worker import NativeFn
from envfleet.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvConstructionFailed,
    EnvFailed,
    WorkerDied,
    describe_exit,
)

if TYPE_CHECKING:
    from envfleet.engine.fleet import Fleet

PROBE_S = 0.05
"""How long the environment is stepped to learn what a step takes."""
LONG_S = 1.0
"""Whoever has measured for this long knows enough, by however few steps."""
STEP_LIMIT_S = 5.0
"""A step that takes longer is not waited for: it is slow, whatever it takes."""
RESET_LIMIT_S = 30.0
"""The same of a reset. Longer, because it may be starting a simulator, which would be left behind
by a process that is ended halfway."""
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
_NO_DEADLINES = Deadlines()
_NOT_FORK_SAFE = ("torch", "jax", "tensorflow")


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
    deadlines: Deadlines = _NO_DEADLINES,
) -> Plan:
    """Measure and decide for these environments on this machine.

    Args:
        env_fns: What builds them.
        start_method: Of worker processes.
        may_be_serial: Whether this process will do.
        min_gain: How many times as fast workers must promise to be.
        deadlines: For each step and reset that is measured too.
    """
    try:
        return _measured_plan(
            env_fns,
            start_method,
            may_be_serial=may_be_serial,
            min_gain=min_gain,
            deadlines=deadlines,
        )
    except _Unmeasured as exc:  # what becomes of it is for the fleet to say, by `on_failure`
        is_waiting = exc.is_waiting and not isinstance(env_fns[0], NativeFn)
        workers = MAX_WAITING_WORKERS if is_waiting else usable_cores()
        return Plan("process", start_method, min(workers, len(env_fns)), exc.why)


class _Unmeasured(Exception):
    """An environment showed what it is like before anything could be measured: it needs workers."""

    def __init__(self, why: str, *, is_waiting: bool = False) -> None:
        super().__init__(why, is_waiting)
        self.why, self.is_waiting = why, is_waiting


def _measured_plan(
    env_fns: Sequence[EnvFn],
    start_method: StartMethod,
    *,
    may_be_serial: bool,
    min_gain: float,
    deadlines: Deadlines,
) -> Plan:
    cores = usable_cores()
    num_envs = len(env_fns)
    first = env_fns[0]
    if isinstance(first, NativeFn):
        workers = min(cores, num_envs)
        if workers == 1 and may_be_serial:
            return Plan("serial", start_method, 1, "a natively vectorised environment on one core")
        share = own_share(num_envs, workers) if may_be_serial else -(-num_envs // workers)
        sizes = num_envs, share
        probe = partial(_NativeProbe, first, sizes, _slice_s(deadlines))
        step_s = cast(NativeSteps, _ask(probe, start_method, deadlines))
        return decide_native(num_envs, workers, step_s, start_method, may_be_serial=may_be_serial)
    if num_envs == 1 and may_be_serial:
        return Plan("serial", start_method, 1, "there is nothing to run beside it")
    if cores == 1 and may_be_serial:
        return Plan("serial", start_method, 1, "there is one core to use")
    measured = measure(first, start_method, deadlines)
    return decide(
        num_envs, cores, measured, start_method, may_be_serial=may_be_serial, min_gain=min_gain
    )


def measure(
    env_fn: EnvFn, start_method: StartMethod, deadlines: Deadlines = _NO_DEADLINES
) -> Measured:
    """Step one environment in a worker process for a moment."""
    probe = partial(_Probe, env_fn, _slice_s(deadlines))
    return cast(Measured, _ask(probe, start_method, deadlines))


def _slice_s(deadlines: Deadlines) -> float | None:
    """How long a probe may go on stepping until it answers; None where nobody is in a hurry."""
    if deadlines.step_s is None:
        return None if deadlines.reset_s is None else PROBE_S
    return min(PROBE_S, deadlines.step_s / 4)


def _ask(probe: EnvFn, start_method: StartMethod, deadlines: Deadlines) -> Any:
    """What a probe measured, in a worker: what crashes or never returns must not do it here."""
    from envfleet.engine.fleet import Fleet

    limits = replace(
        deadlines,
        reset_s=min(deadlines.reset_s or math.inf, RESET_LIMIT_S),
        start_s=max(deadlines.start_s, deadlines.reset_s or 0.0),
    )
    fleet = Fleet(
        [probe],
        backend="process",
        start_method=start_method,
        autoreset="disabled",
        deadlines=limits,
    )
    try:
        return _result_of(fleet)
    except DeadlineExceeded as exc:
        if exc.seconds in (deadlines.step_s, deadlines.reset_s):
            passed = f"{exc.doing} passed {exc.option}={exc.seconds:g} at once"
            raise _Unmeasured(f"{passed}, so it must be supervised") from exc
        raise _Unmeasured(f"one {exc.doing} takes more than {exc.seconds:g} s") from exc
    except WorkerDied as exc:
        died = f"its process died during {exc.doing} ({describe_exit(exc.exitcode)})"
        raise _Unmeasured(f"{died} when it was measured, so it must be supervised") from exc
    except EnvFailed as exc:  # to whoever opens a fleet it is all one: it cannot be used
        failed = EnvConstructionFailed(exc.slot, exc.reason, doing=exc.doing)
        failed.__cause__ = exc.__cause__
    finally:
        fleet.close()
    raise failed


def _result_of(fleet: Fleet) -> Any:
    """Let a probe go on until it knows."""
    from envfleet.engine.backends.process.handle import state_of

    (pid,) = fleet.worker_pids()
    fleet.reset([ResetPlan()])
    while True:
        begun_s = _cpu_s(pid)
        fleet.send(np.zeros(1, np.int64))
        batch = fleet.recv(timeout_s=STEP_LIMIT_S)
        if not len(batch.slots):
            took = f"one step takes more than {STEP_LIMIT_S:g} s"
            # on a busy machine who gets little of it need not be waiting
            if _cpu_s(pid) - begun_s < STEP_LIMIT_S * WAITING_SHARE and state_of(pid) != "R":
                took = f"{took}, in which it waits"
                raise _Unmeasured(f"{took}, so they wait side by side", is_waiting=True)
            raise _Unmeasured(took)
        if batch.truncated[0]:
            (result,) = fleet.call("result")
            if isinstance(result, str):
                raise _Unmeasured(result)
            return result
        if batch.terminated[0]:
            fleet.reset([ResetPlan()])


def _cpu_s(pid: int | None) -> float:
    """How long another process has used processors; not a number where nobody can tell."""
    try:
        return time.clock_gettime((~(pid or 0) << 3) | 2)  # as clock_getcpuclockid(3) makes it
    except OSError:
        return math.nan


class _Refused(Exception):
    """An environment did not like a random action, or a reset without options."""


class _Probe(gymnasium.Env[Any, Any]):
    """Steps another environment, for a slice of time by each of its own steps.

    Its step is terminated where it is to be reset, with the other, and truncated once `result` is
    known. Without slices it resets the other by itself, if that is quick: going to and fro would
    count.
    """

    observation_space = spaces.Discrete(1)
    action_space = spaces.Discrete(1)

    def __init__(self, env_fn: EnvFn, slice_s: float | None) -> None:
        env = env_fn()
        self.result: Measured | str = "a function that builds a VectorEnv is not measured"
        """What was measured, or why nothing was."""
        self._slice_s, self._clock, self._resets, self._steps = slice_s, _Clock(), 0, 0
        self._is_warm = self._is_refused = False
        self._env: gymnasium.Env[Any, Any] | None = None
        if isinstance(env, VectorEnv):
            env.close()
            return
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"the function returned {type(env).__name__}, not a gymnasium.Env")
        self._env = env
        env.action_space.seed(0)
        self._actions = [env.action_space.sample() for _ in range(64)]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self._resets += 1
        with contextlib.suppress(_Refused):
            if self._resets > 2:
                with self._clock:
                    self._reset()
            elif self._env is not None:
                begun_s = time.perf_counter()
                self._reset(seed=0)
                self._reset_s = time.perf_counter() - begun_s
                if self._reset_s > PROBE_S and self._slice_s is None:
                    self._slice_s = PROBE_S
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self._env is None or self._is_refused:
            return 0, 0.0, False, True, {}
        try:
            return 0, 0.0, *self._measure(), {}
        except _Refused:
            return 0, 0.0, False, True, {}

    def _measure(self) -> tuple[bool, bool]:
        """Go on for a while: whether the other is to be reset, and whether all is known."""
        if not self._is_warm:  # the first step often builds caches, and counts for nothing
            self._is_warm = True
            with self._clock:
                has_ended = self._step()
            if self._clock.spent_s < LONG_S:
                self._clock, self._steps = _Clock(), 0
                return has_ended or self._reset_s < LONG_S, False
        has_ended = False
        if not self._is_known:
            with self._clock:
                has_ended = self._play()
        if has_ended or not self._is_known:  # the reset behind an end counts too
            return has_ended, False
        self.result = self._clock.shared_by(self._steps)
        return False, True

    @property
    def _is_known(self) -> bool:
        spent_s = self._clock.spent_s
        return spent_s >= PROBE_S and (self._steps >= 3 or spent_s >= LONG_S)

    def _play(self) -> bool:
        """Step until time is up or the other has to be reset; whether it has."""
        until_s = time.perf_counter() + (self._slice_s or PROBE_S)
        while time.perf_counter() < until_s:
            if self._step():
                if self._slice_s is not None:
                    return True
                self._reset()
        return False

    def _step(self) -> bool:
        assert self._env is not None
        try:
            answer = self._env.step(self._actions[self._steps % 64])
        except BaseException as exc:  # Ctrl-C does not come to workers: this one is its own
            raise self._refuse("step", exc) from exc
        self._steps += 1
        _, _, terminated, truncated, _ = answer
        return bool(terminated or truncated)

    def _reset(self, **seed: Any) -> None:
        assert self._env is not None
        try:
            self._env.reset(**seed)
        except BaseException as exc:
            raise self._refuse("reset", exc) from exc

    def _refuse(self, doing: str, exc: BaseException) -> _Refused:
        text = " ".join(f"{type(exc).__name__}: {exc}".split())[:200]
        self.result, self._is_refused = f"{doing} raised {text!r} when it was measured", True
        return _Refused()

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


class _Clock:
    """What is spent while it is entered, added up."""

    def __init__(self) -> None:
        self.spent_s = self._cpu_s = 0.0
        self._waits = 0

    def __enter__(self) -> None:
        self._begun = time.perf_counter(), time.thread_time(), _waits()

    def __exit__(self, *exc_info: object) -> None:
        spent_s, cpu_s, waits = self._begun
        self.spent_s += time.perf_counter() - spent_s
        self._cpu_s += time.thread_time() - cpu_s
        self._waits += _waits() - waits

    def shared_by(self, steps: int) -> Measured:
        """What each of so many steps took."""
        # on a busy machine a step takes longer than it needs: only one that gave up the processor
        # by itself was waiting, one that lost it to others was not
        if self._waits > steps / 4 and self._cpu_s < self.spent_s:
            return Measured(self.spent_s / steps, self._cpu_s / self.spent_s)
        return Measured(self._cpu_s / steps, 1.0)


class _NativeProbe(gymnasium.Env[Any, Any]):
    """Steps natively vectorised instances of several sizes, as a `_Probe` does.

    The shortest of some steps of each counts: whatever else the machine does only lengthens them.
    They take turns, so that a while in which it does much counts for all of them; those that cannot
    be there at the same time come one after another, as episodes of this one.
    """

    observation_space = spaces.Discrete(1)
    action_space = spaces.Discrete(1)

    def __init__(self, env_fn: NativeFn, sizes: Sequence[int], slice_s: float | None) -> None:
        self._env_fn, self._slice_s = env_fn, slice_s or PROBE_S
        self._left: list[Sequence[int]] = [sizes]
        self._envs: list[VectorEnv] = []
        self.result: tuple[float, ...] = ()
        try:
            self._build(sizes)
        except Exception:  # perhaps there may only be one at a time
            if not self._envs:
                raise
            self.close()
            self._left = [[size] for size in sizes]

    def _build(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._envs.append(self._env_fn.build(size))

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        if not self._envs:
            self._build(self._left[0])
        for env in self._envs:
            env.action_space.seed(0)
            env.reset(seed=0)
        self._actions = [[env.action_space.sample() for _ in range(8)] for env in self._envs]
        self._shortest_s, self._turn, self._spent_s = [math.inf] * len(self._envs), 0, 0.0
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        begun_s = now_s = time.perf_counter()
        while now_s - begun_s < self._slice_s:
            rounds, index = divmod(self._turn, len(self._envs))
            started_s = time.perf_counter()
            self._envs[index].step(self._actions[index][rounds % 8])
            now_s = time.perf_counter()
            self._shortest_s[index] = min(self._shortest_s[index], now_s - started_s)
            self._turn += 1
        self._spent_s += now_s - begun_s
        count = len(self._envs)
        rounds = 1 if self._spent_s >= LONG_S else 3
        is_known = self._spent_s >= PROBE_S * count and self._turn >= rounds * count
        if is_known:
            self.result += tuple(self._shortest_s)
            self.close()
            del self._left[0]
        return 0, 0.0, is_known, not self._left, {}

    def close(self) -> None:
        while self._envs:
            self._envs.pop().close()


def _waits() -> int:
    """How often this thread has given up the processor by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _micros(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
