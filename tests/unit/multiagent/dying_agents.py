"""Environments whose agents die at different times, for tests of what drives them."""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import AgentSelector

from envfleet.multiagent import FlattenMultiAgentWrapper


def numbered_actions():
    """Choices of unequal kinds and lengths."""
    return {
        "wolf_0": spaces.Discrete(3),
        "wolf_1": spaces.Discrete(5, start=2),
        "hare_0": spaces.MultiDiscrete([2, 4]),
    }


def single_choices():
    return {
        "wolf_0": spaces.Discrete(3),
        "wolf_1": spaces.Discrete(5),
        "hare_0": spaces.Discrete(2),
    }


def boxes():
    return {
        "wolf_0": spaces.Box(-1, 1, (2,)),
        "wolf_1": spaces.Box(np.array([0, 0, -5]), np.array([1, 10, 5]), dtype=np.float64),
    }


def mixed_actions():
    return {"wolf_0": spaces.Discrete(3), "hare_0": spaces.Box(-2, 2, (2, 2))}


class _Dying:
    """Rewards, deaths, truncations and masks are drawn from one generator."""

    metadata: ClassVar[dict[str, Any]] = {"name": "dying_v0", "is_parallelizable": True}
    render_mode = None

    def __init__(self, actions=None, has_masks=True, is_truncating=False, death_rate=0.15):
        self.action_spaces = actions or single_choices()
        self.possible_agents = list(self.action_spaces)
        self.has_masks, self.is_truncating, self.death_rate = has_masks, is_truncating, death_rate
        self.observation_spaces = {
            name: self._observation_space(number)
            for number, name in enumerate(self.possible_agents, start=1)
        }
        self.rng: Any = None
        self.taken: list[Any] = []
        """Every action that was carried out: (agent, action)."""

    def _observation_space(self, number):
        seen = spaces.Box(-np.inf, np.inf, (number,), np.float64)
        if not self.has_masks:
            return seen
        name = self.possible_agents[number - 1]
        return spaces.Dict(observation=seen, action_mask=spaces.MultiBinary(self.width(name)))

    def width(self, name):
        """How many alternatives all choices of an agent have together."""
        space = self.action_spaces[name]
        return int(space.n if isinstance(space, spaces.Discrete) else np.sum(space.nvec))

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    def begin(self, seed):
        if seed is not None or self.rng is None:
            self.rng, _ = seeding.np_random(seed)
        self.taken = []
        self.agents = self.possible_agents.copy()
        self.draw()

    def draw(self):
        """New observations and masks."""
        self.seen = {}
        for number, name in enumerate(self.possible_agents, start=1):
            seen = self.rng.normal(size=number)
            if self.has_masks:
                mask = self.rng.integers(0, 2, self.width(name)).astype(np.int8)
                seen = {"observation": seen, "action_mask": mask}
            self.seen[name] = seen

    def carry_out(self, agent, action):
        assert self.action_spaces[agent].contains(action), (agent, action)
        self.taken.append((agent, np.asarray(action).tolist()))

    def draw_rewards(self):
        return {name: float(self.rng.normal()) for name in self.agents}

    def draw_deaths(self):
        """Who dies now, and whether by truncation."""
        died = [name for name in self.agents if self.rng.random() < self.death_rate]
        return died, self.is_truncating and bool(self.rng.random() < 0.5)


class DyingAgents(_Dying, AECEnv):
    """Agents in turn; after each turn every agent earns something and may die."""

    def reset(self, seed=None, options=None):
        self.begin(seed)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {name: {"drawn": float(self.rng.random())} for name in self.agents}
        self._skip_agent_selection: Any = None
        self.order = AgentSelector(self.possible_agents)
        self.agent_selection = self.order.next()

    def observe(self, agent):
        return self.seen[agent]

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self.carry_out(agent, action)
        self._cumulative_rewards[agent] = 0.0
        self.rewards = self.draw_rewards()
        self.draw()
        died, is_truncation = self.draw_deaths()
        (self.truncations if is_truncation else self.terminations).update(dict.fromkeys(died, True))
        self.infos = {name: {"drawn": float(self.rng.random())} for name in self.agents}
        alive = [n for n in self.agents if not (self.terminations[n] or self.truncations[n])]
        self._accumulate_rewards()
        if alive:
            # the next in order that is alive
            first = self.possible_agents.index(agent)
            turned = self.possible_agents[first + 1 :] + self.possible_agents[: first + 1]
            self.agent_selection = next(name for name in turned if name in alive)
        self._deads_step_first()


class DyingAgentsParallel(_Dying, ParallelEnv):
    """All at once."""

    def reset(self, seed=None, options=None):
        self.begin(seed)
        return self.seen_by(self.agents), {name: {} for name in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        for name, action in actions.items():
            self.carry_out(name, action)
        rewards = self.draw_rewards()
        self.draw()
        died, is_truncation = self.draw_deaths()
        acted = self.agents
        self.agents = [name for name in acted if name not in died]
        flags = {name: name in died for name in acted}
        nothing = dict.fromkeys(acted, False)
        terminated, truncated = (nothing, flags) if is_truncation else (flags, nothing)
        infos = {name: {"drawn": float(self.rng.random())} for name in acted}
        return self.seen_by(acted), rewards, terminated, truncated, infos

    def seen_by(self, names):
        return {name: self.seen[name] for name in names}


def flattened_dying(kind, mode):
    return FlattenMultiAgentWrapper(kind(is_truncating=True), mode)
