"""What goes wrong while trials are collected in parallel: the cause is named, and the remedy.

Each trouble that the guide to parallel collection lists is provoked here.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envfleet.errors import EnvNotImportable, SlotQuarantined, StillInFlight
from envfleet.meta import Learner
from envfleet.meta.remedies import LEARNER_REMEDIES
from envfleet.meta.training import _TrainingJob
from envfleet.runs.time_report import verdict_so_far
from tests.unit.meta.learners import held, same

POLICY = {"seq_model": "gru", "rnn_hidden_size": 8}


def learner(env_name, workers, **env):
    return Learner(
        env_args={
            "env_name": env_name,
            "num_train_tasks": 4,
            "num_parallel_workers": workers,
            **env,
        },
        train_args={"buffer_size": 2000},
        policy_args=POLICY,
    )


class TestAWorkerThatHangs:
    def test_is_replaced_and_the_rollouts_are_the_same(self, tmp_path):
        name, mark = "tests.faults.meta_envs:HangsOnce", tmp_path / "hung"
        mark.touch()
        with learner(name, 1, env_kwargs={"mark": str(mark)}) as alone:
            alone.collect_rollouts(4)
            wanted = held(alone)
        mark.unlink()
        with learner(name, 2, step_timeout_s=1.0, env_kwargs={"mark": str(mark)}) as together:
            together.collect_rollouts_parallel(4, parallel_env=together.train_env_parallel)
            assert mark.exists()
            assert together.train_env_parallel.fleet.incidents[0].kind == "timeout"
            assert same(wanted, held(together))

    def test_again_and_again_is_given_up_with_its_cause_and_its_remedy(self):
        name = "tests.faults.meta_envs:HangsAlways"
        with learner(name, 2, step_timeout_s=0.3) as together:
            with pytest.raises(SlotQuarantined) as caught:
                together.collect_rollouts_parallel(2, parallel_env=together.train_env_parallel)
            assert "step" in str(caught.value)
            assert "0.3" in str(caught.value)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_send_without_its_recv_before_collecting_is_an_error_and_loses_nothing(worker):
    with learner("PointRobot-v0", 2) as together:
        parallel = together.train_env_parallel
        parallel.remotes[worker].send(("reset", {"task": 0}))
        with pytest.raises(StillInFlight, match=f"worker {worker} was asked for a reset"):
            together.collect_rollouts_parallel(1, parallel_env=parallel)
        assert parallel.remotes[worker].recv()[0].shape == (3,)
        assert together.collect_rollouts_parallel(1, parallel_env=parallel) == 120


class TestNoSpeedUp:
    def test_is_answered_by_what_takes_the_time(self, tmp_path):
        with learner("PointRobot-v0", 2) as together:
            parallel = together.train_env_parallel
            act = together.agent.act

            def slow(*args):
                for _ in range(30):
                    act(*args)
                return act(*args)

            together.agent.act = slow
            together.collect_rollouts_parallel(2, parallel_env=parallel)
            setup = _TrainingJob(together, tmp_path).setup
            said = verdict_so_far(together.seconds, setup, LEARNER_REMEDIES)
        assert " inference: the policy is the bottleneck, not the environments" in said
        assert "env.num_parallel_workers=4" in said

    def test_by_updates_says_that_workers_will_not_help(self, tmp_path):
        with learner("PointRobot-v0", 1) as alone:
            alone.collect_rollouts(1, random_actions=True)
            alone.update(20)
            setup = _TrainingJob(alone, tmp_path).setup
            said = verdict_so_far(alone.seconds, setup, LEARNER_REMEDIES)
        assert "learning: the agent learns, so more env.num_parallel_workers will not help" in said


FEW_FILES = """
import resource
from envfleet.cli import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
    words = ["env.env_name=PointRobot-v0", "env.num_train_tasks=4", "train.num_iters=1",
             "policy.rnn_hidden_size=8", "train.num_updates_per_iter=1", "train.buffer_size=20000",
             "eval.log_tensorboard=false", "env.num_processes={processes}"]
    raise SystemExit(main(["meta", *words, "--num-parallel-workers", "64", "--plain",
                           "--checkpoint-dir", "run"]))
"""


class TestTooManyOpenFiles:
    def run(self, folder: Path, limit: int, processes: int):
        program = folder / "program.py"
        program.write_text(FEW_FILES.format(limit=limit, processes=processes))
        return subprocess.run(
            [sys.executable, program],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def test_is_one_sentence_with_the_remedies(self, tmp_path):
        done = self.run(tmp_path, 60, 16)
        assert done.returncode != 0
        assert "16 workers need about" in done.stderr
        assert "ulimit -n" in done.stderr
        assert "Traceback" not in done.stderr

    def test_does_not_happen_with_many_workers_in_few_processes(self, tmp_path):
        done = self.run(tmp_path, 120, 2)
        assert done.returncode == 0, done.stderr


def test_a_module_that_workers_cannot_import_is_named(tmp_path, monkeypatch):
    source = "from tests.faults.meta_envs import HangsAlways as Here\n\n\n"
    (tmp_path / "only_here_meta.py").write_text(
        source + "def make(**kwargs):\n    return Here(**kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("only_here_meta")
    monkeypatch.undo()
    try:
        with pytest.raises(EnvNotImportable) as caught:
            learner("only_here_meta:make", 2)
    finally:
        del sys.modules["only_here_meta"]
    assert "No module named 'only_here_meta'" in str(caught.value)
    assert "PYTHONPATH" in str(caught.value)


def test_after_an_error_the_next_collection_works(tmp_path):
    with learner("PointRobot-v0", 2) as together, learner("PointRobot-v0", 1) as alone:
        act, calls = together.agent.act, []

        def failing(*args):
            calls.append(0)
            if len(calls) == 5:
                raise RuntimeError("the policy failed")
            return act(*args)

        together.agent.act = failing
        with pytest.raises(RuntimeError, match="the policy failed"):
            together.collect_rollouts_parallel(3, parallel_env=together.train_env_parallel)
        together.collect_rollouts_parallel(3, parallel_env=together.train_env_parallel)
        alone.collect_rollouts(3)
        assert same(held(alone), held(together))
        assert np.isfinite(held(alone)["obs"]).all()
