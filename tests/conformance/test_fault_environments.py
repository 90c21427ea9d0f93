"""Each fault environment fails in the requested way at the requested moment."""

import faulthandler
import functools
import multiprocessing
import os
import pickle
import re
import signal
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from envfleet.testing import (
    Counter,
    Crashing,
    FailingConstructor,
    Hanging,
    HugeObservation,
    Leaking,
    ReusingItsArray,
    Slow,
    TwoArgumentError,
    TwoArgumentException,
    UnpicklableException,
    UnpicklableInfo,
)
from tests.gates import at_most

FORK = multiprocessing.get_context("fork")


def live(env_fn):
    """Calls every method at least once."""
    faulthandler.disable()
    env = env_fn()
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    env.reset()
    env.close()


def fate_of(env_fn, patience_s=5.0):
    """The exit code of a process that runs it; None if it had to be killed."""
    process = FORK.Process(target=live, args=(env_fn,))
    process.start()
    process.join(patience_s)
    code = process.exitcode
    process.kill()
    process.join()
    process.close()
    return code


@pytest.mark.parametrize("at", ["constructor", "reset", "step", "close"])
@pytest.mark.parametrize(
    ("mode", "code"), [("exit", 3), ("kill", -signal.SIGKILL), ("segfault", -signal.SIGSEGV)]
)
def test_crashing_ends_its_process(mode, code, at):
    assert fate_of(functools.partial(Crashing, mode=mode, at=at)) == code


@pytest.mark.parametrize("mode", ["sleep", "gil", "deaf", "stop"])
def test_hanging_does_not_come_back(mode):
    assert fate_of(functools.partial(Hanging, mode=mode, at="reset"), patience_s=0.4) is None


def test_hanging_in_c_keeps_the_interpreter_lock():
    """No other thread of the process runs, so a watching thread cannot end it."""

    def hang():
        import threading

        threading.Timer(1.0, os._exit, (7,)).start()
        Hanging(mode="gil", at="constructor")

    process = FORK.Process(target=hang)
    process.start()
    process.join(2.0)
    assert process.exitcode is None
    process.kill()
    process.join()
    process.close()


def test_deaf_survives_sigterm():
    process = FORK.Process(target=live, args=(functools.partial(Hanging, mode="deaf"),))
    process.start()
    while not ignores(process.pid, signal.SIGTERM):
        assert process.exitcode is None
        time.sleep(0.005)
    process.terminate()
    process.join(0.3)
    assert process.exitcode is None
    process.kill()
    process.join()
    process.close()


def ignores(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)
    assert found is not None
    return bool(int(found.group(1), 16) >> (number - 1) & 1)


def test_a_bounded_hang_ends():
    start_s = time.monotonic()
    with at_most(1.0):
        Hanging(at="constructor", for_s=0.05)
    assert time.monotonic() - start_s >= 0.05


def test_the_nth_call_is_the_one():
    env = Crashing(at="step", nth=3, length=2)
    env.reset(seed=0)
    env.step(0)
    env.step(0)
    env.reset()
    with pytest.raises(RuntimeError, match="step number 3"):
        env.step(0)


def test_a_seed_picks_one_slot():
    for seed, crashes in ((0, False), (1, True)):
        env = Crashing(only_seed=1)
        env.reset(seed=seed)
        if crashes:
            with pytest.raises(RuntimeError, match="as asked"):
                env.step(0)
        else:
            env.step(0)


def test_once_means_once(tmp_path):
    marker = tmp_path / "happened"
    with pytest.raises(RuntimeError, match="as asked"):
        FailingConstructor(once=marker)
    FailingConstructor(once=marker)


def test_a_spared_process_sees_nothing():
    FailingConstructor(spare_pid=os.getpid())
    assert fate_of(functools.partial(Crashing, mode="exit", spare_pid=os.getpid())) == 3


def test_the_two_argument_exception_cannot_be_unpickled():
    env = TwoArgumentException()
    env.reset(seed=0)
    with pytest.raises(TwoArgumentError) as caught:
        env.step(0)
    with pytest.raises(TypeError, match="place"):
        pickle.loads(pickle.dumps(caught.value))


def test_the_unpicklable_ones_cannot_be_pickled():
    env = UnpicklableException()
    env.reset(seed=0)
    with pytest.raises(RuntimeError) as caught:
        env.step(0)
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(caught.value)
    _, info = UnpicklableInfo().reset(seed=0)
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(info)


def test_leaking_leaks_and_gives_back():
    before = len(os.listdir("/proc/self/fd"))
    env = Leaking(bytes_per_step=1000, files_per_step=2)
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    env.close()
    assert len(os.listdir("/proc/self/fd")) == before + 6
    assert sum(map(len, env.memory)) == 3000
    env.give_back()
    assert len(os.listdir("/proc/self/fd")) == before


def test_slow_times_depend_on_the_seed(monkeypatch):
    def times(seed):
        env = Slow(step_s=0.0, slow_step_s=0.02, slow_share=0.5, length=None)
        env.reset(seed=seed)
        slept: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", slept.append)
            for _ in range(10):
                env.step(0)
        assert set(slept) == {0.0, 0.02}
        return slept

    assert times(0) == times(0)
    assert times(0) != times(1)


def test_reusing_its_array_does():
    env = ReusingItsArray()
    first, _ = env.reset(seed=0)
    second, *_ = env.step(0)
    assert first is second
    assert first[0] == 1


def test_huge_is_huge():
    obs, _ = HugeObservation(num_bytes=2**20).reset(seed=0)
    assert obs.nbytes == 2**20


@pytest.mark.parametrize("env", [Counter, Crashing, Hanging, Slow, Leaking, UnpicklableInfo])
def test_builders_travel_by_plain_pickle(env):
    """Every start method can send them."""
    built = pickle.loads(pickle.dumps(functools.partial(env, length=2)))()
    obs, _ = built.reset(seed=0)
    assert obs == np.array([0])
