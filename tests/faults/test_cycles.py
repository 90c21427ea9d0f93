"""Opening and closing 1,000 times leaks no descriptors, children, threads or memory."""

import os

import numpy as np
import pytest

import envfleet
from envfleet.testing import Counter
from tests.faults.stage import run_program, zeros

CYCLES = 1000

# In a program of its own: what a test runner holds and collects meanwhile is not ours to judge.
OPENS_AND_CLOSES = """
    import os, sys, threading

    import numpy as np
    import psutil

    import envfleet
    from envfleet.testing import Counter

    WARM_UP = 20
    MAX_GROWTH_BYTES = 4 << 20  # resident, in all cycles but the first few: 4 KiB each would show


    def holdings():
        this = psutil.Process()
        with open("/proc/self/maps") as file:
            maps = sum("memfd" in line or "/dev/shm" in line for line in file)
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "children": [child.pid for child in this.children(recursive=True)],
            "threads": threading.active_count(),
            "maps": maps,
        }


    def once(options):
        envs = envfleet.make_vec(Counter, 1, num_workers=1, **options)
        envs.reset(seed=0)
        assert envs.step(np.zeros(1, int))[0].tolist() == [[1]]
        envs.close()


    if __name__ == "__main__":
        backend, cycles = sys.argv[1], int(sys.argv[2])
        options = {"backend": backend}
        if backend == "process":
            options["start_method"] = "fork"
        for _ in range(WARM_UP):
            once(options)
        before, memory = holdings(), psutil.Process().memory_info().rss
        for number in range(cycles - WARM_UP):
            once(options)
            if number % 100 == 0:
                assert holdings() == before, (number, before, holdings())
        assert holdings() == before, (before, holdings())
        growth = psutil.Process().memory_info().rss - memory
        assert growth < MAX_GROWTH_BYTES, f"{growth} bytes more than before"
        print("flat")
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("backend", "cycles"), [("process", CYCLES), ("thread", CYCLES // 5), ("serial", CYCLES // 5)]
)
def test_a_thousand_fleets_leave_no_more_than_one(backend, cycles, tmp_path):
    before = set(os.listdir("/dev/shm"))
    code, out, err = run_program(tmp_path, OPENS_AND_CLOSES, backend, cycles, within_s=170.0)
    assert (code, out, err) == (0, "flat\n", "")
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "envfleet" in name}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_few_fleets_of_new_interpreters_leave_no_more_than_one(method):
    def once():
        envs = envfleet.make_vec(Counter, 2, num_workers=1, backend="process", start_method=method)
        envs.reset(seed=0)
        envs.close()

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        once()
        assert len(os.listdir("/proc/self/fd")) == before


def test_many_fleets_side_by_side():
    """They share nothing: closing one does not affect the others, in any order."""
    fleets = [
        envfleet.make_vec(Counter, 2, num_workers=2, backend="process", start_method="fork")
        for _ in range(6)
    ]
    for number, envs in enumerate(fleets):
        envs.reset(seed=number)
    order = np.random.default_rng(0).permutation(len(fleets)).tolist()
    while order:
        fleets[order.pop()].close()
        for number in order:
            fleets[number].step(zeros(2))
