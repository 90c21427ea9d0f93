"""A fleet works and notices deaths without eventfd, epoll, memfd and pidfd."""

import subprocess
import sys

WITHOUT = """
import os, select, signal

for module, name in (
    (os, "eventfd"), (select, "epoll"), (os, "memfd_create"), (os, "pidfd_open")
):
    delattr(module, name)

import numpy as np
import envfleet

def run(**where):
    with envfleet.make_vec("CartPole-v1", 4, **where) as envs:
        seen = [envs.reset(seed=0)[0]]
        seen += [envs.step(np.full(4, t % 2))[0] for t in range(100)]
        envs.send(np.zeros(2, int), [0, 3])
        seen.append(envs.recv().obs)
        return np.concatenate(seen)

where = dict(backend="process", start_method="fork", num_workers=2)
assert (run(**where) == run(backend="serial")).all()

with envfleet.make_vec("CartPole-v1", 4, on_failure="restart", **where) as envs:
    envs.reset(seed=0)
    os.kill(envs.fleet.worker_pids()[1], signal.SIGKILL)
    assert envs.step(np.zeros(4, int))[3].tolist() == [False, False, True, True]
print("works")
"""


def test_a_fleet_needs_none_of_linux_own_calls():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "works\n", done.stderr
