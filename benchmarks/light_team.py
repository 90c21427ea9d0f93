"""A team of three agents that compute next to nothing, so that the vectoriser's own cost shows.

It needs PettingZoo only, because other libraries run it in virtual environments of their own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class LightTeam(ParallelEnv[str, Any, Any]):
    """Each agent is rewarded with its action; an episode has 100 steps."""

    metadata: ClassVar[dict[str, Any]] = {"name": "light_team_v0", "is_parallelizable": True}
    render_mode = None
    possible_agents: ClassVar[list[str]] = ["agent_0", "agent_1", "agent_2"]

    def __init__(self) -> None:
        self._observation, self._action = spaces.Box(-1, 1, (8,)), spaces.Discrete(5)
        self._seen = {name: np.zeros(8, np.float32) for name in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._steps = list(self.possible_agents), 0
        return dict(self._seen), {name: {} for name in self.agents}

    def step(self, actions: Any) -> Any:
        names = self.agents
        self._steps += 1
        is_over = self._steps >= 100
        rewards = {name: float(actions[name]) for name in names}
        if is_over:
            self.agents = []
        return (
            {name: self._seen[name] for name in names},
            rewards,
            dict.fromkeys(names, False),
            dict.fromkeys(names, is_over),
            {name: {} for name in names},
        )
