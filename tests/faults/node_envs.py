"""Environments that end what they live in, once: an actor of Ray, or the whole node."""

import os
import signal
from pathlib import Path
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv


class EndsIts(CartPoleEnv):
    """CartPole that kills a process when its first episode gets far enough.

    `victims` says what it kills on which node, "actor" or "node". Each happens once: then its name
    is that of a file in `folder`.
    """

    def __init__(self, folder: str, victims: dict[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._folder, self._victims = Path(folder), victims
        self._steps = 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 40 and self._victims:
            import ray

            what = self._victims.get(ray.get_runtime_context().get_node_id())
            if what is not None and not (self._folder / what).exists():
                (self._folder / what).touch()
                os.kill(os.getppid() if what == "node" else os.getpid(), signal.SIGKILL)
                while True:  # the raylet takes its workers along
                    signal.pause()
        return super().step(action)
