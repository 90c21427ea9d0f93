"""Two environments for the benchmarks: one with large observations, one whose steps sleep.

Both compute almost nothing, so a slice measures the vector environment around them. They have their
own module because workers under spawn import them by name.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

SHORT_S, LONG_S = 1e-3, 20e-3
LONG_SHARE = 0.1


class StoredImages(gymnasium.Env[npt.NDArray[np.uint8], np.int64]):
    """Returns stored frames of 4x84x84 bytes in turn and computes nothing."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)
    num_frames = 8

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = (self.num_frames, *self.observation_space.shape)
        self._frames = list(rng.integers(0, 256, shape, np.uint8))
        self._at = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        """Start with the first frame."""
        super().reset(seed=seed)
        self._at = 0
        return self._frames[0], {}

    def step(
        self, action: np.int64
    ) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Return the next frame; an episode never ends."""
        self._at = (self._at + 1) % self.num_frames
        return self._frames[self._at], 1.0, False, False, {}


class Sleeper(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """Sleeps 20 ms in a tenth of its steps and 1 ms in the others; the seed decides which."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Draw the lengths of the next 4096 steps; then they repeat."""
        super().reset(seed=seed)
        is_long = self.np_random.random(4096) < LONG_SHARE
        self._naps_s = np.where(is_long, LONG_S, SHORT_S).tolist()
        self._at = 0
        self._obs = np.zeros(4, np.float32)
        return self._obs, {}

    def step(
        self, action: np.int64
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Sleep; an episode never ends."""
        time.sleep(self._naps_s[self._at])
        self._at = (self._at + 1) % len(self._naps_s)
        return self._obs, 1.0, False, False, {}


class Waiter(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """Sleeps in every step, 20 ms unless told otherwise: a stand-in for a simulator elsewhere."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, nap_s: float = LONG_S) -> None:
        self._nap_s = nap_s
        self._obs = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Start; nothing is drawn."""
        super().reset(seed=seed)
        return self._obs, {}

    def step(
        self, action: np.int64
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Sleep; an episode never ends."""
        time.sleep(self._nap_s)
        return self._obs, 1.0, False, False, {}
