"""The rows about environments with several agents: contenders, comparisons and targets.

`ROWS` has all rows by name. A step of a team is one step of all its agents; of a game it is one
turn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import MultiDiscrete

from benchmarks import sb3_rows
from benchmarks.light_team import LightTeam
from benchmarks.limit import Limit
from benchmarks.peer_agilerl import AgileRL
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.workload import Workload, timed
from envfleet.cli.measure import Contender, Slice
from envfleet.multiagent import AECVecEnv, AsyncPettingZooVecEnv
from envfleet.observe.progress import Progress

AGILERL, SUPERSUIT = "AgileRL AsyncPettingZooVecEnv", "SuperSuit concat_vec_envs"
NUM_NOISE = 4096


class TeamStep:
    """envfleet: all slots by one `step`, actions by agent."""

    key, label = "step", "envfleet AsyncPettingZooVecEnv"

    def __init__(self, make: Callable[[], Any], num_envs: int) -> None:
        """Step so many of these Parallel environments in two forked workers."""
        self._make, self._num_envs = make, num_envs
        self._envs: AsyncPettingZooVecEnv | None = None

    def open(self) -> None:
        """Start and reset."""
        self._envs = envs = AsyncPettingZooVecEnv(
            [self._make] * self._num_envs, num_workers=2, backend="process", start_method="fork"
        )
        envs.reset(seed=0)
        self._actions = {name: envs.action_space(name).sample() for name in envs.agents}

    def run(self, seconds: float) -> Slice:
        """Call `step`."""
        assert self._envs is not None
        env_step, actions, num_envs = self._envs.step, self._actions, self._num_envs

        def step() -> int:
            env_step(actions)
            return num_envs

        return timed(step, seconds)

    def close(self) -> None:
        """Close."""
        if self._envs is not None:
            self._envs.close()


class SuperSuit:
    """SuperSuit's vector environment; its rows are agents, three to an environment."""

    key, label = "supersuit", SUPERSUIT

    def __init__(self, make: Callable[[], Any], num_envs: int) -> None:
        """Step so many of these Parallel environments in two processes."""
        self._make, self._num_envs = make, num_envs
        self._envs: Any = None

    def open(self) -> None:
        """Start and reset."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import supersuit

            agents = supersuit.pettingzoo_env_to_vec_env_v1(self._make())
            self._envs = supersuit.concat_vec_envs_v1(
                agents, self._num_envs, num_cpus=2, base_class="gymnasium"
            )
            self._envs.reset(seed=0)
        self._actions = np.ones(self._envs.num_envs, np.int64)

    def run(self, seconds: float) -> Slice:
        """Call `step`."""
        env_step, actions, num_envs = self._envs.step, self._actions, self._num_envs

        def step() -> int:
            env_step(actions)
            return num_envs

        return timed(step, seconds)

    def close(self) -> None:
        """Close."""
        if self._envs is not None:
            self._envs.close()


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


class Games:
    """envfleet: a random legal move in every slot, all slots by one `step`."""

    key, label = "step", "envfleet AECVecEnv"

    def __init__(self, make: Callable[[], Any], num_envs: int) -> None:
        """Play so many of these AEC environments in two forked workers."""
        self._make, self._num_envs = make, num_envs
        self._envs: AECVecEnv | None = None

    def open(self) -> None:
        """Start and reset."""
        self._envs = AECVecEnv(
            [self._make] * self._num_envs, num_workers=2, backend="process", start_method="fork"
        )
        self._batch = self._envs.reset(seed=0)
        self._rng = np.random.default_rng(0)

    def run(self, seconds: float) -> Slice:
        """Play."""
        envs, rng = self._envs, self._rng
        assert envs is not None

        def step() -> int:
            masks = self._batch.masks
            self._batch = envs.step((rng.random(masks.shape) * masks).argmax(axis=1))
            return len(masks)

        return timed(step, seconds)

    def close(self) -> None:
        """Close."""
        if self._envs is not None:
            self._envs.close()


class OneGame:
    """A loop over one environment, as PettingZoo's documentation has it."""

    key, label = "loop", "a loop over one env()"

    def __init__(self, make: Callable[[], Any]) -> None:
        """Play one game after another."""
        self._make = make

    def open(self) -> None:
        """Build and reset."""
        self._env = self._make()
        self._env.reset(seed=0)
        self._noise = np.random.default_rng(0).random((NUM_NOISE, 7))
        self._turn = 0

    def run(self, seconds: float) -> Slice:
        """Play."""
        env, noise = self._env, self._noise

        def step() -> int:
            while True:
                seen, _, is_terminated, is_truncated, _ = env.last()
                if not (is_terminated or is_truncated):
                    self._turn = (self._turn + 1) % NUM_NOISE
                    env.step((noise[self._turn] * seen["action_mask"]).argmax())
                    return 1
                env.step(None)
                if not env.agents:
                    env.reset()

        return timed(step, seconds)

    def close(self) -> None:
        """Close."""
        self._env.close()


def light_team(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Three agents whose step takes about 1 us."""
    name = "light three-agent env, 32 envs, 2 workers"
    contenders: list[Contender] = [
        TeamStep(LightTeam, 32),
        SuperSuit(LightTeam, 32),
        AgileRL("benchmarks.light_team:LightTeam", 32),
    ]
    rounds = Rounds(name, contenders, pace, progress, title)
    lines = [
        rounds.line(name, AGILERL, 5.0, "step", "agilerl"),
        rounds.line(name, SUPERSUIT, 2.5, "step", "supersuit"),
    ]
    return Outcome(lines, rounds.entries())


def simple_spread(pace: Pace, progress: Progress, title: str) -> Outcome:
    """MPE's three agents, whose own step takes about 265 us."""
    from mpe2 import simple_spread_v3

    make = simple_spread_v3.parallel_env
    name = "MPE simple_spread, 32 envs, 2 workers"
    contenders: list[Contender] = [
        TeamStep(make, 32),
        Limit(Workload(lambda: TeamAlone(make), 32, num_workers=2)),
        SuperSuit(make, 32),
        AgileRL("mpe2.simple_spread_v3:parallel_env", 32),
    ]
    rounds = Rounds(name, contenders, pace, progress, title)
    lines = [
        rounds.line(name, AGILERL, 1.5, "step", "agilerl"),
        rounds.line(name, SUPERSUIT, 1.1, "step", "supersuit"),
        rounds.line(name, "the limit", 0.85, "step", "limit"),
    ]
    return Outcome(lines, rounds.entries())


def connect_four(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Turns of a board game whose wrappers take half of its time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from pettingzoo.classic import connect_four_v3
    name = "connect four, 64 envs, 2 workers, turns"
    contenders: list[Contender] = [
        Games(connect_four_v3.env, 64),
        OneGame(connect_four_v3.env),
    ]
    rounds = Rounds(name, contenders, pace, progress, title)
    line = rounds.line(name, OneGame.label, 2.2, "step", "loop")
    return Outcome([line], rounds.entries())


ROWS: dict[str, Row] = {
    **sb3_rows.ROWS,
    "light-team": light_team,
    "simple-spread": simple_spread,
    "connect-four": connect_four,
}
