"""The ways to step many environments that ``bench`` and ``tune`` compare.

Each contender steps the same environments with the same actions, which are drawn before the clock
starts, so that a slice measures stepping and nothing else. Other vectorisers are imported when they
are opened.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate

from envfleet.cli.env_argument import EnvChoice
from envfleet.cli.measure import Contender, Shares, Slice

Slots: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_POOL = 16
"""Prepared batches of actions, used in turn: enough that no environment sees a short cycle."""


@dataclass(frozen=True)
class Workload:
    """What every contender steps."""

    choice: EnvChoice
    num_envs: int
    autoreset: str = "next_step"
    start_method: str | None = None
    seed: int = 0
    ray_address: str | None = None
    """Where the contenders on Ray go; None starts a cluster here, or takes RAY_ADDRESS."""

    @property
    def env_fns(self) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        """One builder per environment, for vectorisers that take a list."""
        return [self.choice.env_fn] * self.num_envs

    @cached_property
    def actions(self) -> tuple[Any, ...]:
        """Prepared batches of actions for all environments."""
        return self.actions_for(self.num_envs)

    def actions_for(self, num: int) -> tuple[Any, ...]:
        """Prepared batches of actions for ``num`` environments."""
        space = batch_space(self.choice.action_space, num)
        space.seed(self.seed)
        return tuple(space.sample() for _ in range(_POOL))

    def actions_one_by_one(self) -> tuple[tuple[Any, ...], ...]:
        """The same batches, cut into single actions."""
        space = batch_space(self.choice.action_space, self.num_envs)
        return tuple(tuple(iterate(space, batch)) for batch in self.actions)


def timed_steps(step: Callable[[], int], seconds: float) -> Slice:
    """Call ``step`` until ``seconds`` are over; it returns how many environment steps it made."""
    # the other contenders have just used the caches: one round is not counted
    step()
    steps = 0
    start_s = time.perf_counter()
    while True:
        steps += step()
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s >= seconds:
            return Slice(steps, elapsed_s)


class PlainLoop:
    """A ``for`` loop over the environments: no batching, no parallelism, no library."""

    def __init__(self, work: Workload, key: str = "loop", label: str = "plain for loop") -> None:
        self.work, self.key, self.label = work, key, label
        self._envs: list[gymnasium.Env[Any, Any]] = []

    def open(self) -> None:
        """Build and reset the environments."""
        for slot in range(self.work.num_envs):
            self._envs.append(self.work.choice.env_fn())
            self._envs[-1].reset(seed=self.work.seed + slot)
        self._pool = itertools.cycle(self.work.actions_one_by_one())
        self._ended = [False] * self.work.num_envs

    def run(self, seconds: float) -> Slice:
        """Step the environments one after the other."""
        envs, pool, ended = self._envs, self._pool, self._ended
        resets_at_once = self.work.autoreset == "same_step"

        def step() -> int:
            for slot, action in enumerate(next(pool)):
                if ended[slot]:
                    envs[slot].reset()
                    ended[slot] = False
                    continue
                _, _, terminated, truncated, _ = envs[slot].step(action)
                if terminated or truncated:
                    if resets_at_once:
                        envs[slot].reset()
                    else:
                        ended[slot] = True
            return len(envs)

        return timed_steps(step, seconds)

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()


class _Vector:
    """A vector environment, stepped by its ``step``."""

    def __init__(self, work: Workload, key: str, label: str) -> None:
        self.work, self.key, self.label = work, key, label
        self.envs: Any = None

    def build(self) -> Any:
        """Start the environments."""
        raise NotImplementedError

    def open(self) -> None:
        """Start and reset."""
        self.envs = self.build()
        self.envs.reset(seed=self.work.seed)
        self._pool = itertools.cycle(self.work.actions)

    def run(self, seconds: float) -> Slice:
        """Call ``step``."""
        return timed_steps(self.stepping(), seconds)

    def stepping(self) -> Callable[[], int]:
        """A function that steps all environments once and says how many they are."""
        envs, pool, num_envs = self.envs, self._pool, self.work.num_envs

        def step() -> int:
            envs.step(next(pool))
            return num_envs

        return step

    def close(self) -> None:
        """Close."""
        if self.envs is not None:
            self.envs.close()


class GymnasiumVector(_Vector):
    """Gymnasium's SyncVectorEnv or AsyncVectorEnv."""

    def __init__(self, work: Workload, parallel: bool) -> None:
        name = "Async" if parallel else "Sync"
        super().__init__(work, f"gym-{name.lower()}", f"Gymnasium {name}VectorEnv")
        self.parallel = parallel

    def build(self) -> Any:
        """Start the environments, in processes of their own if `parallel`."""
        mode = AutoresetMode[self.work.autoreset.upper()]
        if not self.parallel:
            return SyncVectorEnv(self.work.env_fns, autoreset_mode=mode)
        return AsyncVectorEnv(
            self.work.env_fns,
            context=self.work.start_method,
            autoreset_mode=mode,
            shared_memory=gymnasium_can_contend(self.work.choice.observation_space),
        )

    def close(self) -> None:
        """Close, and kill processes that do not end."""
        if not isinstance(self.envs, AsyncVectorEnv):
            super().close()
            return
        try:
            self.envs.close(timeout=5)
        except Exception:
            self.envs.close(terminate=True)
            raise


def gymnasium_can_contend(space: gymnasium.Space[Any]) -> bool:
    """Whether Gymnasium's shared memory takes the space; it refuses some only after starting."""
    if isinstance(space, gymnasium.spaces.Dict):
        return all(gymnasium_can_contend(part) for part in space.spaces.values())
    if isinstance(space, gymnasium.spaces.Tuple):
        return all(gymnasium_can_contend(part) for part in space.spaces)
    return isinstance(
        space,
        gymnasium.spaces.Box
        | gymnasium.spaces.Discrete
        | gymnasium.spaces.MultiDiscrete
        | gymnasium.spaces.MultiBinary,
    )


