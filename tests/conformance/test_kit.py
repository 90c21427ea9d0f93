"""The conformance kit: good environments pass, and each kind of defect is named."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envfleet.testing import (
    Counter,
    FleetConformance,
    GlobalRandom,
    IgnoresSeed,
    MixedInfo,
    NoisyStream,
    ReusingItsArray,
    SharesState,
    TaskCounter,
    UnpicklableInfo,
    check_env,
)


class TestNoisyStream(FleetConformance):
    def make_env(self):
        return NoisyStream()


class TestReusingItsArray(FleetConformance):
    deterministic = True

    def make_env(self):
        return ReusingItsArray()


class TestMixedInfo(FleetConformance):
    workers = (2,)

    def make_env(self):
        return MixedInfo()


class TestLongEpisodes(FleetConformance):
    """Pendulum's episodes last 200 steps; they are cut in the loop and in the fleet alike."""

    workers = (2,)

    def make_env(self):
        return gymnasium.make("Pendulum-v1")


class LiesAboutItsSpace(NoisyStream):
    def _draw(self):
        return np.append(super()._draw(), 0.0)


class KeepsOneSeed(NoisyStream):
    """Uses its own generator, but ignores the seed."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else 5, options=options)


class FailsInWorkers(Counter):
    def __init__(self):
        import multiprocessing

        if multiprocessing.parent_process() is not None:
            raise RuntimeError("no worker for me")
        super().__init__()


class FailsToClose(Counter):
    def close(self):
        raise RuntimeError("cannot close")


@pytest.mark.parametrize(
    ("env", "check", "says"),
    [
        (GlobalRandom, "no global random state", "np.random"),
        (IgnoresSeed, "same seed, same stream", "self.np_random"),
        (SharesState, "same seed, same stream", "share nothing"),
        (KeepsOneSeed, "different slots, different streams", "deterministic = True"),
        (LiesAboutItsSpace, "observations fit the space", "observation_space"),
        (UnpicklableInfo, "infos survive", "lock"),
        (FailsInWorkers, "can be built in a worker", "no worker for me"),
        (FailsToClose, "close works", "cannot close"),
    ],
)
def test_a_bad_citizen_is_named(env, check, says):
    report = check_env(env, workers=(2,), num_envs=2, checks=[check], raises=False)
    assert not report
    named = {result.name: result.message for result in report.failures}
    assert check in named, str(report)
    assert says in named[check], named[check]


def test_a_good_citizen_passes_and_the_report_says_so():
    report = check_env(TaskCounter, workers=(2,), num_envs=2)
    assert report
    assert report.num_episodes >= 3
    assert "FAIL" not in str(report)
    assert len(str(report).splitlines()) == len(report.results)


def test_a_registered_id_can_be_checked():
    assert check_env("CartPole-v1", workers=(2,), num_envs=2)


def test_check_env_raises_the_first_failure():
    with pytest.raises(AssertionError, match=r"same seed, same stream.*slot 0, step 0"):
        check_env(IgnoresSeed, num_envs=1, checks=["same seed, same stream", "close works"])


class HasNoRandomness(Counter):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Discrete(3)


def test_an_env_without_randomness_needs_no_different_streams():
    checks = ["different slots, different streams"]
    assert check_env(HasNoRandomness, checks=checks)
    with pytest.raises(AssertionError, match="different slots"):
        check_env(HasNoRandomness, checks=checks, deterministic=False)


FOUR_LINES = """
from envfleet.testing import FleetConformance, NoisyStream

class TestMyEnv(FleetConformance):
    def make_env(self):
        return NoisyStream()
"""


def test_four_lines_are_enough(tmp_path):
    """In a separate directory with pytest's defaults, as an author would run it."""
    (tmp_path / "test_my_env.py").write_text(FOUR_LINES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_env.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed" in done.stdout


def test_the_kit_needs_no_test_framework():
    code = "import sys, envfleet.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
