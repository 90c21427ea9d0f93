"""Well-behaved environments whose every answer is known beforehand.

Law: what an instance returns depends on its arguments, its seed and its actions only, so a test
can say what each observation has to be, or compare two ways of running the same environment.
All are importable classes without closures: every start method can build them in a worker.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envfleet.testing.values import canonical, digest

Info = dict[str, Any]
Step = tuple[Any, float, bool, bool, Info]


class Counter(gymnasium.Env[Any, Any]):
    """Counts: after t steps of an episode the observation is ``[t]`` and the last reward was t.

    An episode terminates at step `length`, or is truncated at step `limit`. When both fall on
    one step it terminates: a true end at the time limit is still a true end.

    Args:
        length: step at which the episode terminates; None never terminates.
        limit: step at which the episode is truncated; None never truncates.
    """

    def __init__(
        self, length: int | None = 5, limit: int | None = None, render_mode: str | None = None
    ) -> None:
        self.metadata = {"render_modes": ["ansi"]}
        self.length, self.limit, self.render_mode = length, limit, render_mode
        self.observation_space: spaces.Space[Any] = spaces.Box(0, 2**31, (1,), np.int64)
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self.t = 0
        self.episodes = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode at t = 0."""
        super().reset(seed=seed)
        self.t = 0
        self.episodes += 1
        return self.observation(), {}

    def step(self, action: Any) -> Step:
        """Count one step; the action does not matter."""
        self.t += 1
        terminated = self.length is not None and self.t >= self.length
        truncated = not terminated and self.limit is not None and self.t >= self.limit
        return self.observation(), float(self.t), terminated, truncated, {}

    def observation(self) -> Any:
        """What reset and step return as observation."""
        return np.array([self.t], dtype=np.int64)

    def render(self) -> str:
        """The count, as text."""
        return f"t={self.t}"

    def add(self, left: int, right: int = 0) -> int:
        """Return the sum of both numbers and t: something to `call`."""
        return left + right + self.t


class NoisyStream(gymnasium.Env[Any, Any]):
    """Draws everything from its generator, so that any error in seeding or order shows at once.

    Observations, rewards, the kind of end and the length of each episode are random; rewards
    also depend on the action. A reset without a seed continues the stream.

    Args:
        max_length: episodes last between 1 and this many steps.
        size: numbers in one observation.
    """

    def __init__(self, max_length: int = 6, size: int = 3) -> None:
        self.max_length = max_length
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.t = 0
        self.length = 1

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode of random length."""
        super().reset(seed=seed)
        self.t = 0
        self.length = int(self.np_random.integers(1, self.max_length + 1))
        return self._draw(), {"length": self.length}

    def step(self, action: Any) -> Step:
        """Draw the next observation and reward."""
        self.t += 1
        obs = self._draw()
        reward = float(self.np_random.random()) + float(np.sum(action, dtype=np.float64))
        ended = self.t >= self.length
        by_limit = bool(self.np_random.random() < 0.5)
        return obs, reward, ended and not by_limit, ended and by_limit, {"t": self.t}

    def _draw(self) -> Any:
        return self.np_random.normal(size=self.observation_space.shape)


class AnySpace(gymnasium.Env[Any, Any]):
    """Observes random samples of any space, and answers an action with a digest of its bits.

    With it the transport of every space can be tested in both directions: observations must
    arrive as sampled, and a reward is right only if the action arrived as it was sent.

    Args:
        space: the observation space.
        action_space: the action space; by default two discrete actions.
        max_length: episodes last between 1 and this many steps.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        action_space: spaces.Space[Any] | None = None,
        max_length: int = 4,
    ) -> None:
        self.observation_space = space
        # a copy of its own: sampling observation_space elsewhere must not change the stream
        self._source = copy.deepcopy(space)
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.max_length = max_length
        self.t = 0
        self.length = 1

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode of random length; the space that is sampled is seeded anew."""
        super().reset(seed=seed)
        self._source.seed(int(self.np_random.integers(2**31)))
        self.t = 0
        self.length = int(self.np_random.integers(1, self.max_length + 1))
        return self._source.sample(), {}

    def step(self, action: Any) -> Step:
        """Sample the next observation; the reward is the action's digest."""
        self.t += 1
        reward = float(digest(canonical(self.action_space, action)))
        ended = self.t >= self.length
        by_limit = ended and bool(self.np_random.random() < 0.5)
        return self._source.sample(), reward, ended and not by_limit, by_limit, {}


