"""Law 5 from outside: workers end with their program, in whichever way it ends."""

import functools
import gc
import os
import signal
import threading
import time
import weakref
from typing import Any

import psutil
import pytest

import envfleet
from envfleet.testing import Hanging
from tests.faults.stage import (
    METHODS,
    Resident,
    is_alive,
    left_after,
    program,
    run_program,
    zeros,
)
from tests.gates import PATIENCE_S, at_most, wait_for

SIGKILL_GRACE_S = 3.0

# Each prints the pids of its workers, then "ready", and then sits there.
FLEET = """
    import ctypes, functools, os, sys, threading, time

    import numpy as np

    import envfleet
    from envfleet.testing import Counter, Hanging, Slow


    class Somewhere(Counter):
        pid = property(lambda self: os.getpid())


    class Hung(Hanging):
        pid = property(lambda self: os.getpid())


    class Native(Somewhere):
        def step(self, action):
            ctypes.PyDLL(None).usleep(60_000_000)  # one call, and the interpreter lock kept


    class Busy(Slow):
        pid = property(lambda self: os.getpid())


    ENVS = {
        "idle": Somewhere,
        "sleeping": functools.partial(Hung, mode="sleep"),
        "stopped": functools.partial(Hung, mode="stop"),
        "native": Native,
        "stepping": functools.partial(Busy, step_s=0.001, length=None),
    }


    def main(method, what):
        envs = envfleet.make_vec(
            [Somewhere, ENVS[what]], num_workers=2, backend="process", start_method=method
        )
        envs.reset(seed=0)
        print(*envs.get_attr("pid"), flush=True)
        if what == "stepping":
            print("ready", flush=True)
            while True:
                envs.step(np.zeros(2, int))
        if what != "idle":
            envs.send(np.zeros(2, int))
            envs.recv(min_slots=1)
            time.sleep(0.2)
        print("ready", flush=True)
        time.sleep(60)


    if __name__ == "__main__":
        if len(sys.argv) > 3:
            thread = threading.Thread(target=main, args=sys.argv[1:3], daemon=True)
            thread.start()
            thread.join()
        else:
            main(*sys.argv[1:3])
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", ["idle", "stepping", "sleeping", "stopped", "native"])
def test_sigkill_of_the_parent_leaves_no_process(what, method, tmp_path):
    with program(tmp_path, FLEET, method, what) as parent:
        workers = parent.numbers()
        assert parent.line() == "ready"
        processes = {*workers, *parent.descendants()}
        assert len(workers) == 2
        parent.kill()
        left = left_after(processes, SIGKILL_GRACE_S)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "processes outlived the parent"


@pytest.mark.parametrize(
    ("what", "method"), [("idle", "fork"), *(("native", method) for method in METHODS)]
)
def test_sigkill_of_a_parent_whose_fleet_lives_in_a_thread(what, method, tmp_path):
    """The kernel's parent-death signal belongs to the thread that started the worker."""
    with program(tmp_path, FLEET, method, what, "in a thread") as parent:
        workers = parent.numbers()
        assert parent.line() == "ready"
        processes = {*workers, *parent.descendants()}
        parent.kill()
        left = left_after(processes, SIGKILL_GRACE_S)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "processes outlived the parent"


@pytest.mark.leaves_thread("what starts workers for other threads lasts as long as the process")
def test_workers_outlive_the_thread_that_started_them():
    """Workers survive the end of the thread that opened their fleet."""
    opened = []
    options: dict[str, Any] = {"backend": "process", "start_method": "fork", "num_workers": 2}
    thread = threading.Thread(
        target=lambda: opened.append(envfleet.make_vec(Resident, 2, **options))
    )
    thread.start()
    thread.join()
    (envs,) = opened
    time.sleep(0.2)
    envs.reset(seed=0)
    assert envs.step(zeros(2))[0].tolist() == [[1], [1]]
    envs.close()


# ---- suspension ----------------------------------------------------------------------------------

