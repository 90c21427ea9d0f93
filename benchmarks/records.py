"""What a step costs when three agents' data is one record, and when it is a Dict of arrays.

    python benchmarks/records.py

CPU microseconds per environment step, of this process and the workers together: on a busy machine
they say more than the time on the wall. Both kinds of fleet run in turns; the best round counts.
Linux only (it reads /proc).
"""

from __future__ import annotations

import functools
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

import envfleet
from envfleet.layout import RecordSpace

AGENTS, ENVS, WORKERS, STEPS, ROUNDS = 3, 32, 2, 300, 7
FIELDS: dict[str, Any] = {
    "observation": Box(-np.inf, np.inf, (AGENTS, 8)),
    "reward": Box(-np.inf, np.inf, (AGENTS,)),
    "terminated": Box(0, 1, (AGENTS,), np.bool_),
    "truncated": Box(0, 1, (AGENTS,), np.bool_),
    "alive": MultiBinary(AGENTS),
    "mask": Box(0, 1, (AGENTS, 5), np.int8),
    "turn": Discrete(AGENTS),
}


class ThreeAgents(gymnasium.Env[Any, Any]):
    """Next to no work of its own: what is measured is how its data travels."""

    def __init__(self, is_record: bool) -> None:
        self.observation_space = RecordSpace(FIELDS) if is_record else Dict(FIELDS)
        self.action_space = MultiDiscrete([5] * AGENTS)
        self.record: Any = (
            self.observation_space.zeros()
            if isinstance(self.observation_space, RecordSpace)
            else {name: np.zeros(space.shape, space.dtype) for name, space in FIELDS.items()}
        )
        self.rewards = self.record["reward"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.record, {}

    def step(self, action: Any) -> Any:
        self.rewards[:] = action
        return self.record, 0.0, False, False, {}


def cpu_s(pids: list[Any]) -> float:
    """Seconds on a core: this process and these."""
    workers = (Path(f"/proc/{pid}/schedstat").read_text().split()[0] for pid in pids)
    return time.process_time() + sum(int(nanoseconds) for nanoseconds in workers) / 1e9


def one_round(envs: Any, actions: Any) -> float:
    """CPU microseconds per environment step."""
    pids = envs.fleet.worker_pids()
    before = cpu_s(pids)
    for _ in range(STEPS):
        envs.step(actions)
    return (cpu_s(pids) - before) / (STEPS * ENVS) * 1e6


def main() -> None:
    """Print the best round of each."""
    kinds = {"one record": True, "a Dict of arrays": False}
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(ROUNDS):
        for name, is_record in kinds.items():
            with closing(
                envfleet.make_vec(
                    functools.partial(ThreeAgents, is_record),
                    ENVS,
                    backend="process",
                    num_workers=WORKERS,
                )
            ) as envs:
                envs.reset(seed=0)
                actions = envs.action_space.sample()
                one_round(envs, actions)
                best[name] = min(best[name], one_round(envs, actions))
    for name, cost in best.items():
        print(f"{name}: {cost:.1f} us of CPU per environment step")


if __name__ == "__main__":
    main()
