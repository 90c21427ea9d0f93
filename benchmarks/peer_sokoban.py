"""gym-sokoban as a contender: making levels and stepping.

gym-sokoban imports `gym` and `pkg_resources`. Gymnasium has the same names as gym, so it takes the
place of gym in `sys.modules` while gym-sokoban is imported, and only then.
"""

from __future__ import annotations

import importlib
import random
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import timed
from envfleet.cli.measure import Slice
from envfleet.llm.environments.sokoban import SokobanConfig, SokobanEnv

INSTALL = "pip install --no-deps gym-sokoban==0.0.6 imageio"
SIDE, NUM_BOXES = 8, 2
_GYM = ("", ".spaces", ".spaces.discrete", ".utils", ".utils.seeding", ".envs.registration")


class NotInstalled(RuntimeError):
    """The package of a contender is not installed."""


def gym_sokoban() -> Any:
    """The module of its environment, which also has its level generator."""
    if find_spec("gym_sokoban") is None:
        raise NotInstalled(f"gym-sokoban is not installed; run: {INSTALL}")
    with gymnasium_for_gym(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("gym_sokoban.envs.sokoban_env")


@contextmanager
def gymnasium_for_gym() -> Iterator[None]:
    paths: Any = types.ModuleType("pkg_resources")
    paths.resource_filename = _resource
    stand_ins = {f"gym{name}": importlib.import_module(f"gymnasium{name}") for name in _GYM}
    stand_ins |= {"gym.envs": importlib.import_module("gymnasium.envs"), "pkg_resources": paths}
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _resource(package: str, name: str) -> str:
    file = sys.modules[package].__file__
    assert file is not None
    return str(Path(file).parent / name)


class TheirLevels:
    """gym-sokoban's generator with the settings of its environment, one level after another."""

    key, label = "gym-sokoban", "gym-sokoban's generator"

    def open(self) -> None:
        """Import it."""
        module = gym_sokoban()
        # its environment's default, without generating a level
        usual = module.SokobanEnv((SIDE, SIDE), num_boxes=NUM_BOXES, reset=False).num_gen_steps
        self._settings = {"dim": (SIDE, SIDE), "num_steps": usual, "num_boxes": NUM_BOXES}
        self._generate, self._seeds = module.generate_room, count()

    def run(self, seconds: float) -> Slice:
        """Make levels. A failed attempt counts towards the time of the next level."""
        return timed(self._level, seconds)

    def _level(self) -> int:
        seed = next(self._seeds)
        random.seed(seed)
        np.random.seed(seed)
        while True:
            try:
                self._generate(**self._settings)
            except (RuntimeError, RuntimeWarning):
                continue
            return 1

    def close(self) -> None:
        """Nothing is left open."""


class TheirSteps:
    """gym-sokoban's step, with one of its two kinds of observation."""

    def __init__(self, mode: str, label: str) -> None:
        self.key, self.label, self._mode = f"gym-sokoban-{mode}", label, mode

    def open(self) -> None:
        """Make a room."""
        module = gym_sokoban()
        random.seed(0)
        np.random.seed(0)
        self._env = module.SokobanEnv((SIDE, SIDE), max_steps=10**9, num_boxes=NUM_BOXES)
        self._actions = cycle(_directions())

    def run(self, seconds: float) -> Slice:
        """Walk about."""
        step, actions, mode = self._env.step, self._actions, self._mode

        def steps() -> int:
            for _ in range(10):
                step(next(actions), observation_mode=mode)
            return 10

        return timed(steps, seconds)

    def close(self) -> None:
        """Nothing is left open."""


class OurSteps:
    """A step of envfleet's Sokoban, with its text observation."""

    key, label = "text", "envfleet, text"

    def open(self) -> None:
        """Make a room."""
        room = (SIDE, SIDE)
        config = SokobanConfig(dim_room=room, num_boxes=NUM_BOXES, max_steps=10**9)
        self._env = SokobanEnv(config)
        self._env.reset(seed=0)
        self._actions = cycle(_directions())

    def run(self, seconds: float) -> Slice:
        """Walk about; reset a room that happens to be solved."""
        env, actions = self._env, self._actions

        def steps() -> int:
            for _ in range(100):
                if env.step(next(actions))[2]:
                    env.reset(seed=0)
            return 100

        return timed(steps, seconds)

    def close(self) -> None:
        """Nothing is left open."""


def _directions() -> list[int]:
    chance = random.Random(1)
    return [chance.randrange(1, 5) for _ in range(4096)]
