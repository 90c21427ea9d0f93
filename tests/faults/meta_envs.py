"""Environments that make trouble while trials are collected."""

import os
import time
from pathlib import Path
from typing import Any

from envfleet.meta.navigation import PointEnv


class HangsOnce(PointEnv):
    """Blocks in its tenth step, in the first process that gets so far."""

    def __init__(self, mark: str, **task_args: Any) -> None:
        super().__init__("PointRobot", **task_args)
        self._mark, self._steps, self._max_episode_steps = Path(mark), 0, 20

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 10:
            try:
                os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                time.sleep(3600)
        found, reward, terminated, _, info = super().step(action)
        is_over = self._steps % 20 == 0
        return found, reward, terminated, is_over, info

    def _begin(self) -> Any:
        self._steps = 0
        return super()._begin()


class Slow(PointEnv):
    """Takes a while for each step."""

    def __init__(self, **task_args: Any) -> None:
        super().__init__("PointRobot", **task_args)
        self._steps, self._max_episode_steps = 0, 10

    def step(self, action: Any) -> Any:
        time.sleep(0.01)
        self._steps += 1
        found, reward, terminated, _, info = super().step(action)
        return found, reward, terminated, self._steps % 10 == 0, info

    def _begin(self) -> Any:
        self._steps = 0
        return super()._begin()


class HangsAlways(PointEnv):
    """Blocks in its first step, in whichever process it is."""

    def __init__(self, **task_args: Any) -> None:
        super().__init__("PointRobot", **task_args)
        self._max_episode_steps = 20

    def step(self, action: Any) -> Any:
        time.sleep(3600)
