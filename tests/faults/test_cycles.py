"""1,000 times open and close: descriptors, children, threads, memory and /dev/shm stay flat."""

import os
import threading

import numpy as np
import psutil
import pytest

import envfleet
from envfleet.testing import Counter
from tests.faults.stage import zeros

CYCLES = 1000
WARM_UP = 20
MAX_GROWTH_BYTES = 8 << 20
"""Of resident memory in all cycles but the first few; a leak of 10 KiB in each would show."""


def holdings():
    this = psutil.Process()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(this.children(recursive=True)),
        "threads": threading.active_count(),
        "shared memory": len(
            [line for line in open("/proc/self/maps") if "memfd" in line or "/dev/shm" in line]
        ),
    }


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("backend", "cycles"), [("process", CYCLES), ("thread", CYCLES // 5), ("serial", CYCLES // 5)]
)
def test_a_thousand_fleets_leave_no_more_than_one(backend, cycles):
    options = {"start_method": "fork"} if backend == "process" else {}

    def once():
        envs = envfleet.make_vec(Counter, 1, num_workers=1, backend=backend, **options)
        envs.reset(seed=0)
        assert envs.step(zeros(1))[0].tolist() == [[1]]
        envs.close()

    in_dev_shm = set(os.listdir("/dev/shm"))
    for _ in range(WARM_UP):
        once()
    before, memory = holdings(), psutil.Process().memory_info().rss
    for number in range(cycles - WARM_UP):
        once()
        if number % 100 == 0:
            assert holdings() == before, f"after {number} cycles"
    assert holdings() == before
    assert psutil.Process().memory_info().rss - memory < MAX_GROWTH_BYTES
    ours = {name for name in set(os.listdir("/dev/shm")) - in_dev_shm if "envfleet" in name}
    assert not ours


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_few_fleets_of_new_interpreters_leave_no_more_than_one(method):
    def once():
        envs = envfleet.make_vec(Counter, 2, num_workers=1, backend="process", start_method=method)
        envs.reset(seed=0)
        envs.close()

    once()
    before = holdings()
    for _ in range(5):
        once()
    assert holdings() == before


def test_many_fleets_side_by_side():
    """They share nothing: closing one, in whatever order, is nothing to the others."""
    fleets = [
        envfleet.make_vec(Counter, 2, num_workers=2, backend="process", start_method="fork")
        for _ in range(8)
    ]
    for number, envs in enumerate(fleets):
        envs.reset(seed=number)
    order = np.random.default_rng(0).permutation(len(fleets)).tolist()
    while order:
        fleets[order.pop()].close()
        for number in order:
            fleets[number].step(zeros(2))
