"""Workers that wait use almost no processor time."""

import functools
import time

import pytest

from envfleet.testing import Slow
from tests.faults.stage import Resident, opened, zeros


def cpu_s(pids):
    """Processor seconds these processes have used so far.

    Of Linux's clocks of other processes, to the nanosecond: cpu_times counts in hundredths, and a
    few of them begun are more than what is allowed here.
    """
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_idle_workers_use_no_processor(method):
    with opened([Resident] * 2, num_workers=2, start_method=method) as envs:
        envs.reset(seed=0)
        for _ in range(20):
            envs.step(zeros(2))
        pids = envs.get_attr("pid")
        before, started_s = cpu_s(pids), time.monotonic()
        time.sleep(1.0)
        share = (cpu_s(pids) - before) / (time.monotonic() - started_s)
    assert share <= 0.02, f"idle workers use {share:.1%} of a core"


def test_workers_of_a_slow_policy_use_under_five_percent_of_a_core():
    """The policy takes 50 ms between steps; four workers together."""
    with opened([Resident] * 16, num_workers=4) as envs:
        envs.reset(seed=0)
        pids = set(envs.get_attr("pid"))
        for _ in range(3):
            envs.step(zeros(16))
        before, started_s = cpu_s(pids), time.monotonic()
        for _ in range(40):
            envs.step(zeros(16))
            time.sleep(0.05)
        share = (cpu_s(pids) - before) / (time.monotonic() - started_s)
    assert share < 0.05, f"workers use {share:.1%} of a core"


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_caller_that_waits_uses_no_processor(backend):
    """The parent does not check for silent workers too often either."""
    env_fn = functools.partial(Slow, step_s=1.0)
    with opened(
        [env_fn] * 2, num_workers=2, backend=backend, step_timeout_s=10.0, reset_timeout_s=10.0
    ) as envs:
        envs.reset(seed=0)
        before = time.process_time()
        envs.step(zeros(2))
        used_s = time.process_time() - before
    assert used_s < 0.05, f"waiting one second used {used_s:.3f} s"


def test_threads_that_idle_use_no_processor():
    with opened([Resident] * 4, num_workers=4, backend="thread") as envs:
        envs.reset(seed=0)
        envs.step(zeros(4))
        before = time.process_time()
        time.sleep(1.0)
        used_s = time.process_time() - before
    assert used_s < 0.05, f"idling one second used {used_s:.3f} s"
