"""The third-party environments of benchmarks/third_party.py: what to install, and how to build one.

Everything is imported where it is used: the interpreters that use this file have one family of
packages each. Time limits are short, so that episodes end within a check.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np

TIME_LIMIT = 40
"""Steps of an episode."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An environment to be checked."""

    name: str
    family: str
    """Environments of one family share an interpreter."""
    packages: tuple[str, ...]
    build: Callable[[], gymnasium.Env[Any, Any]]
    num_workers: int = 2
    """As many as environments where a process can have one only."""


def by_id(env_id: str, *modules: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """An environment by its Gymnasium id, after importing the modules that register it."""
    for name in modules:
        module = importlib.import_module(name)
        if env_id not in gymnasium.registry and name in ("ale_py", "minigrid"):
            gymnasium.register_envs(module)
    kwargs = {"max_episode_steps": TIME_LIMIT, "disable_env_checker": True, **kwargs}
    return gymnasium.make(env_id, **kwargs)


def preprocessed_pong() -> gymnasium.Env[Any, Any]:
    """Pong as agents of the literature see it."""
    env = by_id("ALE/Pong-v5", "ale_py", frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def crafter() -> gymnasium.Env[Any, Any]:
    """Crafter has the interface of Gym before 0.26."""
    return gymnasium.wrappers.TimeLimit(_Crafter(), TIME_LIMIT)


def airstriker() -> gymnasium.Env[Any, Any]:
    """The game that stable-retro brings along."""
    import stable_retro

    env = stable_retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")
    return gymnasium.wrappers.TimeLimit(env, TIME_LIMIT)


def hallway() -> gymnasium.Env[Any, Any]:
    """MiniWorld draws by OpenGL; this way it needs no display."""
    import pyglet

    pyglet.options["headless"] = True
    return by_id("MiniWorld-Hallway-v0", "miniworld")


class _Crafter(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        import crafter

        self.action_space = gymnasium.spaces.Discrete(17)
        self.observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self._build = crafter.Env
        self._env = crafter.Env()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._env = self._build(seed=seed)
        return self._env.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, is_over, _ = self._env.step(int(action))
        return obs, float(reward), bool(is_over), False, {}


_BOX2D = ("gymnasium[box2d]",)
_DM_CONTROL = ("shimmy[dm-control]", "mujoco<4")
_ROBOTICS = ("gymnasium-robotics", "mujoco<3.4")
"""They read fields of MuJoCo that later releases do not have."""
_ATARI = ("ale-py", "opencv-python-headless")


def _named(
    env_id: str, family: str, packages: tuple[str, ...], *modules: str, **kwargs: Any
) -> Subject:
    """An environment under its id."""
    return Subject(env_id, family, packages, partial(by_id, env_id, *modules, **kwargs))


SUBJECTS = (
    _named("LunarLander-v3", "box2d", _BOX2D),
    _named("BipedalWalker-v3", "box2d", _BOX2D),
    _named("CarRacing-v3", "box2d", _BOX2D),
    _named("ALE/Pong-v5", "atari", _ATARI, "ale_py"),
    replace(
        _named("ALE/Pong-v5", "atari", _ATARI, "ale_py", obs_type="ram"), name="ALE/Pong-v5, RAM"
    ),
    Subject("ALE/Pong-v5, preprocessed", "atari", _ATARI, preprocessed_pong),
    _named("MiniGrid-DoorKey-6x6-v0", "minigrid", ("minigrid",), "minigrid"),
    _named("BabyAI-GoToRedBall-v0", "minigrid", ("minigrid",), "minigrid"),
    _named("highway-fast-v0", "highway", ("highway-env",), "highway_env"),
    _named("dm_control/cartpole-swingup-v0", "dm_control", _DM_CONTROL, "shimmy"),
    _named("FetchReach-v4", "robotics", _ROBOTICS, "gymnasium_robotics"),
    _named("PointMaze_UMaze-v3", "robotics", _ROBOTICS, "gymnasium_robotics"),
    replace(
        _named("Meta-World/MT1", "metaworld", ("metaworld",), "metaworld", env_name="reach-v3"),
        name="Meta-World/MT1 reach-v3",
    ),
    _named(
        "HopperBulletEnv-v0", "pybullet", ("pybullet_envs_gymnasium",), "pybullet_envs_gymnasium"
    ),
    _named("PandaReach-v3", "panda-gym", ("panda-gym",), "panda_gym"),
    _named("VizdoomBasic-v1", "vizdoom", ("vizdoom",), "vizdoom.gymnasium_wrapper"),
    _named("NetHackScore-v0", "nle", ("nle",), "nle"),
    _named("MiniHack-Room-5x5-v0", "minihack", ("minihack",), "minihack"),
    Subject("crafter.Env", "crafter", ("crafter",), crafter),
    _named("FlappyBird-v0", "flappy-bird", ("flappy-bird-gymnasium",), "flappy_bird_gymnasium"),
    _named("stocks-v0", "anytrading", ("gym-anytrading",), "gym_anytrading"),
    _named("popgym-RepeatPreviousEasy-v0", "popgym", ("popgym",), "popgym"),
    _named("deep-sea-treasure-v0", "mo-gymnasium", ("mo-gymnasium",), "mo_gymnasium"),
    Subject("Airstriker-Genesis-v0", "retro", ("stable-retro",), airstriker, num_workers=3),
    Subject("MiniWorld-Hallway-v0", "miniworld", ("miniworld",), hallway),
    _named("procgen-coinrun-v0", "procgen", ("procgen",), "procgen"),
)
