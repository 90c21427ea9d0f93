"""The plugin that runs Stable-Baselines3's tests on fleets: what it replaces; its list."""

import os
import subprocess
import sys
from pathlib import Path

from tests.peers.sb3_exceptions import EXCEPTIONS

ROOT = Path(__file__).parents[2]

A_TEST = """
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from envfleet.adapters import sb3

def test_ours_are_in_their_place():
    assert (DummyVecEnv, SubprocVecEnv) == (sb3.DummyVecEnv, sb3.SubprocVecEnv)
    envs = make_vec_env("CartPole-v1", 2)
    assert type(envs) is sb3.DummyVecEnv
    envs.close()
"""


def run(folder, *arguments):
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", folder),
            *("-p", "peers.sb3_plugin", *arguments),
        ],
        capture_output=True, text=True, timeout=110, cwd=folder, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def test_fleets_stand_in_their_place(tmp_path):
    (tmp_path / "test_it.py").write_text(A_TEST)

    done = run(tmp_path)

    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_an_exception_for_a_test_that_is_gone_is_an_error(tmp_path):
    gone = tmp_path / "tests" / "test_vec_normalize.py"
    gone.parent.mkdir()
    gone.write_text("def test_obs_rms(): pass")

    done = run(tmp_path, str(gone))

    assert done.returncode != 0
    assert "test_vec_normalize.py::test_discrete_obs" in done.stdout + done.stderr


def test_every_exception_has_a_reason():
    assert all(len(reason) > 40 for reason in EXCEPTIONS.values())
