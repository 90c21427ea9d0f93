"""The ways to step many environments that the rows compare.

Each contender is opened and reset once per row, and then runs one slice per round. While another
one runs, it blocks and uses no processor time. All processes are forked, regardless of a library's
default, so that slices compare stepping and not starting. Other libraries are imported when their
contender is opened. A library that is not installed fails only its own lines.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import envfleet
from benchmarks.workload import ActionPool, Workload, timed
from envfleet.cli.contenders import shares_of
from envfleet.cli.measure import Slice


class Stepped:
    """Any object with `step(actions)` for all environments and `close()`."""

    def __init__(
        self, key: str, label: str, work: Workload, build: Callable[[], Any], dtype: Any = None
    ) -> None:
        """Describe the contender.

        Args:
            key: Its name in results.
            label: Its name in tables.
            work: What it steps.
            build: Starts it and resets its environments.
            dtype: The type it wants for actions, so that it need not convert them in a slice.
        """
        self.key, self.label, self._work, self._build = key, label, work, build
        self._dtype = dtype
        self.envs: Any = None
        """The vector environment, once it is open."""

    def open(self) -> None:
        """Start and reset."""
        batches: Sequence[Any] = self._work.action_batches()
        if self._dtype is not None:
            batches = [batch.astype(self._dtype) for batch in batches]
        self._actions = itertools.cycle(batches)
        self.envs = self._build()

    def run(self, seconds: float) -> Slice:
        """Call `step`."""
        env_step, actions, num_envs = self.envs.step, self._actions, self._work.num_envs

        def step() -> int:
            env_step(next(actions))
            return num_envs

        return timed(step, seconds)

    def close(self) -> None:
        """Close."""
        if self.envs is not None:
            self.envs.close()


def gymnasium_async(work: Workload) -> Stepped:
    """Gymnasium's AsyncVectorEnv by default: one process per environment, shared memory."""

    def build() -> AsyncVectorEnv:
        envs = AsyncVectorEnv(work.env_fns, context="fork")
        envs.reset(seed=work.seed)
        return envs

    return Stepped("async", "Gymnasium AsyncVectorEnv", work, build)


def gymnasium_sync(work: Workload) -> Stepped:
    """Gymnasium's SyncVectorEnv."""

    def build() -> SyncVectorEnv:
        envs = SyncVectorEnv(work.env_fns)
        envs.reset(seed=work.seed)
        return envs

    return Stepped("sync", "Gymnasium SyncVectorEnv", work, build)


def sb3_subproc(work: Workload) -> Stepped:
    """SB3's SubprocVecEnv. It always resets within the step that ends an episode."""

    def build() -> Any:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        # its own default, forkserver, would import PyTorch in every process
        envs = SubprocVecEnv(work.env_fns, start_method="fork")
        envs.seed(work.seed)
        envs.reset()
        return envs

    return Stepped("sb3", "SB3 SubprocVecEnv", work, build)


def native_alone(work: Workload) -> Stepped:
    """A natively vectorised environment made by Gymnasium, in this process, without a fleet."""

    def build() -> Any:
        mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        envs = gymnasium.make_vec(work.env, work.num_envs, vectorization_mode=mode)
        envs.reset(seed=work.seed)
        return envs

    return Stepped("alone", "the same env alone in one process", work, build)


def envpool_step(work: Workload, num_threads: int) -> Stepped:
    """EnvPool's own C++ environment of the same name, all environments in one batch."""

    def build() -> Any:
        import envpool

        # it warns about the bounds of its spaces each time they are read; harmless here
        warnings.filterwarnings("ignore", message=".*precision lowered")
        envs = envpool.make(
            work.env,
            env_type="gymnasium",
            num_envs=work.num_envs,
            batch_size=work.num_envs,
            num_threads=num_threads,
            seed=work.seed,
        )
        envs.reset()
        return envs

    label = f"EnvPool, {num_threads} thread{'s' if num_threads > 1 else ''}"
    return Stepped(f"envpool-{num_threads}", label, work, build, np.int32)


class FleetStep:
    """envfleet: all slots by one `step`."""

    def __init__(
        self, work: Workload, *, key: str = "step", label: str = "envfleet, step", **options: Any
    ) -> None:
        """Pass `options` to `make_vec`; the default is forked processes."""
        self.key, self.label, self._work = key, label, work
        self._options = {"backend": "process", "start_method": "fork", **options}
        self._pool = ActionPool(work)
        self._envs: envfleet.FleetVectorEnv | None = None
        self.plan = ""
        """The fleet's plan, once it is open."""

    @property
    def envs(self) -> envfleet.FleetVectorEnv:
        """The fleet, once it is open."""
        assert self._envs is not None
        return self._envs

    def open(self) -> None:
        """Start and reset."""
        self._envs = envfleet.make_vec(self._work.env, self._work.num_envs, **self._options)
        self.plan = self._envs.plan
        self._envs.reset(seed=self._work.seed)

    def run(self, seconds: float) -> Slice:
        """Call `step`."""
        envs, actions, num_envs = self.envs, self._pool.next, self._work.num_envs

        def step() -> int:
            envs.step(actions(num_envs))
            return num_envs

        step()  # a worker counts its idle time at its next command; keep that out of the slice
        return self.timed(step, seconds)

    def timed(self, step: Callable[[], int], seconds: float) -> Slice:
        """A slice, with the shares of its time from the fleet's own clocks."""
        before, start_s = self.envs.timings, time.perf_counter()
        measured = timed(step, seconds)
        elapsed_s = time.perf_counter() - start_s
        num_workers = len(self.envs.fleet.bounds)
        shares = shares_of(before, self.envs.timings, elapsed_s, num_workers)
        return Slice(measured.steps, measured.seconds, shares)

    def close(self) -> None:
        """Close."""
        if self._envs is not None:
            self._envs.close()


class FleetFirstReady(FleetStep):
    """envfleet: `recv` the slots that are ready and `send` them again, over and over."""

    def __init__(self, work: Workload, *, min_slots: int, label: str, **options: Any) -> None:
        """Wait for `min_slots` at a time."""
        super().__init__(work, key="send/recv", label=label, **options)
        self._min_slots = min_slots

    def run(self, seconds: float) -> Slice:
        """Send all slots, then receive and send again what is ready."""
        envs, actions, min_slots = self.envs, self._pool.next, self._min_slots

        def step() -> int:
            slots: Any = envs.recv(min_slots=min_slots).slots
            envs.send(actions(len(slots)), slots)
            return len(slots)

        envs.step(actions(envs.num_envs))  # counts the idle time, as in FleetStep.run
        parts: Any = np.array_split(np.arange(envs.num_envs), envs.num_envs // min_slots)
        for part in parts:
            envs.send(actions(len(part)), part)
        # every slot is in flight at both ends of the measurement, so no step counts half
        measured = self.timed(step, seconds)
        envs.recv()
        return measured
