"""Measures what a step of an environment costs, in a worker process.

An environment that crashes or hangs does it there, and within the caller's deadlines.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

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
"""After this long the measurement ends, however few steps were made."""
STEP_LIMIT_S = 5.0
"""A step that takes longer is not waited for: it is slow in any case."""
RESET_LIMIT_S = 30.0
"""The same for a reset. Longer, because it may be starting a simulator, and a process that is ended
halfway would leave that behind."""
WAITING_SHARE = 0.5
"""An environment that uses the processor for less than this share of its time is mostly waiting."""
NativeSteps = tuple[float, float]
"""Seconds of a step of one instance: of all slots, and of the largest share."""
_SECOND_LIMIT_S = 0.5
"""A second environment is tried only where building the first took no longer."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step of an environment costs."""

    step_s: float
    cpu_share: float
    why_alone: str = ""
    """Why a process cannot hold two of these environments, if it cannot."""


class NotMeasured(Exception):
    """An environment failed, or was too slow, before it could be measured: it needs workers."""

    def __init__(self, why: str, *, is_waiting: bool = False) -> None:
        super().__init__(why, is_waiting)
        self.why, self.is_waiting = why, is_waiting


class Stretch(NamedTuple):
    """Some time of one thread."""

    wall_s: float
    cpu_s: float
    waits: int | None
    """How often the thread gave up the processor by itself; None where that is not counted."""

    @property
    def own_s(self) -> float:
        """The wall time, less what other programs had the processor for.

        A thread that never gave up the processor did not wait.
        """
        return self.cpu_s if self.waits == 0 else self.wall_s


