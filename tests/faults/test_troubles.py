"""Troubles that users of parallel environments report: none of them happens without its cure."""

import functools
import os
import re
import signal
import sys
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordVideo

from envfleet import errors
from envfleet.adapters.sb3 import DummyVecEnv, SubprocVecEnv
from envfleet.multiagent import AECVecEnv, AsyncPettingZooVecEnv, GridWorldEnvParallel
from envfleet.multiagent.grid_world import GridWorldEnvMultiAgent
from tests.faults.gpu_env import OnGpu
from tests.faults.stage import run_program

NO_GUARD = """
    import os, sys

    import wandb

    from envfleet.multiagent import AsyncPettingZooVecEnv, GridWorldEnvParallel

    os.environ.setdefault("WANDB_MODE", "offline")
    run = wandb.init(project="grid-world", settings=wandb.Settings(silent=True))
    vec = AsyncPettingZooVecEnv(
        [GridWorldEnvParallel] * 2, backend="process", num_workers=2, start_method="spawn"
    )
"""


def test_a_missing_main_guard_is_one_sentence_and_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_program(tmp_path, NO_GUARD)
    assert code == 1
    assert err.count("MissingMainGuard") == 1
    assert 'if __name__ == "__main__":' in err
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


MODE = """
    import os

    from envfleet.multiagent import AsyncPettingZooVecEnv, GridWorldEnvParallel

    class Telling(GridWorldEnvParallel):
        @property
        def wandb_mode(self):
            return os.environ.get("WANDB_MODE")

    if __name__ == "__main__":
        vec = AsyncPettingZooVecEnv([Telling], backend="process", start_method="spawn")
        print(vec.get_attr("wandb_mode"))
        vec.close()
"""


@pytest.mark.parametrize("mode", ["offline", None])
def test_a_worker_that_is_up_has_w_and_b_s_mode_of_its_parent(mode, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    assert run_program(tmp_path, MODE) == (0, f"({mode!r},)\n", "")


FEW_FILES = """
    import resource, sys

    from envfleet import errors
    from envfleet.testing import Counter

    if __name__ == "__main__":
        from envfleet.adapters.sb3 import SubprocVecEnv

        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        try:
            SubprocVecEnv([Counter] * 64, start_method="spawn", num_workers=64)
        except errors.TooManyOpenFiles as error:
            print(error)
        SubprocVecEnv([Counter] * 64, start_method="spawn").close()
"""


def test_too_many_open_files_is_a_matter_of_workers_not_of_environments(tmp_path):
    """Stable-Baselines3 needs a process, and files, for each environment."""
    code, out, err = run_program(tmp_path, FEW_FILES)
    assert (code, err) == (0, "")
    assert re.search(r"64 workers need about \d+ open files.*num_workers=.*ulimit -n \d+", out)


class Hungry(GridWorldEnvParallel):
    """Is ended at its third step, as the system does when memory is out."""

    moves = 0

    def step(self, actions: Any) -> Any:
        self.moves += 1
        if self.moves == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)


def test_a_worker_that_ran_out_of_memory_says_so():
    stay = {"agent_1": np.full(2, 4), "agent_2": np.full(2, 4)}
    with AsyncPettingZooVecEnv([Hungry] * 2, backend="process", start_method="fork") as vec:
        vec.reset(seed=0)
        vec.step(stay)
        vec.step(stay)
        with pytest.raises(errors.WorkerDied, match="running out of memory"):
            vec.step(stay)


def no_memory() -> Any:
    raise MemoryError


def test_an_environment_that_does_not_fit_into_memory_is_named():
    fns = [GridWorldEnvMultiAgent, no_memory]
    with pytest.raises(errors.EnvConstructionFailed, match=r"slot 1.*MemoryError"):
        AECVecEnv(fns, backend="process", start_method="fork")


@pytest.mark.parametrize(
    ("kind", "make"),
    [(AsyncPettingZooVecEnv, GridWorldEnvParallel), (AECVecEnv, GridWorldEnvMultiAgent)],
)
def test_workers_start_without_what_only_learners_need(kind, make):
    heavy = {"torch", "stable_baselines3", "wandb", "matplotlib"}
    with kind([make], backend="process", start_method="spawn") as vec:
        loaded = vec.envs.apply(lambda env: sorted(heavy.intersection(sys.modules)))
    assert list(loaded) == [[]]


def recorded(folder: str) -> Any:
    return RecordVideo(gymnasium.make("CartPole-v1", render_mode="rgb_array"), folder)


@pytest.mark.filterwarnings("ignore:.*Overwriting existing videos")
def test_two_slots_that_record_the_same_videos_are_refused(tmp_path):
    same = [functools.partial(recorded, str(tmp_path / "videos"))] * 2
    for kind in (DummyVecEnv, functools.partial(SubprocVecEnv, start_method="fork")):
        with pytest.raises(errors.ConfigError, match=r"slots 0 and 1 both record videos as .*vid"):
            kind(same)
    own = [functools.partial(recorded, str(tmp_path / name)) for name in ("a", "b")]
    with closing(DummyVecEnv(own)) as envs:
        envs.reset()


# Python's own, of a fork while there are threads
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_environments_on_a_gpu_work_in_this_process_and_in_new_ones():
    try:
        with closing(DummyVecEnv([OnGpu] * 2)) as envs:
            envs.reset()
            assert np.all(envs.step(np.zeros(2, np.int64))[0] == 1)
            # by default nothing is forked while a device is in use
            with closing(SubprocVecEnv([OnGpu] * 2, num_workers=1)) as apart:
                assert "(fork)" not in apart.plan
                apart.reset()
                assert np.all(apart.step(np.zeros(2, np.int64))[0] == 1)
            with pytest.raises(errors.EnvConstructionFailed, match="forked process; use 'spawn'"):
                SubprocVecEnv([OnGpu] * 2, start_method="fork")
    finally:
        if OnGpu.gpu is not None:
            OnGpu.gpu.is_done.set()
            OnGpu.gpu.thread.join()
            OnGpu.gpu = None
