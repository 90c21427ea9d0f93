"""What the contenders of one row step: the same environments, built alike, with the same actions.

Law: every contender gets the functions that envfleet builds its own slots with (for a Gymnasium id
the passive checker sits in slot 0 only), so nobody pays for a wrapper that another one leaves out.
Actions are drawn once, before any clock starts, and cycled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
from gymnasium.vector.utils import batch_space, iterate

from envfleet.adapters.opening import env_functions
from envfleet.cli.measure import Slice

NUM_BATCHES = 16
"""Prepared batches of actions: enough that no environment sees a short rhythm."""
WARM_SHARE = 0.1
"""Part of a slice that is run before the clock starts: the others have just used the caches."""


@dataclass(frozen=True)
class Workload:
    """One environment, how many of it, and among how many workers."""

    env: Any
    num_envs: int
    num_workers: int = 2
    seed: int = 0
    actions_of: Any = None
    """Whose actions to draw, where `env` itself builds no single environment."""

    @cached_property
    def env_fns(self) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        """One builder per slot, the same as envfleet's."""
        env_fns, _ = env_functions(self.env, self.num_envs)
        return env_fns

    @cached_property
    def action_space(self) -> gymnasium.Space[Any]:
        """Of one environment."""
        env_fns, _ = env_functions(self.env if self.actions_of is None else self.actions_of, 1)
        env = env_fns[0]()
        try:
            return env.action_space
        finally:
            env.close()

    def action_batches(self, count: int | None = None) -> list[Any]:
        """Prepared actions for `count` environments (None: all), the same ones at every call."""
        space = batch_space(self.action_space, count or self.num_envs)
        space.seed(self.seed)
        return [space.sample() for _ in range(NUM_BATCHES)]

    def single_actions(self, first: int, end: int) -> list[list[Any]]:
        """The same batches, of the slots from `first` to before `end`, cut into single actions."""
        space = batch_space(self.action_space, self.num_envs)
        return [list(iterate(space, batch))[first:end] for batch in self.action_batches()]


class ActionPool:
    """Prepared actions for batches of any size: the next one costs a look-up."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._by_count: dict[int, Iterator[Any]] = {}

    def next(self, count: int) -> Any:
        """Actions for `count` slots."""
        if count not in self._by_count:
            self._by_count[count] = itertools.cycle(self._work.action_batches(count))
        return next(self._by_count[count])


def timed(step: Callable[[], int], seconds: float) -> Slice:
    """Call `step`, which returns how many environment steps it made, for about `seconds`."""
    clock = time.perf_counter
    warm_until_s = clock() + seconds * WARM_SHARE
    step()
    while clock() < warm_until_s:
        step()
    steps, start_s = 0, clock()
    while True:
        steps += step()
        elapsed_s = clock() - start_s
        if elapsed_s >= seconds:
            return Slice(steps, elapsed_s)
