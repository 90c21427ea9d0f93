"""Small environments for tests of the manager: well-behaved, failing, killing and slow ones."""

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.llm.environments.base import Mode, Step, TextEnv, TextEnvConfig
from envfleet.llm.registry import register_env
from tests.gates import wait_for


@dataclass(slots=True, kw_only=True)
class ClimbConfig(TextEnvConfig):
    action_lookup: dict[int, str] | None = field(default_factory=lambda: {1: "Up", 2: "Down"})
    goal: int = 4


class Climb(TextEnv):
    """Go up `goal` steps, from where the seed says; the ground shakes by chance."""

    config_class = ClimbConfig
    config: ClimbConfig

    def _begin(self, seed: int, mode: Mode) -> None:
        self._random = random.Random(seed)
        self._floor, self._mode = self._random.randint(0, 2), mode

    def _act(self, action: Any) -> Step:
        self._floor += 1 if action == 1 else -1
        is_there = self._floor >= self.config.goal
        info = {"success": is_there, "shake": self._random.random(), "word": "no number"}
        return self._text(), 1.0 if is_there else -0.1, is_there, False, info

    def _text(self) -> str:
        return f"{self._mode}: floor {self._floor} of {self.config.goal}"


@dataclass
class TroubleConfig:
    action_lookup: None = None
    folder: str = ""
    """Where it counts what it has done, for troubles that pass."""
    reset_s: float = 0.0
    """How long a beginning keeps a processor busy."""
    deadly: dict[int, int] = field(default_factory=dict)
    """Seeds whose beginnings end their process, and by which signal; 0 just ends it."""
    hangs: int = -1
    """The seed whose first beginning hangs."""


class Trouble:
    """Does what it is told, in the older form: reset(seed, mode), four results of a step."""

    def __init__(self, config: TroubleConfig) -> None:
        if Path(config.folder, "closed").exists():
            raise RuntimeError("no licence left")
        if Path(config.folder, "exits").exists():
            raise SystemExit("no licence left")
        self.config = config
        if Path(config.folder, "deadly").exists():
            self._end_worker(0)

    def reset(self, seed: int, mode: str) -> None:
        if seed == 666:
            raise RuntimeError("no such episode")
        if seed in self.config.deadly:
            self._end_worker(self.config.deadly[seed])
        if seed == self.config.hangs and self._is_first("hang"):
            time.sleep(60)
        until_s = time.perf_counter() + self.config.reset_s
        while time.perf_counter() < until_s:
            pass
        self._said: list[str] = [f"{mode} {seed}"]

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        match action:
            case "raise":
                raise ValueError("it was told to raise")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(7)
            case "crash once" if self._is_first("crash"):
                os.kill(os.getpid(), signal.SIGSEGV)
            case "killed once" if self._is_first("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            case "killed in workers" if os.getpid() != int(
                Path(self.config.folder, "pid").read_text()
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(60)
            case "hang once" if self._is_first("hang"):
                time.sleep(60)
            case "until told":
                wait_for(Path(self.config.folder, "told"))
            case "wait":
                time.sleep(0.02)
            case "nap":
                time.sleep(0.3)
            case "NaN":
                return "", float("nan"), False, {}
            case "odd lookup":
                self.config.action_lookup = {1: 5}  # type: ignore[assignment]
        self._said.append(action)
        is_done = action == "done"
        info: dict[str, Any] = {"success": is_done, "said": len(self._said), "all": self._said}
        if action == "odd success":
            info["success"] = np.array([True, False])
        if action == "huge":
            info["number"] = 10**400
        return action, 0.5, is_done, info

    def render(self) -> Any:
        return 3 if self._said[-1] == "odd render" else " ".join(self._said)

    def _end_worker(self, number: int) -> None:
        if os.getpid() == int(Path(self.config.folder, "pid").read_text()):
            Path(self.config.folder, "here").touch()
            raise AssertionError("this would have ended the whole program")
        os.kill(os.getpid(), number)
        os._exit(7)

    def _is_first(self, what: str) -> bool:
        mark = Path(self.config.folder, what)
        if mark.exists():
            return False
        mark.touch()
        return True


class News:
    """Shows what is new since it was looked at last."""

    def __init__(self, config: TroubleConfig) -> None:
        self.config = config

    def reset(self, seed: int, mode: str) -> None:
        self._news, self._count = [f"{mode} {seed}"], 0

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._count += 1
        self._news.append(f"{self._count}. {action}")
        return action, 0.5, False, {}

    def render(self) -> str:
        news, self._news = self._news, []
        return " ".join(news)


@dataclass(slots=True, kw_only=True)
class PictureConfig(TextEnvConfig):
    render_mode: str = "rgb_array"


class Picture(TextEnv):
    """Shows one picture, whose colour is what was said last."""

    config_class = PictureConfig
    metadata = {"render_modes": ["text", "rgb_array"]}  # noqa: RUF012

    def _begin(self, seed: int, mode: Mode) -> None:
        self._colour = seed % 256

    def _act(self, action: Any) -> Step:
        self._colour = len(action)
        return self._text(), 0.0, False, False, {}

    def _text(self) -> str:
        return str(self._colour)

    def _picture(self) -> Any:
        return np.full((2, 3, 3), self._colour, np.uint8)


def register() -> None:
    """Make them known by name."""
    register_env("climb", Climb, replace=True)
    register_env("trouble", Trouble, TroubleConfig, replace=True)
    register_env("news", News, TroubleConfig, replace=True)
    register_env("picture", Picture, replace=True)


def config(*tags: tuple[str, int], group_size: int = 2, **manager: Any) -> dict[str, Any]:
    """A configuration with groups of these tags."""
    names = {"Climb": "climb", "Trouble": "trouble", "News": "news", "Picture": "picture"}
    block = {
        "env_groups": sum(count for _, count in tags),
        "group_size": group_size,
        "env_configs": {
            "tags": [name for name, _ in tags],
            "n_groups": [count for _, count in tags],
        },
    }
    return {
        "es_manager": {"use_multiprocessing": False, "train": block, "val": block, **manager},
        "custom_envs": {
            name: {"env_type": kind, "max_actions_per_traj": 5, "env_config": None}
            for name, kind in names.items()
        },
    }


def inputs(**actions_of: list[Any]) -> list[dict[str, Any]]:
    """Turns by environment: e0=["Up"]."""
    return [
        {
            "env_id": int(name[1:]),
            "llm_response": "r",
            "llm_raw_response": "raw",
            "actions": actions,
        }
        for name, actions in actions_of.items()
    ]