class MixedInfo(Counter):
    """Reports infos of every awkward kind, different from slot to slot and from step to step.

    Which keys are there, and whether a number is an int or a float, depends on the seed of the
    last seeded reset plus t, so neighbouring slots disagree about types in the same step.
    """

    def __init__(self, length: int | None = 5, limit: int | None = None) -> None:
        super().__init__(length, limit)
        self.base = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode; its info tells the episode's number."""
        obs, _ = super().reset(seed=seed, options=options)
        if seed is not None:
            self.base = seed
        return obs, self.info()

    def step(self, action: Any) -> Step:
        """Count one step and report the infos that are due."""
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self.info()

    def info(self) -> Info:
        """The info of this very step: the test's reference."""
        k = self.base + self.t
        info: Info = {
            "steady": self.t,
            "mixed": k if k % 2 else k + 0.5,
            "flag": k % 2 == 0,
            "array": np.full(2, k, np.float32),
            "ragged": np.arange(k % 3, dtype=np.int64),
            "text": f"step {k}",
            "nested": {"depth": k, "inner": {"half": k / 2}},
            "items": [k, str(k)],
            "nothing": None,
        }
        if k % 3 == 0:
            info["sometimes"] = k
        if k % 2 == 0:
            info["nested"]["even"] = True
        # beyond 2**53 a float64 can no longer tell neighbours apart
        info["large"] = 2**60 + 1 if k % 2 else 0.25
        return info


class TaskCounter(Counter):
    """Says what it was reset with: observation ``[seed, task, episodes, t]``.

    `seed` is -1 when the last reset got none; `task` is ``options["task"]``, or stays what it
    was when the options name none (0 at first). The reset's info repeats both and holds the
    options as text, so that even options this class does not know can be checked.
    """

    def __init__(self, length: int | None = 3, limit: int | None = None) -> None:
        super().__init__(length, limit)
        self.observation_space = spaces.Box(-1, 2**62, (4,), np.int64)
        self.seed_given = -1
        self.task = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode and remember what was asked for."""
        self.seed_given = -1 if seed is None else int(seed)
        self.task = int((options or {}).get("task", self.task))
        obs, _ = super().reset(seed=seed, options=options)
        shown = {key: (options or {})[key] for key in sorted(options or {})}
        return obs, {"seed": self.seed_given, "task": self.task, "options": repr(shown)}

    def observation(self) -> Any:
        """Seed, task, number of the episode, and t."""
        return np.array([self.seed_given, self.task, self.episodes, self.t], dtype=np.int64)


class VectorCounter(VectorEnv[Any, Any, Any]):
    """A natively vectorised `Counter`: environment i of the vector terminates at `lengths[i]`.

    Args:
        lengths: one number of steps per environment.
        autoreset_mode: what the vector does by itself at the end of an episode.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        self.num_envs = len(lengths)
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.single_observation_space = spaces.Box(0, 2**31, (1,), np.int64)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.lengths = np.array(lengths, dtype=np.int64)
        self.mode = autoreset_mode
        self.t = np.zeros(self.num_envs, dtype=np.int64)
        self.ended = np.zeros(self.num_envs, dtype=bool)

    def reset(self, *, seed: Any = None, options: Info | None = None) -> tuple[Any, Info]:
        """Set the counts to zero, or only those of ``options["reset_mask"]``."""
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, dtype=bool))
        self.t[mask] = 0
        self.ended[mask] = False
        return self.t[:, None].copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Info]:
        """Count one step in every environment that is not being reset."""
        again = self.ended & (self.mode == AutoresetMode.NEXT_STEP)
        self.t = np.where(again, 0, self.t + 1)
        self.ended = self.t >= self.lengths
        rewards = self.t.astype(np.float64)
        infos: Info = {}
        if self.mode == AutoresetMode.SAME_STEP and self.ended.any():
            final = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(self.ended):
                final[i] = np.array([self.t[i]])
            mask = self.ended.copy()
            infos = {"final_obs": final, "_final_obs": mask}
            infos |= {"final_info": {}, "_final_info": mask.copy()}
            self.t = np.where(self.ended, 0, self.t)
        terminated = self.ended.copy()
        return self.t[:, None].copy(), rewards, terminated, np.zeros_like(terminated), infos
