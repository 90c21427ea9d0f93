"""An AEC environment from turn to turn, or from cycle to cycle.

Law: agents that are dead are stepped with None as soon as their turn comes, and what they saw and
earned last is kept; the caller meets living agents only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envfleet.multiagent.bare import Bare

Info = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What a turn or a cycle brought; everything is by agent."""

    live: list[Any] = field(default_factory=list)
    """Who acts next: one agent after a turn, all after a cycle, none at the end."""
    seen: dict[Any, Any] = field(default_factory=dict)
    """Observations of those that act next, and the last ones of those that died."""
    rewards: dict[Any, float] = field(default_factory=dict)
    infos: dict[Any, Info] = field(default_factory=dict)
    terminated: dict[Any, bool] = field(default_factory=dict)
    """Of those that died: True if terminated, False if only truncated."""
    truncated: dict[Any, bool] = field(default_factory=dict)
    """Of those that died; an illegal move may set both."""
    is_any_truncated: bool = False
    """Whether an agent went by truncation in the last step."""


def is_any_cut(terminations: Mapping[Any, Any], truncations: Mapping[Any, Any]) -> bool:
    """Whether an agent was truncated without being terminated: an illegal move may set both."""
    if not any(truncations.values()):
        return False
    return any(cut and not terminations[name] for name, cut in truncations.items())


def agents_there(env: Any, seen: Mapping[Any, Any]) -> list[Any]:
    """Who is in a Parallel environment; an environment may have no `agents`."""
    return list(getattr(env, "agents", seen))


class Turns:
    """The turns of one AEC environment."""

    def __init__(self, env: Any) -> None:
        """Take the environment, which the caller closes."""
        self._bare = Bare(env)
        self._env = self._bare.env

    @property
    def agent(self) -> Any:
        """Whose turn it is."""
        return self._env.agent_selection

    @property
    def agents(self) -> list[Any]:
        """Who is there, as the environment lists them."""
        return self._env.agents  # type: ignore[no-any-return]

    def reset(self, seed: int | None, options: Info | None) -> None:
        """Start an episode."""
        self._bare.reset(seed, options)
        self._step_dead(Outcome(), keep_rewards=False)

    def live_agents(self) -> list[Any]:
        """Agents that will act again."""
        env = self._env
        if not any(env.terminations.values()) and not any(env.truncations.values()):
            return list(env.agents)
        return [name for name in self._env.agents if not self._is_dead(name)]

    def observe(self, names: list[Any]) -> tuple[dict[Any, Any], dict[Any, Info]]:
        """Observations and infos of living agents."""
        seen = {name: self._bare.observe(name) for name in names}
        return seen, {name: self._env.infos[name] for name in names}

    def act(self, action: Any) -> bool:
        """Let the agent to act do this; whether all agents live on."""
        env = self._env
        self._bare.step(action)
        is_any_dead = any(env.terminations.values()) or any(env.truncations.values())
        return bool(env.agents) and not is_any_dead

    def last(self) -> tuple[Any, float, Info]:
        """What the agent to act sees, has earned since its own last turn, and is told."""
        seen, reward, _, _, info = self._bare.last()
        return seen, float(reward), info

    def play_turn(self, action: Any) -> Outcome:
        """One agent's turn.

        Rewards are of the agent that acts next, since its own last turn, and of those that died.
        """
        actor = self.agent
        self.act(action)
        return self.after_turn(actor)

    def after_turn(self, actor: Any) -> Outcome:
        """What the turn of this agent brought, after `act`."""
        env, outcome = self._env, Outcome()
        outcome.is_any_truncated = is_any_cut(env.terminations, env.truncations)
        self._step_dead(outcome, keep_rewards=True)
        if env.agents:
            name = self.agent
            outcome.live = [name]
            outcome.seen[name], outcome.rewards[name], outcome.infos[name] = self.last()
        elif actor not in outcome.seen:  # an environment that lets its dead agents take no turn
            outcome.seen[actor] = env.observe(actor)
            outcome.rewards = {name: float(reward) for name, reward in env.rewards.items()}
            outcome.terminated = {name: bool(flag) for name, flag in env.terminations.items()}
            outcome.truncated = {name: bool(flag) for name, flag in env.truncations.items()}
        return outcome

    def play_cycle(self, actions: Mapping[Any, Any]) -> Outcome:
        """One turn of every living agent; the cycle ends when an agent would act again."""
        env, waiting = self._env, dict(actions)
        outcome = Outcome(rewards=dict.fromkeys(self.live_agents(), 0.0))
        while env.agents and self.agent in waiting:
            self._bare.step(waiting.pop(self.agent))
            for name, reward in env.rewards.items():
                outcome.rewards[name] = outcome.rewards.get(name, 0.0) + float(reward)
            outcome.is_any_truncated = is_any_cut(env.terminations, env.truncations)
            self._step_dead(outcome, keep_rewards=False)
        outcome.live = self.live_agents()
        seen, infos = self.observe(outcome.live)
        outcome.seen |= seen
        outcome.infos |= infos
        return outcome

    def _step_dead(self, outcome: Outcome, *, keep_rewards: bool) -> None:
        """Step dead agents with None until a living one is to act."""
        env = self._env
        while env.agents and self._is_dead(self.agent):
            name = self.agent
            outcome.seen[name], reward, is_terminated, is_truncated, info = self._bare.last()
            outcome.infos[name] = info
            outcome.terminated[name] = bool(is_terminated)
            outcome.truncated[name] = bool(is_truncated)
            if keep_rewards:
                outcome.rewards[name] = float(reward)
            self._bare.step(None)

    def _is_dead(self, name: Any) -> bool:
        return bool(self._env.terminations[name] or self._env.truncations[name])
