"""Environments without PettingZoo's own wrappers, which take half of a board game's time.

Law: a game that is driven through `Bare` is the same as one driven through the wrappers, move by
move, with illegal moves too. Only wrappers whose whole effect is known are left out:

    OrderEnforcingWrapper      raises if an environment is used before its reset; a fleet does so
    AssertOutOfBoundsWrapper   refuses an action outside its space; `Bare.step` does so
    TerminateIllegalWrapper    ends the game at a move that the mask forbids; `Bare.step` does so

The first wrapper of another kind, or of a class derived from these, stays, with all that it wraps.
A Parallel environment that `aec_to_parallel` made of an AEC one is driven past them too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Discrete
from pettingzoo.utils.conversions import aec_to_parallel_wrapper
from pettingzoo.utils.env_logger import EnvLogger
from pettingzoo.utils.wrappers import (
    AssertOutOfBoundsWrapper,
    OrderEnforcingWrapper,
    TerminateIllegalWrapper,
)

from envfleet.errors import ActionError, OutOfOrder

MASK_KEY = "action_mask"
"""PettingZoo's name for the actions that are allowed, in an observation or in an info."""


class Bare:
    """The environment inside, and the moves that its wrappers would have let through."""

    def __init__(self, env: Any) -> None:
        """Take an environment, which the caller closes."""
        self._outermost = env
        self._checks_bounds = False
        self._illegal_reward: float | None = None
        while True:
            if type(env) is AssertOutOfBoundsWrapper:
                self._checks_bounds = True
            elif type(env) is TerminateIllegalWrapper and self._illegal_reward is None:
                self._illegal_reward = float(env._illegal_value)
            elif type(env) is not OrderEnforcingWrapper:
                break
            env = env.env
        self.env: Any = env
        """Where agents, rewards and the like are to be read."""
        self._mask: Any = None
        """What the agent to act may do, as it was last told; None if it was not told."""
        self._is_game_lost = False
        """An illegal move has ended the game."""
        self._bounds: dict[Any, tuple[int, int] | None] = {}
        """The first action of an agent and the one after its last, if its actions are numbered."""

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Start an episode."""
        self._mask, self._is_game_lost = None, False
        self._bounds.clear()
        self._outermost.reset(seed=seed, options=options)

    def observe(self, agent: Any) -> Any:
        """What an agent sees."""
        seen = self.env.observe(agent)
        if self._illegal_reward is not None and agent == self.env.agent_selection:
            self._mask = self._mask_in(seen, self.env.infos.get(agent, {}))
        return seen

    def last(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """What the agent to act sees, has earned and is told."""
        found: Any = self.env.last()
        if self._illegal_reward is not None:
            self._mask = self._mask_in(found[0], found[4])
        return found  # type: ignore[no-any-return]

    def step(self, action: Any) -> None:
        """The move of the agent to act; None if it is dead."""
        if action is not None:
            if self._checks_bounds:
                self._check_bounds(action)
            if self._illegal_reward is not None and not self._is_allowed(action):
                self._lose(self._illegal_reward)
                return
        self._mask = None
        if action is None and self._is_game_lost:
            self.env.unwrapped._was_dead_step(None)
        else:
            self.env.step(action)

    def _check_bounds(self, action: Any) -> None:
        agent = self.env.agent_selection
        if agent not in self._bounds:
            self._bounds[agent] = _bounds_of(self.env.action_space(agent))
        bounds = self._bounds[agent]
        if bounds is not None and type(action) is int:  # `contains` takes ten times as long
            if bounds[0] <= action < bounds[1]:
                return
        elif self.env.action_space(agent).contains(action):
            return
        raise ActionError(
            f"the action {action!r} of {agent} is not in its space, {self.env.action_space(agent)}"
        )

    def _is_allowed(self, action: Any) -> bool:
        if self._mask is None:
            self.observe(self.env.agent_selection)
        if self._mask is None:
            raise ActionError(
                f"{self.env} shall end at illegal moves, but tells {self.env.agent_selection} "
                f"neither in its observation nor in its info what it may do ({MASK_KEY!r})"
            )
        return bool(self._mask[action])

    def _lose(self, reward: float) -> None:
        """End the game; the agent to act loses, the others get nothing."""
        EnvLogger.warn_on_illegal_move()
        env, loser = self.env.unwrapped, self.env.agent_selection
        env._cumulative_rewards[loser] = 0
        env.terminations = dict.fromkeys(env.agents, True)
        env.truncations = dict.fromkeys(env.agents, True)
        env.rewards = dict.fromkeys(env.agents, 0) | {loser: reward}
        env._accumulate_rewards()
        env._deads_step_first()
        self._mask, self._is_game_lost = None, True

    @staticmethod
    def _mask_in(seen: Any, info: dict[str, Any]) -> Any:
        return seen.get(MASK_KEY) if isinstance(seen, dict) else info.get(MASK_KEY)


class BareCycles:
    """A Parallel environment that is an AEC one inside: a step is one turn of every agent."""

    def __init__(self, env: Any) -> None:
        """Take an environment for which `are_cycles` is true, and which the caller closes."""
        self._outermost, self._bare = env, Bare(env.aec_env)

    @staticmethod
    def are_cycles(env: Any) -> bool:
        """Whether an environment was made by PettingZoo's `aec_to_parallel`."""
        return type(env) is aec_to_parallel_wrapper

    def reset(
        self, *, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Start an episode."""
        env = self._bare.env
        self._bare.reset(seed, options)
        self._outermost.agents = list(env.agents)
        live = [name for name in env.agents if not self._is_dead(name)]
        return {name: self._bare.observe(name) for name in live}, dict(env.infos)

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """One cycle; what a Parallel environment answers."""
        bare, env = self._bare, self._bare.env
        rewards: dict[Any, float] = defaultdict(int)
        for name in env.agents:
            if name != env.agent_selection:
                raise OutOfOrder(
                    f"{env} cannot be run in cycles: it is the turn of {env.agent_selection}, not "
                    f"of {name}. Agents have to act in their order, and to die at a cycle's end; "
                    "AECVecEnv needs neither"
                )
            bare.last()  # an environment may count, or draw, when it is asked
            bare.step(actions[name])
            for each in env.agents:
                rewards[each] += env.rewards[each]
        terminated, truncated = dict(env.terminations), dict(env.truncations)
        told = dict(env.infos)
        seen = {name: bare.observe(name) for name in env.agents}
        while env.agents and self._is_dead(env.agent_selection):
            bare.step(None)
        self._outermost.agents = env.agents
        return seen, rewards, terminated, truncated, told

    def _is_dead(self, name: Any) -> bool:
        return bool(self._bare.env.terminations[name] or self._bare.env.truncations[name])


def _bounds_of(space: Any) -> tuple[int, int] | None:
    return (int(space.start), int(space.start + space.n)) if type(space) is Discrete else None
