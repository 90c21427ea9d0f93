"""RLlib's EnvRunners, run by an interpreter of their own.

RLlib asks for an older Gymnasium than envfleet, and runs with ours. So the first use puts the two
packages that it needs besides into `~/.cache/envfleet`, where only that interpreter finds them;
ENVFLEET_RLLIB_PACKAGES names another folder. This file is both the contender, and the script that
the other interpreter runs: it answers each line with seconds by a line "steps seconds".

Both sides collect with a network of two layers of 64 and send weights to the nodes before each
rollout. RLlib's come back as episodes, as its PPO gets them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "ENVFLEET_RLLIB_PACKAGES"
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lz4==4.4.5", "ormsgpack==1.13.1")


def packages() -> str:
    """The folder with what RLlib needs besides, which is made if there is none."""
    if (given := os.environ.get(VARIABLE)) is not None:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "envfleet" / "rllib"
    is_done = folder / "is_complete"  # a download may have been interrupted
    if not is_done.exists():
        print(f"making {folder} for RLlib", file=sys.stderr, flush=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*install, "--target", str(folder), *PACKAGES], check=True)
        is_done.touch()
    return str(folder)


class RLlib:
    """The contender: EnvRunners on two nodes of one core each."""

    def __init__(self, env: str, num_envs: int, n_steps: int) -> None:
        self.key, self.label = "rllib", "RLlib EnvRunners, two nodes of one core"
        self._arguments = [env, str(num_envs), str(n_steps)]
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Start its cluster and its runners."""
        paths = [str(ROOT), packages(), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._answer()

    def run(self, seconds: float) -> Any:
        """Collect for about `seconds`."""
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
        """Its next answer; Ray prints lines of its own."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ")
        raise RuntimeError("RLlib's interpreter has ended; its error is on standard error")


def _serve(env: str, num_envs: int, n_steps: int) -> None:
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.execution.rollout_ops import synchronous_parallel_sample

    from benchmarks.cluster_contenders import LocalCluster

    cluster = LocalCluster(2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    config = (
        PPOConfig()
        .environment(env)
        .env_runners(
            num_env_runners=2,
            num_cpus_per_env_runner=1,
            num_envs_per_env_runner=num_envs // 2,
            rollout_fragment_length=n_steps,
        )
        .resources(num_cpus_for_main_process=0)
        .learners(num_learners=0)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64]))
        .training(train_batch_size_per_learner=num_envs * n_steps)
    )
    algorithm = config.build_algo()
    runners: Any = algorithm.env_runner_group
    learners = algorithm.learner_group

    def collect() -> int:
        runners.sync_weights(from_worker_or_learner_group=learners, inference_only=True)
        episodes: Any = synchronous_parallel_sample(
            worker_set=runners,
            max_env_steps=num_envs * n_steps,
            concat=True,
            _uses_new_env_runners=True,  # as RLlib's own PPO says
        )
        return sum(map(len, episodes))

    collect()
    print("answer ready", flush=True)
    for line in sys.stdin:
        seconds = float(line)
        steps, start_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < seconds:
            steps += collect()
        print("answer", steps, elapsed_s, flush=True)
    algorithm.stop()
    ray.shutdown()
    cluster.close()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
