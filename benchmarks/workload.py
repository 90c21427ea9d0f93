"""The environments and actions that all contenders of a row share.

Every contender gets the functions that envfleet builds its own slots with, so all of them step the
same wrappers. (For a Gymnasium id only slot 0 has the passive checker.) Actions are drawn once,
before any clock starts, and repeated.
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
"""Number of prepared batches of actions."""
WARM_SHARE = 0.1
"""Part of a slice that runs before the clock starts, because other contenders used the caches."""


@dataclass(frozen=True)
class Workload:
    """An environment, the number of copies, and the number of workers."""

    env: Any
    num_envs: int
    num_workers: int = 2
    seed: int = 0
    actions_of: Any = None
    """The environment whose actions to draw, if `env` does not build a single environment."""

    @cached_property
    def env_fns(self) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        """The functions that build the environments, one per slot, the same as envfleet's."""
        env_fns, _ = env_functions(self.env, self.num_envs)
        return env_fns

    @cached_property
    def action_space(self) -> gymnasium.Space[Any]:
        """The action space of one environment."""
        env_fns, _ = env_functions(self.env if self.actions_of is None else self.actions_of, 1)
        env = env_fns[0]()
        try:
            return env.action_space
        finally:
            env.close()

    def action_batches(self, count: int | None = None) -> list[Any]:
        """Actions for `count` environments (None: all), the same ones at every call."""
        space = batch_space(self.action_space, count or self.num_envs)
        space.seed(self.seed)
        return [space.sample() for _ in range(NUM_BATCHES)]

    def single_actions(self, first: int, end: int) -> list[list[Any]]:
        """The same batches as lists of single actions, for the slots `first` to `end - 1`."""
        space = batch_space(self.action_space, self.num_envs)
        return [list(iterate(space, batch))[first:end] for batch in self.action_batches()]


class ActionPool:
    """Prepared actions for batches of any size."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._by_count: dict[int, Iterator[Any]] = {}

    def next(self, count: int) -> Any:
        """Actions for `count` slots."""
        if count not in self._by_count:
            self._by_count[count] = itertools.cycle(self._work.action_batches(count))
        return next(self._by_count[count])


def timed(step: Callable[[], int], seconds: float) -> Slice:
    """Call `step` for about `seconds`; it returns how many environment steps it made."""
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
