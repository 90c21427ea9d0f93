"""The code and the YAML of the guide to parallel collection run as they are written there.

Only the first line differs: the two functions are imported from `envfleet.meta`.
"""

import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from envfleet import meta
from envfleet.meta import Learner, load_config

IN_LEARNER = """
from envfleet.meta import make_env, make_parallel_env

# In learner.py init_env method:
class Learner:
    def init_env(self, env_type, env_name, max_rollouts_per_task,
                 num_train_tasks, num_eval_tasks, num_parallel_workers=4, **kwargs):

        # Create single env for evaluation
        self.eval_env = make_env(
            env_name,
            max_rollouts_per_task,
            seed=self.seed + 1,
            num_train_tasks=num_train_tasks,
            num_eval_tasks=num_eval_tasks,
            **kwargs,
        )

        # Create parallel envs for training
        if num_parallel_workers > 1:
            self.train_env_parallel = make_parallel_env(
                env_name,
                max_rollouts_per_task,
                num_workers=num_parallel_workers,
                seed=self.seed,
                num_train_tasks=num_train_tasks,
                num_eval_tasks=num_eval_tasks,
                **kwargs,
            )
        else:
            self.train_env_parallel = None

        # Also keep single env for compatibility
        self.train_env = make_env(
            env_name,
            max_rollouts_per_task,
            seed=self.seed,
            num_train_tasks=num_train_tasks,
            num_eval_tasks=num_eval_tasks,
            **kwargs,
        )
"""

IN_TRAIN = """
# In learner.py train method:
def train(self):
    self._start_training()

    # Initial pool collection
    if self.num_init_rollouts_pool > 0:
        logger.log("Collecting initial pool of data..")
        while self._n_env_steps_total < self.num_init_rollouts_pool * self.max_trajectory_len:
            # Use parallel collection if available
            self.collect_rollouts_parallel(
                num_rollouts=1,
                random_actions=True,
                parallel_env=self.train_env_parallel,  # Will fallback to sequential if None
            )

    # Main training loop
    while self._n_env_steps_total < self.n_env_steps_total:
        # Collect data in parallel
        env_steps = self.collect_rollouts_parallel(
            num_rollouts=self.num_rollouts_per_iter,
            parallel_env=self.train_env_parallel,
        )

        # Update policy
        train_stats = self.update(...)
        self.log_train_stats(train_stats)
"""

TASK_ASSIGNMENT = """
# In collect_rollouts_parallel:
for worker_id in range(num_workers):
    task = self.train_tasks[np.random.randint(len(self.train_tasks))]
    parallel_env.remotes[worker_id].send(('reset', {'task': task}))
"""

CONFIGURATION = """
# In your config YAML
env:
  env_type: meta
  env_name: AntDir-v0
  max_rollouts_per_task: 2
  num_train_tasks: 50
  num_eval_tasks: 20
  num_parallel_workers: 6  # NEW: Number of parallel environment workers

train:
  num_rollouts_per_iter: 12  # Will be distributed across 6 workers (2 each)
  ...
"""


def as_written(code: str, **names: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"np": np, **names}
    exec(textwrap.dedent(code), found)
    return found


def test_the_code_of_the_document_runs():
    said: list[str] = []
    written: type = as_written(IN_LEARNER)["Learner"]
    train = as_written(IN_TRAIN, logger=SimpleNamespace(log=said.append))["train"]
    mine = type("Mine", (written, Learner), {"train": train})
    sections = {
        "env_args": {
            "env_type": "meta",
            "env_name": "PointRobot-v0",
            "max_rollouts_per_task": 2,
            "num_train_tasks": 5,
            "num_eval_tasks": 2,
            "num_parallel_workers": 2,
        },
        "train_args": {
            "num_iters": 2,
            "num_init_rollouts_pool": 2,
            "num_rollouts_per_iter": 3,
            "num_updates_per_iter": 1,
            "buffer_size": 2000,
        },
        "policy_args": {"seq_model": "gru", "rnn_hidden_size": 8},
        "seed": 0,
    }
    with mine(**sections) as learner:
        learner.train()
        assert said == ["Collecting initial pool of data.."]
        assert learner._n_env_steps_total == learner.n_env_steps_total == 120 * (2 + 2 * 3)
        assert learner._n_rl_update_steps_total == 2
        parallel_env = learner.train_env_parallel
        as_written(TASK_ASSIGNMENT, self=learner, parallel_env=parallel_env, num_workers=2)
        assert [remote.recv()[0].shape for remote in parallel_env.remotes] == [(3,), (3,)]
        del parallel_env
    with Learner(**sections) as ours:
        pool = ours.collect_rollouts(2, random_actions=True)
        assert pool == 240
        assert ours.train_tasks == learner.train_tasks


def test_the_yaml_of_the_document_is_a_configuration(tmp_path):
    path = tmp_path / "ant_dir.yaml"
    path.write_text(CONFIGURATION)
    config = load_config(path)
    assert config.env.num_parallel_workers == 6
    assert config.train.num_rollouts_per_iter == 12
    sections = yaml.safe_load(CONFIGURATION.replace("  ...", ""))
    with Learner(
        env_args=sections["env"], train_args=sections["train"], eval_args={}, policy_args={}, seed=0
    ) as learner:
        assert learner.train_env_parallel.num_workers == 6
        env_steps = learner.collect_rollouts_parallel(
            num_rollouts=7, random_actions=False, parallel_env=learner.train_env_parallel
        )
        assert 0 < env_steps <= 7 * 400
        assert env_steps == learner._n_env_steps_total


def test_its_names_are_those_of_the_package():
    for name in ("make_env", "make_parallel_env", "Learner", "VariBadWrapper", "AGENT_ARCHS"):
        assert name in meta.__all__
        assert getattr(meta, name) is not None