class CpuClock:
    """Measures this thread while it is entered, stretch by stretch."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self.spent_s = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter(), time.thread_time(), _num_waits()

    def __exit__(self, *exc_info: object) -> None:
        wall_s, cpu_s, waits = self._begun
        now_waits = _num_waits()
        stretch = Stretch(
            time.perf_counter() - wall_s,
            time.thread_time() - cpu_s,
            None if waits is None or now_waits is None else now_waits - waits,
        )
        self.stretches.append(stretch)
        self.spent_s += stretch.wall_s

    def shared_by(self, steps: int) -> StepCost:
        """What each of so many steps cost."""
        cpu_s = sum(stretch.cpu_s for stretch in self.stretches)
        waits = sum(stretch.waits or 0 for stretch in self.stretches)
        # On a busy machine a step takes longer than it needs. Only a step that gave up the
        # processor by itself was waiting; one that lost it to other programs was not.
        if waits > steps / 4 and cpu_s < self.spent_s:
            return StepCost(self.spent_s / steps, cpu_s / self.spent_s)
        return StepCost(cpu_s / steps, 1.0)


def _num_waits() -> int | None:
    thread = getattr(resource, "RUSAGE_THREAD", None)
    return None if thread is None else resource.getrusage(thread).ru_nvcsw


def measure(env_fn: EnvFn, start_method: StartMethod, deadlines: Deadlines) -> StepCost:
    """Step one environment for a moment; `NotMeasured` if that is not possible."""
    probe = partial(_EnvProbe, env_fn, _slice_s(deadlines))
    return cast(StepCost, _ask(probe, start_method, deadlines))


def measure_native(
    env_fn: NativeFn, sizes: tuple[int, int], start_method: StartMethod, deadlines: Deadlines
) -> NativeSteps:
    """Step natively vectorised instances of these sizes for a moment."""
    probe = partial(_NativeProbe, env_fn, sizes, _slice_s(deadlines))
    return cast(NativeSteps, _ask(probe, start_method, deadlines))


def _slice_s(deadlines: Deadlines) -> float | None:
    """How long a probe may go on stepping until it answers; None without deadlines."""
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
        result = _result_of(fleet)
        closing_s = time.monotonic()
        fleet.close()
        if time.monotonic() - closing_s >= limits.close_s:
            took = f"it has not closed within {limits.close_s:g} s when it was measured"
            raise NotMeasured(f"{took}, so it must be supervised")
        return result
    except DeadlineExceeded as exc:
        if exc.seconds in (deadlines.step_s, deadlines.reset_s):
            passed = f"{exc.doing} passed {exc.option}={exc.seconds:g} at once"
            raise NotMeasured(f"{passed}, so it must be supervised") from exc
        raise NotMeasured(f"one {exc.doing} takes more than {exc.seconds:g} s") from exc
    except WorkerDied as exc:
        died = f"its process died during {exc.doing} ({describe_exit(exc.exitcode)})"
        raise NotMeasured(f"{died} when it was measured, so it must be supervised") from exc
    except EnvFailed as exc:  # for the caller this is a failure to open a fleet
        failed = EnvConstructionFailed(exc.slot, exc.reason, doing=exc.doing)
        failed.__cause__ = exc.__cause__
    finally:
        fleet.close()
    raise failed


def _result_of(fleet: Fleet) -> Any:
    """Let a probe go on until it knows."""
    from envfleet.engine.backends.process.child_processes import state_of

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
                raise NotMeasured(f"{took}, so they wait side by side", is_waiting=True)
            raise NotMeasured(took)
        if batch.truncated[0]:
            (result,) = fleet.call("result")
            if isinstance(result, str):
                raise NotMeasured(result)
            return result
        if batch.terminated[0]:
            fleet.reset([ResetPlan()])


def _cpu_s(pid: int | None) -> float:
    """How long another process has used processors; NaN where the system cannot tell."""
    try:
        return time.clock_gettime((~(pid or 0) << 3) | 2)  # as clock_getcpuclockid(3) makes it
    except OSError:
        return math.nan


class _ProbeRefused(Exception):
    """An environment did not like a random action, or a reset without options."""


class _EnvProbe(gymnasium.Env[Any, Any]):
    """Steps another environment, for a slice of time by each of its own steps.

    Its step is terminated where it is to be reset, with the other, and truncated once `result` is
    known. Without slices it resets the other by itself, if that is quick: going to and fro would
    count.
    """

    observation_space = spaces.Discrete(1)
    action_space = spaces.Discrete(1)

    def __init__(self, env_fn: EnvFn, slice_s: float | None) -> None:
        begun_s = time.perf_counter()
        env = env_fn()
        self._env_fn, self._build_s = env_fn, time.perf_counter() - begun_s
        self.result: StepCost | str = "a function that builds a VectorEnv is not measured"
        """What was measured, or why nothing was."""
        self._slice_s, self._clock, self._resets, self._steps = slice_s, CpuClock(), 0, 0
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
        with contextlib.suppress(_ProbeRefused):
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
        except _ProbeRefused:
            return 0, 0.0, False, True, {}

    def _measure(self) -> tuple[bool, bool]:
        """Go on for a while: whether the other is to be reset, and whether all is known."""
        if not self._is_warm:  # the first step often builds caches, and counts for nothing
            self._is_warm = True
            with self._clock:
                has_ended = self._step()
            if self._clock.spent_s < LONG_S:
                self._clock, self._steps = CpuClock(), 0
                return has_ended or self._reset_s < LONG_S, False
        has_ended = False
        if not self._is_known:
            with self._clock:
                has_ended = self._play()
        if has_ended or not self._is_known:  # the reset behind an end counts too
            return has_ended, False
        cost = self._clock.shared_by(self._steps)
        self.result = replace(cost, why_alone=self._try_second())
        return False, True

    def _try_second(self) -> str:
        """Why there cannot be a second one beside the first; empty if that takes long to find."""
        if self._build_s > _SECOND_LIMIT_S:
            return ""
        try:
            self._second = self._env_fn()  # ends with this process: its close may never return
        except Exception as exc:
            return f"a second one in the same process failed ({type(exc).__name__}: {exc})"
        return ""

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

    def _refuse(self, doing: str, exc: BaseException) -> _ProbeRefused:
        text = " ".join(f"{type(exc).__name__}: {exc}".split())[:200]
        self.result, self._is_refused = f"{doing} raised {text!r} when it was measured", True
        return _ProbeRefused()

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


class _NativeProbe(gymnasium.Env[Any, Any]):
    """Steps natively vectorised instances of several sizes, as a `_EnvProbe` does.

    The shortest of some steps of each counts: other work of the machine only lengthens them.
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