SUSPENDED = """
import sys
import time
from pathlib import Path

import numpy as np

from envfleet.engine import Deadlines, Fleet, ResetPlan
from envfleet.testing import Counter

backend, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])


class Telling(Counter):
    def step(self, action):
        (folder / "steps").touch()
        give_up_s = time.monotonic() + 60
        while not (folder / "gate").exists() and time.monotonic() < give_up_s:
            time.sleep(0.001)
        return super().step(action)


fleet = Fleet(
    [Counter, Telling], num_workers=2, backend=backend, deadlines=Deadlines(step_s=2.0)
)
fleet.reset([ResetPlan(0), ResetPlan(1)])
fleet.send(np.zeros(2, int))
if how == "patient":
    obs = fleet.recv().obs
elif how == "first-ready":
    fleet.recv(slots=[0])
    obs = fleet.recv(min_slots=1).obs
else:
    fleet.recv(slots=[0])
    while not len(batch := fleet.recv(timeout_s=0.02)):
        pass
    obs = batch.obs
print(obs.tolist(), fleet.incidents)
fleet.close()
"""


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("process", "patient"),
        ("process", "first-ready"),
        ("process", "polling"),
        ("thread", "patient"),
    ],
)
def test_a_program_that_was_suspended_does_not_take_its_workers_for_hung(backend, how, tmp_path):
    """Ctrl-Z, or a paused container: the time that it stood still is nobody's delay."""
    with program(tmp_path, SUSPENDED, backend, how, tmp_path) as running:
        wait_for(tmp_path / "steps")
        time.sleep(1.2)  # it has looked at its workers
        os.killpg(running.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.killpg(running.pid, signal.SIGCONT)
        time.sleep(0.6)  # more than once
        (tmp_path / "gate").touch()
        assert running.finish(PATIENCE_S) == 0, running.err
        rows = "[[1], [1]]" if how == "patient" else "[[1]]"
        assert running.out.strip() == f"{rows} []"


# ---- exceptions and interrupts -------------------------------------------------------------------

RAISES = """
    import functools, sys, time

    import numpy as np

    import envfleet
    from envfleet.testing import Counter, Hanging

    if __name__ == "__main__":
        backend, method, what = sys.argv[1:]
        env_fn = functools.partial(Hanging, mode=what) if what != "idle" else Counter
        envs = envfleet.make_vec(
            env_fn, 2, num_workers=2, backend=backend, start_method=method
        )
        envs.reset(seed=0)
        if what != "idle":
            envs.send(np.zeros(2, int))
            time.sleep(0.2)
        print("raising", flush=True)
        raise RuntimeError("main has failed")
"""


@pytest.mark.parametrize(
    ("backend", "method", "what"),
    [
        ("process", "fork", "idle"),
        ("process", "fork", "deaf"),
        ("process", "fork", "stop"),
        ("process", "spawn", "sleep"),
        ("process", "forkserver", "sleep"),
        ("thread", "fork", "idle"),
        ("thread", "fork", "sleep"),
    ],
)
def test_an_exception_in_main_ends_the_program(backend, method, what, tmp_path):
    with program(tmp_path, RAISES, backend, method, what) as running:
        assert running.line() == "raising"
        processes = running.descendants()
        with at_most(3.0):
            code = running.finish(10.0)
        assert code == 1
        assert running.err.count("Traceback") == 1
        assert running.err.strip().endswith("RuntimeError: main has failed")
        assert not left_after(processes, 1.0)


STEPS = """
    import functools, sys

    import numpy as np

    import envfleet
    from envfleet.testing import Slow

    if __name__ == "__main__":
        backend, method = sys.argv[1:]
        env_fn = functools.partial(Slow, step_s=0.05, length=None)
        envs = envfleet.make_vec(env_fn, 4, num_workers=2, backend=backend, start_method=method)
        envs.reset(seed=0)
        print("ready", flush=True)
        while True:
            envs.step(np.zeros(4, int))
"""


def is_one_interrupt(running):
    """One traceback, that of the caller, and no output of a worker."""
    # it may come while another exception is being handled, as in a look for a variable
    chained = running.err.count("During handling of the above exception")
    assert running.err.count("Traceback") == 1 + chained, running.err
    assert running.err.strip().endswith("KeyboardInterrupt"), running.err
    assert "Exception ignored" not in running.err
    assert "envfleet-worker" not in running.err


@pytest.mark.parametrize(
    ("backend", "method"),
    [*(("process", method) for method in METHODS), ("thread", "fork"), ("serial", "fork")],
)
def test_ctrl_c_gives_one_traceback(backend, method, tmp_path):
    with program(tmp_path, STEPS, backend, method) as running:
        assert running.line() == "ready"
        time.sleep(0.2)
        processes = running.descendants()
        running.interrupt()
        with at_most(3.0):
            code = running.finish(10.0)
        assert code == -signal.SIGINT
        is_one_interrupt(running)
        assert not left_after(processes, 1.0)


OPENS = """
    import sys, time

    import envfleet
    from envfleet.testing import Counter

    if __name__ == "__main__":
        print("opening", flush=True)
        envs = envfleet.make_vec(
            Counter, 4, num_workers=4, backend="process", start_method=sys.argv[1]
        )
        print("open", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("method", "after_s"),
    [
        *(("fork", milliseconds / 1000) for milliseconds in range(2, 27, 5)),
        *((method, after_s) for method in ("spawn", "forkserver") for after_s in (0.05, 0.2, 0.4)),
    ],
)
def test_ctrl_c_while_workers_come_up_gives_one_traceback(method, after_s, tmp_path):
    """It is not lost between two forks, and half-started workers print nothing."""
    with program(tmp_path, OPENS, method) as running:
        assert running.line() == "opening"
        time.sleep(after_s)
        processes = running.descendants()
        running.interrupt()
        with at_most(3.0):
            code = running.finish(10.0)
        assert code == -signal.SIGINT
        is_one_interrupt(running)
        assert not left_after(processes, 1.0)


INTERRUPTED = """
    import os, signal, sys
    from multiprocessing import forkserver, util

    import envfleet
    from envfleet.testing import Counter


    def interrupted(start):
        def start_and_hear(*args):
            started = start(*args)
            if started != 0 and os.getpid() == parent:
                os.kill(parent, signal.SIGINT)
            return started

        return start_and_hear


    if __name__ == "__main__":
        parent, method = os.getpid(), sys.argv[1]
        with envfleet.make_vec(Counter, 1, backend="process", start_method=method):
            pass  # everything that is started only once runs by now
        where, name = {
            "fork": (os, "fork"),
            "spawn": (util, "spawnv_passfds"),
            "forkserver": (forkserver, "connect_to_new_process"),
        }[method]
        setattr(where, name, interrupted(getattr(where, name)))
        envfleet.make_vec(Counter, 2, num_workers=2, backend="process", start_method=method)
"""


@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_between_the_birth_of_a_worker_and_its_first_words(method, tmp_path):
    """It waits until the worker has received everything, also if another thread got the signal."""
    with program(tmp_path, INTERRUPTED, method) as running:
        code = running.finish(30.0)
        assert code == -signal.SIGINT, running.err
        is_one_interrupt(running)


SURVIVES = """
    import functools, sys

    import numpy as np

    import envfleet
    from envfleet.testing import Slow

    if __name__ == "__main__":
        backend, method = sys.argv[1:]
        env_fn = functools.partial(Slow, step_s=0.3, length=None)
        envs = envfleet.make_vec(env_fn, 2, num_workers=2, backend=backend, start_method=method)
        envs.reset(seed=0)
        try:
            envs.send(np.zeros(2, int))
            print("ready", flush=True)
            while True:
                envs.recv(min_slots=2)
                envs.send(np.zeros(2, int))
        except KeyboardInterrupt:
            pass
        before = envs.reset(seed=0)[0]
        after = envs.step(np.zeros(2, int))[0]
        envs.close()
        print(*before.ravel(), *after.ravel(), flush=True)
"""


@pytest.mark.parametrize(
    ("backend", "method"), [("process", "fork"), ("process", "spawn"), ("thread", "fork")]
)
def test_a_caller_that_catches_ctrl_c_can_go_on(backend, method, tmp_path):
    with program(tmp_path, SURVIVES, backend, method) as running:
        assert running.line() == "ready"
        time.sleep(0.5)
        running.interrupt()
        code = running.finish(10.0)
        assert (code, running.err) == (0, "")
        assert running.out.split() == ["0", "0", "1", "1"]


def test_sigterm_of_the_parent_leaves_no_process(tmp_path):
    """Schedulers send it first; no Python code runs after it."""
    with program(tmp_path, FLEET, "fork", "sleeping") as parent:
        workers = parent.numbers()
        assert parent.line() == "ready"
        os.kill(parent.pid, signal.SIGTERM)
        assert parent.finish(3.0) == -signal.SIGTERM
        assert not left_after(workers, SIGKILL_GRACE_S)


# ---- copies of the parent ------------------------------------------------------------------------

FORKS = """
    import multiprocessing, os, subprocess, sys, time

    import numpy as np

    import envfleet
    from envfleet.testing import Counter


    def nothing():
        pass


    if __name__ == "__main__":
        method, how = sys.argv[1:]
        envs = envfleet.make_vec(
            Counter, 2, num_workers=2, backend="process", start_method=method
        )
        envs.reset(seed=0)
        envs.step(np.zeros(2, int))
        if how == "os.fork":
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            os.waitpid(pid, 0)
        elif how == "os.fork and close":
            pid = os.fork()
            if pid == 0:
                envs.close()
                sys.exit(0)
            os.waitpid(pid, 0)
        elif how == "exception":
            pid = os.fork()
            if pid == 0:
                sys.stderr = open(os.devnull, "w")
                raise RuntimeError("in the child")
            os.waitpid(pid, 0)
        elif how == "multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=nothing)
            child.start()
            child.join()
        time.sleep(0.2)
        print(*envs.step(np.zeros(2, int))[0].ravel(), flush=True)
        envs.close()
        print("closed", flush=True)
"""


@pytest.mark.parametrize(
    ("method", "how"),
    [
        *(("fork", how) for how in ("os.fork", "os.fork and close", "exception")),
        ("fork", "multiprocessing"),
        ("spawn", "os.fork"),
        ("forkserver", "os.fork"),
    ],
)
def test_a_copy_of_the_parent_that_ends_does_not_end_the_workers(method, how, tmp_path):
    with program(tmp_path, FORKS, method, how) as running:
        code = running.finish(20.0)
        assert (code, running.err) == (0, "")
        assert running.out.split() == ["2", "2", "closed"]


USED_IN_A_COPY = """
    import gc, os, sys

    import numpy as np

    import envfleet
    from envfleet.testing import Counter

    if __name__ == "__main__":
        zeros = np.zeros(2, int)
        envs = envfleet.make_vec(Counter, 2, num_workers=2, backend=sys.argv[1])
        envs.reset(seed=0)
        envs.step(zeros)
        envs.send(zeros)
        owner = os.getpid()
        pid = os.fork()
        if pid == 0:
            refused = 0
            uses = (
                lambda: envs.recv(),
                lambda: envs.step(zeros),
                lambda: envs.send(zeros),
                lambda: envs.reset(seed=7),
                lambda: envs.send_reset(seed=7),
                lambda: envs.call("t"),
                lambda: envs.snapshot(),
                lambda: envs.fleet.worker_pids(),
                lambda: envs.fleet.observations(),
            )
            for use in uses:
                try:
                    use()
                except envfleet.errors.FleetClosed as error:
                    refused += f"belongs to process {owner}" in str(error)
            envs.close()
            del envs, uses, use
            gc.collect()
            with envfleet.make_vec(Counter, 2, num_workers=2, backend=sys.argv[1]) as own:
                own.reset(seed=0)
                steps = own.step(zeros)[0].ravel().tolist()
            print(refused, *steps, flush=True)
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        print(*envs.recv().obs.ravel(), *envs.step(zeros)[0].ravel(), flush=True)
        envs.close()
"""


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_a_copy_of_the_parent_cannot_use_its_fleet(backend, tmp_path):
    with program(tmp_path, USED_IN_A_COPY, backend) as running:
        code = running.finish(20.0)
        assert code == 0, running.err
        assert running.out.splitlines() == ["9 1 1", "0", "2 2 3 3"]


# ---- garbage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_fleet_without_references_is_closed(method):
    """Without close; descriptors are checked by the fixture of every test."""
    envs = envfleet.make_vec(Resident, 2, num_workers=2, backend="process", start_method=method)
    envs.reset(seed=0)
    workers = envs.get_attr("pid")
    fleet = weakref.ref(envs.fleet)
    with at_most(2.0):
        del envs
        gc.collect()
    assert fleet() is None
    assert not left_after(workers, 1.0)


def test_a_fleet_in_a_ring_of_references_is_gone_when_that_is_collected():
    envs = envfleet.make_vec(Resident, 2, num_workers=2, backend="process", start_method="fork")
    envs.reset(seed=0)
    workers = envs.get_attr("pid")
    ring: dict[str, Any] = {"envs": envs}
    ring["ring"] = ring
    del envs, ring
    gc.collect()
    assert not left_after(workers, 1.0)


def test_a_fleet_left_with_a_hung_step_is_gone_too():
    before = {child.pid for child in psutil.Process().children()}
    envs = envfleet.make_vec(
        [Resident, functools.partial(Hanging, mode="deaf")],
        num_workers=2,
        backend="process",
        start_method="fork",
    )
    envs.reset(seed=0)
    envs.send(zeros(2))
    children = {child.pid for child in psutil.Process().children()} - before
    assert children >= set(envs.fleet.worker_pids())
    with at_most(2.0):
        del envs
        gc.collect()
    assert not [pid for pid in children if is_alive(pid)]


def test_threads_of_a_fleet_without_references_end():
    """The fixture of every test sees threads too."""
    envs = envfleet.make_vec(Resident, 3, num_workers=3, backend="thread")
    envs.reset(seed=0)
    del envs
    gc.collect()


CLOSED_AT_EXIT = """
    import sys

    import numpy as np

    from envfleet.engine import Fleet, ResetPlan
    from envfleet.testing import Counter

    class Owner:
        def __init__(self, fleet):
            self.fleet = fleet

        def __del__(self):
            self.fleet.close()

    if __name__ == "__main__":
        owner = Owner(Fleet([Counter] * 2, backend=sys.argv[1]))
        owner.fleet.reset([ResetPlan(seed=0)] * 2)
        owner.fleet.send(np.zeros(2, np.int64))
"""


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_a_fleet_may_be_closed_by_a_finalizer_at_the_exit_of_the_interpreter(backend, tmp_path):
    assert run_program(tmp_path, CLOSED_AT_EXIT, backend) == (0, "", "")
