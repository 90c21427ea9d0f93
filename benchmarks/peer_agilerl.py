"""AgileRL's AsyncPettingZooVecEnv, run by the interpreter of AgileRL's own virtual environment.

    python -m venv agilerl && agilerl/bin/pip install agilerl==2.58.0 mpe2==1.1.1
    ENVFLEET_AGILERL_PYTHON=agilerl/bin/python python benchmarks/multiagent.py

AgileRL needs an older PettingZoo than envfleet. This file is both the contender, and the script
that the other interpreter runs: it answers each line with seconds by a line "steps seconds".
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "ENVFLEET_AGILERL_PYTHON"
ROOT = Path(__file__).resolve().parents[1]


class AgileRL:
    """The contender: one process per environment, as AgileRL has it."""

    key, label = "agilerl", "AgileRL AsyncPettingZooVecEnv"

    def __init__(self, env: str, num_envs: int) -> None:
        """Name the environment as "module:function"."""
        self._env, self._num_envs = env, num_envs
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Start it and reset its environments."""
        python = os.environ.get(VARIABLE)
        if python is None:
            raise RuntimeError(f"AgileRL has an interpreter of its own: set {VARIABLE} to it")
        command = [python, __file__, self._env, str(self._num_envs)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, seconds: float) -> Any:
        """Step for about `seconds`."""
        from envfleet.cli.measure import Slice

        assert self._process is not None
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        steps, elapsed_s = self._answer().split()
        return Slice(int(steps), float(elapsed_s))

    def close(self) -> None:
        """End the other interpreter."""
        if self._process is not None:
            self._process.communicate(timeout=60)

    def _answer(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("AgileRL's interpreter has ended; its error is on standard error")
        return line


def _serve(env: str, num_envs: int) -> None:
    import importlib

    from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv

    sys.path.insert(0, str(ROOT))
    module, _, name = env.partition(":")
    make = getattr(importlib.import_module(module), name)
    envs = AsyncPettingZooVecEnv([make for _ in range(num_envs)])
    envs.reset(seed=0)
    actions = {name: envs.action_space(name).sample() for name in envs.agents}
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = float(line)
        steps, start_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < seconds:
            envs.step(actions)
            steps += num_envs
        print(steps, elapsed_s, flush=True)
    envs.close()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
