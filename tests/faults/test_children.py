"""What environments start in workers, copies of workers, and no process to be had."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.faults.stage import (
    GRACE_S,
    Resident,
    left_after,
    opened,
    run_program,
    zeros,
)
from tests.gates import PATIENCE_S, at_most

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


class Forking(Resident):
    """Its third step forks this process, and returns in both."""

    def step(self, action):
        if self.t == 2:
            self.pids = [os.getpid(), os.fork()]
        if self.t == 3:
            os.waitpid(self.pids[1], 0)
        return super().step(action)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_copy_of_a_worker_neither_writes_nor_answers(method, capfd):
    with opened(Forking, 2, num_workers=2, start_method=method) as envs:
        envs.reset(seed=0)
        seen = [envs.step(zeros(2))[0].ravel().tolist() for _ in range(6)]
        assert seen == [[float(t)] * 2 for t in range(1, 7)]
        assert not left_after([copy for _, copy in envs.get_attr("pids")], PATIENCE_S)
    if method == "fork":  # a fork server has the stderr of the test that started it
        told = capfd.readouterr().err
        assert told.count("called os.fork and came back in both processes") == 2, told


class WithChildren(Resident):
    """Starts a program and a copy of its process, and ends neither."""

    def __init__(self):
        super().__init__()
        program = subprocess.Popen(["sleep", "600"])
        copy = os.fork()
        if not copy:
            signal.pause()
        self.children = np.array([program.pid, copy])
        program.returncode = 0  # it is not waited for

    def end_children(self):
        for pid in self.children.tolist():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_children_of_a_killed_worker_end_with_it_and_hold_nothing_up(method):
    with opened(WithChildren, 3, num_workers=3, start_method=method, on_failure="restart") as envs:
        envs.reset(seed=0)
        children = [pid for pids in envs.get_attr("children") for pid in pids.tolist()]
        pids = envs.fleet.worker_pids()
        with at_most(2 * GRACE_S):
            for pid in pids[:2]:
                os.kill(pid, signal.SIGKILL)
            envs.step(zeros(3))
        assert not left_after(children[:4], PATIENCE_S)
        assert left_after(children[4:], 0.0) == children[4:]
        envs.call("end_children")
        with at_most(2 * GRACE_S):
            envs.close()


STOPPED_SERVER = """
    import os, signal, sys, threading, warnings
    from multiprocessing import forkserver

    import numpy as np

    import envfleet
    from envfleet.testing import Counter

    if __name__ == "__main__":
        envs = envfleet.make_vec(
            Counter, 2, num_workers=2, backend="process", start_method="forkserver",
            on_failure=sys.argv[1],
        )
        envs.reset(seed=0)
        server = forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGSTOP)
        os.kill(envs.fleet.worker_pids()[0], signal.SIGKILL)

        def go_on(message, *_):
            print(message, flush=True)
            os.kill(server, signal.SIGCONT)

        warnings.showwarning = go_on
        try:
            print(envs.step(np.zeros(2, np.int64))[3])
        except envfleet.errors.WorkerDied as exc:
            print(type(exc).__name__, exc)
            try:
                envfleet.make_vec(Counter, backend="process", start_method="forkserver")
            except envfleet.errors.NoNewProcess as exc:
                print(type(exc).__name__, exc)
        finally:
            envs.close()
            os.kill(server, signal.SIGCONT)
"""


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_stopped_fork_server_is_named(on_failure, tmp_path):
    code, out, err = run_program(tmp_path, STOPPED_SERVER, on_failure)
    assert (code, err) == (0, "")
    first, last = out.splitlines()
    if on_failure == "raise":
        assert first.startswith("WorkerDied worker 0 died")
        assert last.startswith("NoNewProcess no process could be started for worker 0")
    else:
        assert first.startswith("no process could be started for worker 0")
        assert last == "[ True False]"
    assert "is stopped. Continue it: kill -CONT" in out


NO_PROCESSES = """
    import ctypes, os, resource, signal, sys, warnings

    import numpy as np

    import envfleet
    from envfleet.testing import Counter

    def limit(count):
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (hard if count is None else count, hard))

    def num_files():
        return len(os.listdir("/proc/self/fd"))

    def opened(**options):
        return envfleet.make_vec(
            Counter, 2, num_workers=2, backend="process", start_method="fork", **options
        )

    if __name__ == "__main__":
        opened().close()  # imports what is needed, which another user may not be able to
        if os.getuid() == 0:  # for whom there is no such limit
            os.setuid(65534)
            ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: its descriptors are its own again
        before = num_files()
        limit(1)
        for _ in range(3):
            try:
                opened()
            except envfleet.errors.NoNewProcess as exc:
                print(exc)
        print(num_files() - before)
        limit(None)
        envs = opened(on_failure="restart")
        envs.reset(seed=0)
        limit(1)
        os.kill(envs.fleet.worker_pids()[0], signal.SIGKILL)

        def go_on(message, *_):
            print(message)
            limit(None)

        warnings.showwarning = go_on
        print(envs.step(np.zeros(2, np.int64))[3])
        envs.close()
        print(num_files() - before)
"""


def test_a_limit_of_processes_is_named_leaks_nothing_and_loses_no_slot(tmp_path):
    tmp_path.chmod(0o755)
    code, out, err = run_program(tmp_path, NO_PROCESSES)
    assert (code, err) == (0, "")
    *refused, left, waits, stepped, left_at_last = out.splitlines()
    assert len(refused) == 3
    for text in (*refused, waits):
        assert text.startswith("no process could be started for worker 0 of slots [0]"), text
        assert "ulimit -u" in text
    assert (left, left_at_last) == ("0", "0")
    assert stepped == "[ True False]"
