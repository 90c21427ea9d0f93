"""Environments that end what they live in, once: an actor of Ray, or the whole node."""

import os
import signal
from pathlib import Path
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv


class EndsIts(CartPoleEnv):
    """CartPole that kills a process when its first episode gets far enough.

    It does so on the node `victim` only, and not if the file `marker` is there already.
    """

    def __init__(self, what: str, marker: str, victim: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._what, self._marker, self._victim = what, Path(marker), victim
        self._steps = 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 40 and not self._marker.exists():
            import ray

            if ray.get_runtime_context().get_node_id() == self._victim:
                self._marker.touch()
                os.kill(os.getppid() if self._what == "node" else os.getpid(), signal.SIGKILL)
                while True:  # the raylet takes its workers along
                    signal.pause()
        return super().step(action)
