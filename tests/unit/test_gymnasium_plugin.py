"""The plugin that runs Gymnasium's tests on fleets: what it replaces; its list cannot rot."""

import os
import subprocess
import sys
from pathlib import Path

from tests.peers.gymnasium_exceptions import EXCEPTIONS
from tests.peers.gymnasium_plugin import fits, unfit

ROOT = Path(__file__).parents[2]

A_TEST = """
import gymnasium
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import envfleet

def cartpole():
    return gymnasium.make("CartPole-v1")

def test_sync_is_a_fleet_of_its_own_kind():
    envs = SyncVectorEnv([cartpole] * 2, autoreset_mode="SameStep")
    assert type(envs) is envfleet.FleetVectorEnv
    assert isinstance(envs, SyncVectorEnv) and not isinstance(envs, AsyncVectorEnv)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    envs.close()

def test_make_vec_is_a_fleet():
    envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="async")
    assert isinstance(envs, AsyncVectorEnv)
    assert "thread" in envs.plan
    envs.close()

def test_another_observation_mode_is_to_be_excepted():
    with pytest.raises(ValueError):
        SyncVectorEnv([cartpole] * 2, observation_mode="different")
"""


def run(folder, *arguments):
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", folder),
            *("-p", "peers.gymnasium_plugin", "--parallel-backend=thread", *arguments),
        ],
        capture_output=True, text=True, timeout=60, cwd=folder, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def test_fleets_stand_in_their_place(tmp_path):
    (tmp_path / "test_it.py").write_text(A_TEST)

    done = run(tmp_path)

    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "Failed: make_vec has no observation_mode" in done.stdout


def test_an_exception_for_a_test_that_is_gone_is_an_error(tmp_path):
    # a file of this name, without the tests that are excepted from it
    gone = tmp_path / "tests" / "vector" / "test_autoreset_mode.py"
    gone.parent.mkdir(parents=True)
    gone.write_text("def test_autoreset_next_step(): pass")

    done = run(tmp_path, str(gone))

    assert done.returncode != 0
    assert "test_autoreset_mode.py::test_autoreset_within_step" in done.stdout + done.stderr
    assert "test_async_vector_env.py" not in done.stdout + done.stderr


def test_names_fit_all_parameters_one_of_them_or_a_beginning():
    assert fits("a.py::test", "a.py::test")
    assert fits("a.py::test", "a.py::test[1-x]")
    assert fits("a.py::test[1-x]", "a.py::test[1-x]")
    assert fits("a.py::test[1*", "a.py::test[1-x]")
    assert not fits("a.py::test[1-x]", "a.py::test[2-x]")
    assert not fits("a.py::test", "a.py::test_more")
    assert unfit(["a.py::test", "a.py::old", "b.py::old"], ["a.py::test[1]"]) == ["a.py::old"]


def test_every_exception_has_a_reason():
    assert all(len(reason) > 40 for reason in EXCEPTIONS.values())
