"""A game of two that is over soon, and a team, for tests of runs and matches."""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Sticks(AECEnv[Any, Any, Any]):
    """Players take one, two or three sticks in turn; the last stick wins.

    Left with a multiple of four, a player loses against one who knows. How many there are at the
    start follows from the seed.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "sticks_v0",
        "render_modes": ["rgb_array"],
        "render_fps": 4,
        "is_parallelizable": False,
    }

    def __init__(self, most=12, render_mode=None):
        self.most, self.render_mode = most, render_mode
        self.possible_agents = ["anna", "bert"]

    def observation_space(self, agent):
        board = spaces.Box(0, 1, (self.most + 1,), np.float32)
        return spaces.Dict(observation=board, action_mask=spaces.MultiBinary(3))

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.left = int(np.random.default_rng(seed).integers(self.most // 2, self.most + 1))
        self.agents = list(self.possible_agents)
        self.rewards, self._cumulative_rewards = (dict.fromkeys(self.agents, 0.0) for _ in "ab")
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in "ab")
        self.infos: dict[Any, Any] = {name: {} for name in self.agents}
        self.agent_selection = "anna"

    def observe(self, agent):
        mask = (np.arange(1, 4) <= self.left).astype(np.int8)
        mask[0] = 1
        return {
            "observation": np.eye(self.most + 1, dtype=np.float32)[self.left],
            "action_mask": mask,
        }

    def step(self, action):
        name = self.agent_selection
        if self.terminations[name]:
            self._was_dead_step(action)
            return
        other = "bert" if name == "anna" else "anna"
        self.left -= 1 + int(action)
        assert self.left >= 0
        self._cumulative_rewards[name] = 0.0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if self.left == 0:
            self.rewards = {name: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = other
        self._accumulate_rewards()

    def render(self):
        picture = np.zeros((32, 64, 3), np.uint8)
        picture[:, : 4 * self.left] = 255
        return picture

    def close(self):
        pass


class CarelessSticks(Sticks):
    """Takes no notice of its seed."""

    def reset(self, seed=None, options=None):
        super().reset(None, options)


class Guessing(ParallelEnv[Any, Any, Any]):
    """Two agents that earn 1 by doing what they see; one of them may be told nonsense."""

    metadata: ClassVar[dict[str, Any]] = {"name": "guessing_v0"}
    possible_agents: ClassVar[list[str]] = ["left", "right"]

    def __init__(self, nonsense=None, render_mode=None):
        self.nonsense, self.render_mode = nonsense, render_mode

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (3,))

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        self.agents, self.made = list(self.possible_agents), 0
        return self.look(), {name: {} for name in self.agents}

    def look(self):
        self.wanted = {name: int(self.rng.integers(3)) for name in self.agents}
        return {name: np.eye(3, dtype=np.float32)[one] for name, one in self.wanted.items()}

    def step(self, actions):
        rewards = {name: float(one == self.wanted[name]) for name, one in actions.items()}
        self.made += 1
        seen, is_over = self.look(), self.made == 10
        if self.nonsense == "reward":
            rewards["right"] = float("nan")
        if self.nonsense == "observation":
            seen["right"][1] = np.inf
        flags = dict.fromkeys(self.agents, is_over)
        infos: dict[str, Any] = {name: {} for name in self.agents}
        if is_over:
            self.agents = []
        return seen, rewards, dict.fromkeys(flags, False), flags, infos
