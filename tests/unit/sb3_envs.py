"""Environments for the tests of the Stable-Baselines3 adapter.

A worker imports the module of its environment: this one imports neither SB3 nor PyTorch.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Maze(gymnasium.Env[Any, Any]):
    """Random observations, rewards, ends and masks, and infos that travel in every way."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 - Gymnasium's way
    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (3, 4), np.uint8),
            "place": spaces.Box(-1, 1, (2,)),
            "room": spaces.Discrete(9),
        }
    )
    action_space = spaces.Discrete(4)

    def __init__(self, length: int = 9) -> None:
        self.length, self.t, self.render_mode = length, 0, "rgb_array"
        self.num_masks = 0
        self.options: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.options = 0, options
        return self._observe(), {"begun": True, "options": options}

    def step(self, action: Any) -> Any:
        self.t += 1
        is_over = bool(self.np_random.random() < 0.1)
        reward = float(self.np_random.normal()) + int(action)
        info: dict[str, Any] = {"t": self.t, "half": self.t / 2}
        if self.t % 3 == 0:
            info |= {"word": f"step {self.t}", "array": np.arange(self.t)}
        return self._observe(), reward, is_over, self.t >= self.length, info

    def render(self) -> Any:
        return np.full((4, 4, 3), self.t, np.uint8)

    def action_masks(self) -> Any:
        self.num_masks += 1
        masks = np.ones(4, np.bool_)
        masks[self.t % 4] = False
        return masks

    def _observe(self) -> Any:
        draw = self.np_random
        return {
            "image": draw.integers(0, 256, (3, 4), dtype=np.uint8),
            "place": draw.uniform(-1, 1, 2).astype(np.float32),
            "room": draw.integers(9),
        }


class Corridor(gymnasium.Env[Any, Any]):
    """A step forward is rewarded, a step into a wall is masked. Plain observations."""

    observation_space = spaces.Box(0, 20, (1,))
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_masks()[int(action)], f"action {action} is masked at {self.t}"
        self.t += 1
        return np.full(1, self.t, np.float32), float(action == 1), self.t >= 20, False, {}

    def action_masks(self) -> Any:
        return np.array([self.t % 2 == 0, True, self.t % 2 == 1])


class SeedOnly(gymnasium.Env[Any, Any]):
    """Its reset knows no options, and answers with a list."""

    observation_space = action_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    render_mode = None

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed)
        return [float(self.np_random.random())], {}

    def step(self, action: Any) -> Any:
        return [float(action[0])], 0.0, False, False, {}


class DictActions(gymnasium.Env[Any, Any]):
    """Tells in its info which action it got."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,))})
    render_mode = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 1, 0.0, False, False, {"gear": int(action["gear"]), "force": action["force"]}


class Outer(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper to look for."""


class Outermost(Outer):
    """A wrapper that derives from the other."""