def has_sb3() -> bool:
    """Whether Stable-Baselines3 is installed."""
    try:
        return importlib.util.find_spec("stable_baselines3") is not None
    except ValueError:
        return False


class SB3Vector(_Vector):
    """Stable-Baselines3's DummyVecEnv or SubprocVecEnv. Both always reset within the step."""

    def __init__(self, work: Workload, parallel: bool) -> None:
        name = "Subproc" if parallel else "Dummy"
        super().__init__(work, f"sb3-{name.lower()}", f"SB3 {name}VecEnv")
        self.parallel = parallel

    def open(self) -> None:
        """Start and reset; its ``reset`` takes no seed."""
        from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

        if self.parallel:
            # its own default is forkserver, where each process imports torch again: one method for
            # all contenders compares stepping, not starting
            method = self.work.start_method or multiprocessing.get_context().get_start_method()
            self.envs = SubprocVecEnv(self.work.env_fns, start_method=method)
        else:
            self.envs = DummyVecEnv(self.work.env_fns)
        self.envs.seed(self.work.seed)
        self.envs.reset()
        self._pool = itertools.cycle(self.work.actions)


class FleetStep(_Vector):
    """envfleet, every environment stepped by one ``step`` call."""

    def __init__(
        self, work: Workload, key: str, label: str, backend: str, num_workers: int | None = None
    ) -> None:
        super().__init__(work, key, label)
        self.backend, self.num_workers = backend, num_workers

    def build(self) -> Any:
        """Open the fleet."""
        import envfleet

        return envfleet.make_vec(
            self.work.choice.env_fn,
            self.work.num_envs,
            backend=self.backend,
            num_workers=self.num_workers,
            start_method=self.work.start_method if self.backend == "process" else None,
            autoreset=self.work.autoreset,
            backend_options=self._ray if self.backend == "ray" else None,
        )

    @property
    def _ray(self) -> Any:
        from envfleet import RayOptions

        # all contenders are open at once, and one at a time is measured
        return RayOptions(address=self.work.ray_address, resources={"CPU": 0.0})

    def run(self, seconds: float) -> Slice:
        """Call ``step``."""
        step = self.stepping()
        # a worker adds up how long it waited when the next command comes: this step takes the time
        # since the last slice out of the measurement
        step()
        return self.timed(step, seconds)

    def timed(self, step: Callable[[], int], seconds: float) -> Slice:
        """Measure, and see from the fleet's own clocks where the time went."""
        before = dict(self.envs.timings)
        start_s = time.perf_counter()
        slice_ = timed_steps(step, seconds)
        elapsed_s = time.perf_counter() - start_s
        num_workers = len(self.envs.fleet.bounds)
        shares = shares_of(before, dict(self.envs.timings), elapsed_s, num_workers)
        return Slice(slice_.steps, slice_.seconds, shares)


class FleetHalves(FleetStep):
    """envfleet, one half in flight while the other gets its actions (``send`` and ``recv``)."""

    def open(self) -> None:
        """Open the fleet and cut its slots in two."""
        super().open()
        self._halves = [part for part in halves(self.envs.fleet.bounds) if len(part)]
        self._pools: dict[int, Iterator[Any]] = {}

    def actions(self, num: int) -> Any:
        """The next prepared batch for ``num`` slots."""
        if num not in self._pools:
            self._pools[num] = itertools.cycle(self.work.actions_for(num))
        return next(self._pools[num])

    def run(self, seconds: float) -> Slice:
        """Send both halves, then answer those that are ready first, again and again."""
        envs, actions = self.envs, self.actions
        wanted = min(len(half) for half in self._halves)

        def step() -> int:
            slots = envs.recv(min_slots=wanted).slots
            envs.send(actions(len(slots)), slots)
            return len(slots)

        # here too the first steps take the time since the last slice out of the measurement
        envs.send(actions(self.work.num_envs))
        envs.recv()
        for half in self._halves:
            envs.send(actions(len(half)), half)
        try:
            # both ends of the measurement see the same number of slots in flight
            return self.timed(step, seconds)
        finally:
            envs.recv()


def halves(bounds: Sequence[tuple[int, int]]) -> tuple[Slots, Slots]:
    """Two halves of the slots, cut between workers so that each worker serves one half.

    Args:
        bounds: Which slots each worker hosts. A single worker is cut in the middle.
    """
    slots = np.arange(bounds[-1][1])
    cut = (len(slots) + 1) // 2 if len(bounds) == 1 else bounds[len(bounds) // 2][0]
    return slots[:cut], slots[cut:]


def shares_of(
    before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float, num_workers: int
) -> Shares | None:
    """Where ``elapsed_s`` went, from two readings of a fleet's clocks; None if they stood still."""

    def spent(name: str) -> float:
        return max(0.0, after.get(name, 0.0) - before.get(name, 0.0))

    if not spent("env_s"):
        return None
    return Shares(
        env=min(1.0, spent("env_s") / (elapsed_s * num_workers)),
        waiting=min(1.0, spent("worker_wait_s") / (elapsed_s * num_workers)),
        copying=min(1.0, spent("copy_s") / elapsed_s),
    )


def in_opening_order(contenders: Sequence[Contender]) -> list[Contender]:
    """The order to open them in: threads last, because forking a process with threads is unsafe."""
    return sorted(contenders, key=lambda one: one.key.startswith("thread"))
