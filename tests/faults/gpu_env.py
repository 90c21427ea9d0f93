"""An environment on a device; workers import it without what learners need."""

import os
import threading
from typing import Any

import gymnasium


class Gpu:
    """A device with threads of its own that a fork does not take along, as CUDA's."""

    def __init__(self) -> None:
        self.is_done = threading.Event()
        self.owner = os.getpid()
        self.thread = threading.Thread(target=self.is_done.wait)
        self.thread.start()

    def compute(self) -> None:
        if os.getpid() != self.owner:
            raise RuntimeError("cannot use the device in a forked process; use 'spawn'")


class OnGpu(gymnasium.Env[Any, Any]):
    """Steps on the device of its process."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)
    gpu: Gpu | None = None

    def __init__(self) -> None:
        type(self).gpu = self.gpu or Gpu()
        assert self.gpu is not None
        self.gpu.compute()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        assert self.gpu is not None
        self.gpu.compute()
        return 1, 0.0, False, False, {}

    def close(self) -> None:
        if self.gpu is not None:
            self.gpu.is_done.set()
