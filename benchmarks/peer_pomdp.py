r"""pomdp-baselines' collect_rollouts, run by an interpreter of its own.

    git clone https://github.com/twni2016/pomdp-baselines && git -C pomdp-baselines checkout 28cb5dd
    python -m venv pomdp
    pomdp/bin/pip install torch gym==0.25.2 "numpy<2" tensorboardX future_fstrings ruamel.yaml \
        absl-py python-dateutil colorlog cloudpickle matplotlib scikit-learn seaborn "pandas<2.3"
    ENVFLEET_POMDP_PYTHON=pomdp/bin/python ENVFLEET_POMDP_BASELINES=pomdp-baselines \
        python benchmarks/meta.py --rows pomdp-baselines

It needs an old gym, which Gymnasium has replaced. This file is both the contender, and the script
that the other interpreter runs: it answers each line with seconds by a line "steps seconds".
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

PYTHON, FOLDER = "ENVFLEET_POMDP_PYTHON", "ENVFLEET_POMDP_BASELINES"


class PomdpBaselines:
    """The contender: one environment, one action at a time."""

    key, label = "pomdp", "pomdp-baselines collect_rollouts"

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Start it, and make its learner."""
        python, folder = os.environ.get(PYTHON), os.environ.get(FOLDER)
        if python is None or folder is None:
            raise RuntimeError(
                f"pomdp-baselines has an interpreter of its own: set {PYTHON} to it, and {FOLDER} "
                "to the repository"
            )
        self._process = subprocess.Popen(
            [python, os.path.abspath(__file__), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
        assert self._process is not None
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("answer "):  # its collection prints too
                return line.removeprefix("answer ")
        raise RuntimeError("its interpreter has ended; its error is on standard error")


def _serve(folder: str) -> None:
    import collections
    import collections.abc

    sys.path.insert(0, folder)
    os.chdir(folder)
    collections.Set = collections.abc.Set  # type: ignore[attr-defined]  # where it used to be
    from policies.learner import Learner  # type: ignore[import-not-found]
    from torchkit.pytorch_utils import set_gpu_mode  # type: ignore[import-not-found]

    set_gpu_mode(False)
    learner = Learner(
        env_args={
            "env_type": "meta",
            "env_name": "PointRobot-v0",
            "max_rollouts_per_task": 2,
            "num_tasks": 70,
            "num_train_tasks": 50,
            "num_eval_tasks": 20,
        },
        train_args={
            "num_iters": 1,
            "num_init_rollouts_pool": 1,
            "num_rollouts_per_iter": 1,
            "buffer_size": 100_000,
            "batch_size": 32,
            "sampled_seq_len": -1,
            "sample_weight_baseline": 0.0,
            "num_updates_per_iter": 1,
            "buffer_type": "seq_efficient",
        },
        eval_args={
            "eval_stochastic": False,
            "log_interval": 1,
            "save_interval": -1,
            "log_tensorboard": False,
        },
        policy_args={
            "seq_model": "gru",
            "separate": True,
            "algo_name": "sac",
            "action_embedding_size": 8,
            "observ_embedding_size": 32,
            "reward_embedding_size": 8,
            "rnn_hidden_size": 128,
            "dqn_layers": [128, 128],
            "policy_layers": [128, 128],
            "lr": 3e-4,
            "gamma": 0.99,
            "tau": 0.005,
            "sac": {"entropy_alpha": 0.2, "automatic_entropy_tuning": True, "alpha_lr": 3e-4},
        },
        seed=0,
    )
    learner._start_training()
    print("answer ready", flush=True)
    for line in sys.stdin:
        seconds = float(line)
        steps, start_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < seconds:
            steps += int(learner.collect_rollouts(num_rollouts=1))
        print("answer", steps, elapsed_s, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
