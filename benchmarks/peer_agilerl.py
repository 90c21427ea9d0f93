"""AgileRL's AsyncPettingZooVecEnv, run by the interpreter of a virtual environment of its own.

AgileRL needs an older PettingZoo than envfleet. So the first use makes a virtual environment with
what `agilerl.vector` imports, about 1 GB in `~/.cache/envfleet`; ENVFLEET_AGILERL_PYTHON names the
interpreter of another one. This file is both the contender, and the script that the other
interpreter runs: it answers each line with seconds by a line "steps seconds".
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
VERSION = "2.58.0"
PACKAGES = (
    "torch==2.13.0",
    "tensordict==0.13.0",
    "pettingzoo==1.26.1",
    "mpe2==1.1.1",
    "accelerate==1.15.0",
    "dill==0.4.1",
    "lazy-loader==0.6",
    "cloudpickle==3.1.2",
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
)
"""What `agilerl.vector` and its tests import; all that AgileRL asks for would be 200 packages."""


def interpreter() -> str:
    """The Python of AgileRL's virtual environment, which is made if there is none."""
    if (given := os.environ.get(VARIABLE)) is not None:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "envfleet" / f"agilerl-{VERSION}"
    python = folder / "bin" / "python"
    is_done = folder / "is_complete"  # a download may have been interrupted
    if not is_done.exists():
        print(f"making {folder} for AgileRL", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *PACKAGES], check=True)
        subprocess.run([*install, "--no-deps", f"agilerl=={VERSION}"], check=True)
        is_done.touch()
    return str(python)


class AgileRL:
    """The contender: one process per environment, as AgileRL has it."""

    key, label = "agilerl", "AgileRL AsyncPettingZooVecEnv"

    def __init__(self, env: str, num_envs: int) -> None:
        """Name the environment as "module:function"."""
        self._env, self._num_envs = env, num_envs
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Start it and reset its environments."""
        command = [interpreter(), __file__, self._env, str(self._num_envs)]
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
