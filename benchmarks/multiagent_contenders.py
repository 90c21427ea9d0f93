"""The ways to step environments with several agents that the rows compare.

A step of a team is one step of all its agents; of a game it is one turn. All processes are forked,
regardless of a library's default, so that slices compare stepping and not starting.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import MultiDiscrete

from benchmarks.workload import timed
from envfleet.cli.measure import Slice
from envfleet.multiagent import AECVecEnv, AsyncPettingZooVecEnv

SUPERSUIT, LOOP = "SuperSuit concat_vec_envs", "a loop over one env()"
NUM_NOISE = 4096
FLEET: dict[str, Any] = {"num_workers": 2, "backend": "process", "start_method": "fork"}

Step = Callable[[], int]
Close = Callable[[], None]


class Stepping:
    """A contender that is built when it is opened, and then takes steps."""

    def __init__(self, key: str, label: str, build: Callable[[], tuple[Step, Close]]) -> None:
        """`build` returns a function that takes steps and says how many, and one that closes."""
        self.key, self.label, self._build = key, label, build
        self._close: Close | None = None

    def open(self) -> None:
        """Start and reset."""
        self._step, self._close = self._build()

    def run(self, seconds: float) -> Slice:
        """Take steps."""
        return timed(self._step, seconds)

    def close(self) -> None:
        """Close."""
        if self._close is not None:
            self._close()


def _always(envs: Any, actions: Any, num_envs: int) -> tuple[Step, Close]:
    """The same actions at every step."""

    def step() -> int:
        envs.step(actions)
        return num_envs

    return step, envs.close


def team_on_fleet(make: Callable[[], Any], num_envs: int) -> Stepping:
    """envfleet: all slots by one `step`, actions by agent."""

    def build() -> tuple[Step, Close]:
        envs = AsyncPettingZooVecEnv([make] * num_envs, **FLEET)
        envs.reset(seed=0)
        actions = {name: envs.action_space(name).sample() for name in envs.agents}
        return _always(envs, actions, num_envs)

    return Stepping("step", "envfleet AsyncPettingZooVecEnv", build)


def supersuit_team(make: Callable[[], Any], num_envs: int) -> Stepping:
    """SuperSuit's vector environment in two processes; its rows are agents."""

    def build() -> tuple[Step, Close]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import supersuit

            agents = supersuit.pettingzoo_env_to_vec_env_v1(make())
            envs = supersuit.concat_vec_envs_v1(
                agents, num_envs, num_cpus=2, base_class="gymnasium"
            )
            envs.reset(seed=0)
        return _always(envs, np.ones(envs.num_envs, np.int64), num_envs)

    return Stepping("supersuit", SUPERSUIT, build)


class TeamAlone(gymnasium.Env[Any, Any]):
    """A Parallel environment for the limit: nothing is done with what it returns."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._env = make()
        self._agents = self._env.possible_agents
        self.observation_space = MultiDiscrete([2])
        self.action_space = MultiDiscrete([self._env.action_space(one).n for one in self._agents])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        found = self._env.step(dict(zip(self._agents, action.tolist(), strict=True)))
        return found[0], 0.0, not self._env.agents, False, found[4]

    def close(self) -> None:
        self._env.close()


def games_on_fleet(make: Callable[[], Any], num_envs: int) -> Stepping:
    """envfleet: a random legal move in every slot, all slots by one `step`."""

    def build() -> tuple[Step, Close]:
        envs, rng = AECVecEnv([make] * num_envs, **FLEET), np.random.default_rng(0)
        batch = envs.reset(seed=0)

        def step() -> int:
            nonlocal batch
            masks = batch.masks
            batch = envs.step((rng.random(masks.shape) * masks).argmax(axis=1))
            return num_envs

        return step, envs.close

    return Stepping("step", "envfleet AECVecEnv", build)


def game_in_a_loop(make: Callable[[], Any]) -> Stepping:
    """One environment after the manner of PettingZoo's documentation, with random legal moves."""

    def build() -> tuple[Step, Close]:
        env, turn = make(), 0
        env.reset(seed=0)
        noise = np.random.default_rng(0).random((NUM_NOISE, env.action_space(env.agents[0]).n))

        def step() -> int:
            nonlocal turn
            while True:
                seen, _, is_terminated, is_truncated, _ = env.last()
                if not (is_terminated or is_truncated):
                    turn = (turn + 1) % NUM_NOISE
                    env.step((noise[turn] * seen["action_mask"]).argmax())
                    return 1
                env.step(None)
                if not env.agents:
                    env.reset()

        return step, env.close

    return Stepping("loop", LOOP, build)
