"""Failures at the start: one clear error in the parent that says what to do."""

import errno
import functools
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import envfleet
from envfleet import errors
from envfleet.engine import Deadlines, Fleet, ResetPlan, memory
from envfleet.testing import Counter, FailingConstructor, HugeObservation
from tests.faults.stage import METHODS, Resident, left_after, program, run_program, zeros
from tests.gates import PATIENCE_S, at_most

NEW = ("spawn", "forkserver")
"""Start methods that begin with a new interpreter."""


# ---- the missing guard --------------------------------------------------------------------------

NO_GUARD = """
    import sys

    import numpy as np

    import envfleet
    from envfleet.testing import Counter

    with open(sys.argv[2], "a") as file:
        file.write("imported\\n")
    options = {} if sys.argv[3] == "auto" else {"num_workers": 4}
    envs = envfleet.make_vec(
        Counter, 4, backend=sys.argv[3], start_method=sys.argv[1], **options
    )
    envs.reset(seed=0)
    print("open")
    envs.close()
"""


@pytest.mark.parametrize(
    ("method", "backend"), [("spawn", "process"), ("forkserver", "process"), ("spawn", "auto")]
)
def test_a_missing_main_guard_is_one_error_that_shows_the_fix(method, backend, tmp_path):
    imports = tmp_path / "imports"
    with at_most(PATIENCE_S):
        code, out, err = run_program(tmp_path, NO_GUARD, method, imports, backend)
    assert (code, out) == (1, "")
    assert err.count("Traceback") == 1, err
    assert err.count("MissingMainGuard") == 1
    assert "program.py opens a fleet at its top level" in err
    assert 'if __name__ == "__main__":\n        main()' in err
    assert method in err
    # the program itself, each of its workers, and a fork server that preloads it: no storm
    assert len(imports.read_text().split()) <= 6


def test_fork_needs_no_guard(tmp_path):
    code, out, err = run_program(tmp_path, NO_GUARD, "fork", tmp_path / "imports", "process")
    assert (code, out, err) == (0, "open\n", "")


GUARDED = """
    import sys

    import envfleet
    from envfleet.testing import Counter


    class Local(Counter):
        "Defined in the main script, like most people's first environment."


    def main():
        envs = envfleet.make_vec(
            [Local, lambda: Local(length=3)],
            num_workers=2,
            backend="process",
            start_method=sys.argv[1],
        )
        print(envs.reset(seed=0)[0].tolist())
        envs.close()


    if __name__ == "__main__":
        main()
"""


BLOCKING_MAIN = """
    import multiprocessing, sys, time

    import envfleet
    from envfleet.engine import Deadlines, Fleet
    from envfleet.testing import Counter

    if multiprocessing.current_process().name != "MainProcess":
        time.sleep(3600)

    if __name__ == "__main__":
        try:
            Fleet([Counter], start_method=sys.argv[1], deadlines=Deadlines(start_s=3.0))
        except envfleet.errors.StartTimeout as exc:
            print(exc)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_main_script_whose_import_blocks_is_named_with_its_line(method, tmp_path):
    code, out, err = run_program(tmp_path, BLOCKING_MAIN, method)
    assert (code, err) == (0, "")
    told = f"Start method '{method}' makes it import the main script, and it still does: put what"
    assert told in out
    assert 'program.py", line 9 in <module>' in out


@pytest.mark.parametrize("method", METHODS)
def test_a_guarded_script_may_define_its_own_environments(method, tmp_path):
    code, out, err = run_program(tmp_path, GUARDED, method)
    assert (code, out, err) == (0, "[[0], [0]]\n", "")


FAILING_MAIN = """
    import multiprocessing, sys

    import envfleet
    from envfleet.testing import Counter

    if multiprocessing.current_process().name != "MainProcess":
        print("imported", flush=True)
        if sys.argv[2] == "exit":
            sys.exit("this script does not like workers")
        if sys.argv[2] == "start":
            multiprocessing.get_context("spawn").Process(target=print).start()
        raise RuntimeError("this script does not like workers")

    if __name__ == "__main__":
        envfleet.make_vec(Counter, 4, num_workers=4, backend="process", start_method=sys.argv[1])
"""


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raise", "RuntimeError: this script does not like workers"),
        ("exit", "SystemExit: this script does not like workers"),
        ("start", "An attempt has been made to start a new process before"),
    ],
)
@pytest.mark.parametrize("method", NEW)
def test_a_script_that_workers_cannot_import_is_one_error_that_says_why(
    method, way, reason, tmp_path
):
    with at_most(PATIENCE_S):
        code, out, err = run_program(tmp_path, FAILING_MAIN, method, way)
    assert code == 1
    assert "imported" in out, "what it printed is not lost"
    # the one of the worker, which is the cause, and the one of the program
    assert err.count("Traceback (most") == 2, err
    assert err.count("envfleet.errors.MainNotImportable") == 1
    _, _, last = err.rpartition("envfleet.errors.MainNotImportable: ")
    assert re.search(r"program\.py cannot be imported there: ", last)
    assert reason in last
    assert 'under `if __name__ == "__main__":`' in last
    assert "start_method='fork'" in last


@pytest.mark.parametrize("method", NEW)
def test_a_program_from_standard_input_is_told_to_become_a_file(method, tmp_path):
    with at_most(PATIENCE_S):
        done = subprocess.run(
            [sys.executable, "-", method, "raise"],
            input=textwrap.dedent(FAILING_MAIN),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most") == 2, done.stderr
    _, _, last = done.stderr.rpartition("envfleet.errors.MainNotImportable: ")
    assert "was read from standard input" in last
    assert "Save it to a file, or use start_method='fork'" in last


OTHER_PROCESSES = """
    import multiprocessing, sys

    import envfleet
    from envfleet.testing import Counter

    VALUE = len(sys.argv)


    def show():
        import __main__

        print(__main__.VALUE, flush=True)


    if __name__ == "__main__":
        method = sys.argv[1]
        envs = envfleet.make_vec(Counter, 2, num_workers=2, backend="process", start_method=method)
        process = multiprocessing.get_context(method).Process(target=show)
        process.start()
        process.join()
        envs.close()
"""


@pytest.mark.parametrize("method", NEW)
def test_processes_of_others_have_the_main_script_as_ever(method, tmp_path):
    assert run_program(tmp_path, OTHER_PROCESSES, method) == (0, "2\n", "")


# ---- limits of the machine ----------------------------------------------------------------------

FEW_FILES = """
    import os, resource, sys

    import envfleet
    from envfleet.engine.backends.process import backend
    from envfleet.testing import Counter

    if __name__ == "__main__":
        method, limit, check = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        if check == "no check":
            # the count before starting is only a forecast; here it is wrong
            backend.open_files = lambda: (0, 1_000_000)
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            envfleet.make_vec(
                Counter, 16, num_workers=16, backend="process", start_method=method
            )
        except envfleet.errors.TooManyOpenFiles as error:
            print(error)
        print(len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.parametrize("method", METHODS)
def test_too_many_open_files_says_limit_need_and_remedy(method, tmp_path):
    code, out, err = run_program(tmp_path, FEW_FILES, method, 60, "check")
    assert (code, err) == (0, "")
    sentence, left = out.splitlines()
    assert re.search(r"16 workers need about \d+ open files", sentence)
    assert "this process may have 60" in sentence
    assert "num_workers=" in sentence
    assert re.search(r"ulimit -n \d+", sentence)
    assert int(left) <= (2 if method == "forkserver" else 0)


@pytest.mark.parametrize("limit", range(22, 58, 5))
def test_running_out_of_files_half_way_is_undone(limit, tmp_path):
    """At any descriptor: the parent has as many as before, and the error is the same.

    Two may be left: multiprocessing makes two pipes for a process that it forks, and loses the
    first one if there is no descriptor for the second.
    """
    code, out, _ = run_program(tmp_path, FEW_FILES, "fork", limit, "no check")
    assert code == 0
    sentence, left = out.splitlines()
    assert "16 workers need about" in sentence
    assert left in ("0", "2")


MANY_WORKERS = """
    import os, resource

    import numpy as np

    from envfleet.engine import Fleet, ResetPlan
    from envfleet.testing import Counter

    if __name__ == "__main__":
        count = 256
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        before = len(os.listdir("/proc/self/fd"))
        fleet = Fleet([Counter] * count, num_workers=count)
        fleet.reset([ResetPlan(seed=0)] * count)
        fleet.step(np.zeros(count, np.int64))
        print((len(os.listdir("/proc/self/fd")) - before) // count)
        fleet.close()
        print(len(os.listdir("/proc/self/fd")) - before)
"""


def test_256_workers_fit_into_1024_open_files(tmp_path):
    code, out, err = run_program(tmp_path, MANY_WORKERS, within_s=110.0)
    assert (code, out) == (0, "3\n0\n"), err


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_costs_three_descriptors(method):
    def held(num_workers):
        with closing(Fleet([Counter] * 3, num_workers=num_workers, start_method=method)) as fleet:
            fleet.reset([ResetPlan(seed=0)] * 3)
            fleet.step(zeros(3))
            return len(os.listdir("/proc/self/fd"))

    held(1)  # multiprocessing opens what it keeps for good
    assert held(3) - held(1) == 2 * 3


class Kin(Counter):
    """Says what multiprocessing says of the parent."""

    @property
    def parent(self):
        parent: Any = multiprocessing.parent_process()
        return (parent.pid, parent.is_alive())


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_knows_its_parent(method):
    with closing(Fleet([Kin], start_method=method)) as fleet:
        assert fleet.call("parent") == [(os.getpid(), True)]


class Enormous(Counter):
    """More than any machine has; such an observation is never made."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.MultiBinary(1 << 44)


@pytest.mark.parametrize("backend", ["process", "thread", "serial"])
def test_not_enough_shared_memory_says_need_and_remedy(backend):
    with pytest.raises(errors.NotEnoughSharedMemory) as caught:
        Fleet([Enormous] * 2, num_workers=2 if backend != "serial" else 1, backend=backend)
    error = caught.value
    assert error.need_bytes >= 4 << 44  # two slots; observations and last observations
    assert error.need_bytes > error.available_bytes > 0
    assert "2 slots" in str(error)
    assert "MiB" in str(error)
    assert "fewer environments" in str(error)


def test_large_observations_that_fit_are_no_trouble():
    env_fn = functools.partial(HugeObservation, num_bytes=1 << 22)
    envs = envfleet.make_vec(env_fn, 4, num_workers=2, backend="process", start_method="fork")
    envs.reset(seed=0)
    obs, *_ = envs.step(zeros(4))
    assert (obs == 1).all()
    envs.close()


# ---- what builds the environment ----------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_function_that_cannot_travel_is_named(method):
    lock = threading.Lock()

    def build_with_a_lock():
        with lock:
            return Counter()

    with at_most(5.0), pytest.raises(errors.EnvNotPicklable) as caught:
        Fleet([Counter, Counter, build_with_a_lock], num_workers=2, start_method=method)
    error = caught.value
    assert error.slot == 2
    assert "build_with_a_lock" in str(error)
    assert "lock" in error.reason
    assert "inside the function" in str(error)
    assert "backend='thread'" in str(error)


def test_threads_need_no_pickle():
    lock = threading.Lock()

    def build_with_a_lock():
        with lock:
            return Counter()

    envs = envfleet.make_vec([build_with_a_lock] * 2, backend="thread")
    envs.reset(seed=0)
    envs.close()


HERE_ONLY = """
from envfleet.testing import Counter

class Here(Counter):
    pass
"""


@pytest.fixture
def here_only(tmp_path, monkeypatch):
    """A module that this process can import, and no new one."""
    (tmp_path / "only_here.py").write_text(HERE_ONLY)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("only_here")
    monkeypatch.undo()
    yield module
    del sys.modules["only_here"]


@pytest.mark.parametrize("method", NEW)
def test_a_module_that_only_the_parent_has_is_named(method, here_only):
    with at_most(PATIENCE_S), pytest.raises(errors.EnvNotImportable) as caught:
        Fleet([Counter, here_only.Here], num_workers=2, start_method=method)
    error = caught.value
    assert error.slots == (1,)
    assert "No module named 'only_here'" in str(error)
    assert "PYTHONPATH" in str(error)
    assert isinstance(error.__cause__, errors.RemoteTraceback)


def test_fork_has_what_the_parent_has(here_only):
    Fleet([here_only.Here], start_method="fork").close()


ENV_ID = "EnvfleetFaults/OnlyInTheParent-v0"


@pytest.fixture
def registered():
    gymnasium.register(ENV_ID, entry_point="envfleet.testing:Counter", max_episode_steps=4)
    yield ENV_ID
    del gymnasium.registry[ENV_ID]


@pytest.mark.parametrize("method", NEW)
def test_an_id_registered_only_in_the_parent(method, registered):
    """A worker does not know an id inside a function; an id passed to make_vec is sent."""
    with at_most(PATIENCE_S), pytest.raises(errors.EnvNotRegistered) as caught:
        Fleet(
            [Counter, functools.partial(gymnasium.make, registered)],
            num_workers=2,
            start_method=method,
        )
    error = caught.value
    assert error.slot == 1
    assert "EnvfleetFaults" in str(error)
    assert "Pass the id itself to make_vec" in str(error)

    envs = envfleet.make_vec(registered, 2, num_workers=2, backend="process", start_method=method)
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(zeros(2))
    *_, truncated, _ = envs.step(zeros(2))
    assert truncated.tolist() == [True, True], "the registration travels with its time limit"
    envs.close()


# ---- constructors -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_first_of_several_failing_constructors_is_enough(method):
    """One error, and one traceback in it."""
    with at_most(PATIENCE_S), pytest.raises(errors.EnvConstructionFailed) as caught:
        Fleet([FailingConstructor] * 4, num_workers=2, start_method=method)
    assert caught.value.slot in (0, 2)
    assert str(caught.value.__cause__).count("Traceback") == 1


QUIET = """
    import sys

    import envfleet
    from envfleet.testing import FailingConstructor


    def arrive():
        import no_such_module


    class FailingImport:
        "Arrives in a worker by an import that fails there, even in a fork."

        def __reduce__(self):
            return arrive, ()

        def __call__(self):
            raise AssertionError("never built")


    if __name__ == "__main__":
        env_fn = {"build": FailingConstructor, "import": FailingImport()}[sys.argv[2]]
        try:
            envfleet.make_vec(
                env_fn, 2, num_workers=2, backend="process", start_method=sys.argv[1]
            )
        except envfleet.errors.StartError as error:
            print(type(error).__name__, error)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("what", "error", "reason"),
    [
        ("build", "EnvConstructionFailed", "the constructor failed as asked"),
        ("import", "EnvNotImportable", "No module named 'no_such_module'"),
    ],
)
def test_workers_that_cannot_come_up_are_quiet(what, error, reason, method, tmp_path):
    """Each reports to the parent, which raises once; workers write nothing to stderr."""
    code, out, err = run_program(tmp_path, QUIET, method, what)
    assert (code, err) == (0, "")
    assert out.startswith(error)
    assert reason in out


def test_a_function_that_builds_no_environment_is_told_so():
    for nothing in (dict, lambda: None):
        with pytest.raises(errors.ConfigError, match=r"not a gymnasium\.Env"):
            Fleet([Counter, nothing], num_workers=2)


def test_a_block_in_a_file_has_its_place_on_the_disk(monkeypatch):
    """A map of a file with holes on a full disk ends its process (SIGBUS) when it is written to."""
    monkeypatch.setattr(memory, "HAS_MEMFD", False)
    slab = memory.Slab.create(is_shared=True)
    slab.grow(1 << 20, 1)
    assert slab.fd is not None
    assert os.fstat(slab.fd).st_blocks * 512 >= 1 << 20

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(errors.NotEnoughSharedMemory, match=r"on device in .* TMPDIR"):
        slab.grow(2 << 20, 1)
    slab.close()


def test_start_deadlines_run_side_by_side():
    """Each worker's clock starts when it is launched, not when its neighbour is ready."""

    class SlowToBuild(Counter):
        def __init__(self, seconds):
            super().__init__()
            time.sleep(seconds)

    # one after another they would take 2.0 + 2.0 + 3.0 seconds
    env_fns = [functools.partial(SlowToBuild, seconds) for seconds in (2.0, 2.0, 30.0)]
    with at_most(3.0 + 1.8), pytest.raises(errors.StartTimeout) as caught:
        Fleet(env_fns, num_workers=3, deadlines=Deadlines(start_s=3.0))
    assert (caught.value.worker, caught.value.slots) == (2, (2,))
    assert "time.sleep" in caught.value.doing or "__init__" in caught.value.doing


KILLED_EARLY = """
    import sys

    import envfleet
    from envfleet.testing import Counter

    if __name__ == "__main__":
        print("opening", flush=True)
        try:
            envfleet.make_vec(
                Counter, 4, num_workers=4, backend="process", start_method=sys.argv[1]
            )
        except envfleet.errors.EnvfleetError as error:
            print(type(error).__name__, str(error).replace("\\n", " "))
        else:
            print("open")
"""


@pytest.mark.parametrize("method", NEW)
@pytest.mark.parametrize("after_s", [0.1, 0.4])
def test_a_worker_killed_on_its_way_up_is_named(method, after_s, tmp_path):
    """By the system (out of memory), before it has become a worker."""
    with program(tmp_path, KILLED_EARLY, method) as running:
        assert running.line() == "opening"
        give_up_s = time.monotonic() + 5.0
        while not (workers := candidates(running, method)) and time.monotonic() < give_up_s:
            time.sleep(0.01)
        time.sleep(after_s)
        processes = running.descendants()
        for pid in workers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        with at_most(PATIENCE_S):
            code = running.finish(15.0)
        assert code == 0, running.err
        assert running.out.startswith(("WorkerDied", "open")), running.out
        assert running.err == ""
        assert not left_after(processes, 2.0)


def candidates(running, method):
    """Children that become workers; under forkserver they are the server's children."""

    def is_servant(child):
        line = " ".join(child.cmdline())
        return "resource_tracker" in line or ("forkserver" in line and child.ppid() == running.pid)

    found = []
    for child in psutil.Process(running.pid).children(recursive=True):
        try:
            if not is_servant(child):
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_fork_server_that_ends_while_a_worker_starts_is_named(monkeypatch):
    connect = forkserver.connect_to_new_process

    def connect_to_one_that_ends(fds):
        forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(server, signal.SIGSTOP)
        try:
            return connect(fds)
        finally:
            os.kill(server, signal.SIGKILL)
            # A dying process closes its sockets before it can be seen as ended: without this wait
            # the next fleet would ask it once more.
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
            monkeypatch.undo()

    monkeypatch.setattr(forkserver, "connect_to_new_process", connect_to_one_that_ends)
    with pytest.raises(errors.WorkerDied, match=r"during start-up .*\n?.*The fork server ended"):
        Fleet([Counter], start_method="forkserver")
    with closing(Fleet([Counter], start_method="forkserver")) as fleet:
        fleet.reset([ResetPlan(seed=0)])


def test_environments_may_have_children_of_their_own():
    """Environments may start processes in a worker."""
    envs = envfleet.make_vec(
        HasChild, 2, num_workers=2, backend="process", start_method="fork", on_failure="restart"
    )
    envs.reset(seed=0)
    children = envs.get_attr("child_pid")
    assert np.unique(children).size == 2
    envs.close()
    assert not left_after(children, 2.0)


class HasChild(Resident):
    """Starts its own process and ends it in close."""

    def __init__(self):
        super().__init__()
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        self.child.start()
        self.child_pid = self.child.pid

    def close(self):
        self.child.kill()
        self.child.join()


# ---- what workers of one parent do not share ----------------------------------------------------

DRAWS = """
    import sys

    import numpy as np

    import envfleet
    from envfleet.testing import Counter


    class Drawing(Counter):
        "Draws from the generator that numpy keeps for the whole process."

        @property
        def drawn(self):
            return float(np.random.random())


    if __name__ == "__main__":
        np.random.seed(0)
        for _ in range(2):
            envs = envfleet.make_vec(
                Drawing, 3, num_workers=3, backend="process", start_method=sys.argv[1]
            )
            print(*envs.get_attr("drawn"))
            envs.close()
"""


@pytest.mark.parametrize("method", METHODS)
def test_no_two_workers_draw_the_same(method, tmp_path):
    runs = [run_program(tmp_path, DRAWS, method) for _ in range(2)]
    assert [code for code, _, _ in runs] == [0, 0], runs
    first, second = (out.split("\n") for _, out, _ in runs)
    assert len(set(first[0].split())) == 3
    if method == "fork":  # it goes on from the parent's, which was seeded
        assert first == second
    else:
        assert len({*first[0].split(), *first[1].split(), *second[0].split()}) == 9


STREAMS_OF_THEIR_OWN = """
    import os, sys

    import numpy as np

    import envfleet
    from envfleet.testing import Counter


    class Forking(Counter):
        "Has a child that draws."

        @property
        def drawn(self):
            np.random.seed(0)
            ours, theirs = os.pipe()
            if not os.fork():
                os.write(theirs, repr(float(np.random.random())).encode())
                os._exit(0)
            os.wait()
            return os.read(ours, 99).decode()


    if __name__ == "__main__":
        if sys.argv[2] == "another":
            np.random.set_bit_generator(np.random.PCG64(1))
        envs = envfleet.make_vec(Counter, 2, backend="process", start_method=sys.argv[1])
        envs.close()
        if sys.argv[2] == "usual":
            envs = envfleet.make_vec(Forking, 2, backend="process", start_method=sys.argv[1])
            print(*envs.get_attr("drawn"))
            envs.close()
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_child_of_a_worker_goes_on_with_the_worker_s_stream(method, tmp_path):
    code, out, err = run_program(tmp_path, STREAMS_OF_THEIR_OWN, method, "usual")
    assert (code, err) == (0, "")
    assert out.split() == ["0.5488135039273248"] * 2


@pytest.mark.parametrize("method", METHODS)
def test_another_global_generator_is_left_alone(method, tmp_path):
    code, out, err = run_program(tmp_path, STREAMS_OF_THEIR_OWN, method, "another")
    assert (code, out, err) == (0, "", "")


SHARED_SERVER = """
    import multiprocessing, os, signal

    import envfleet
    from envfleet.testing import Counter


    def listen(pipe):
        pipe.send(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        pipe.send(signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set())
        pipe.send(dict(os.environ))


    if __name__ == "__main__":
        envs = envfleet.make_vec(Counter, 1, backend="process", start_method="forkserver")
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("forkserver").Process(target=listen, args=(theirs,))
        child.start()
        print(ours.recv(), ours.recv(), multiprocessing.forkserver._forkserver._preload_modules)
        started = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
        print(sorted(dict(ours.recv().items() ^ os.environ.items()).keys() - started))
        child.join()
        envs.close()
"""


def test_other_children_of_the_fork_server_hear_ctrl_c_and_have_our_variables(tmp_path):
    code, out, err = run_program(tmp_path, SHARED_SERVER)
    assert (code, out, err) == (0, "True True ['__main__']\n[]\n", "")


OTHER_ENGINE = """
    import sys

    sys.path.insert(0, sys.argv[2])

    import envfleet
    from envfleet.testing import Counter


    class Where(Counter):
        @property
        def engine(self):
            return envfleet.__file__


    if __name__ == "__main__":
        envs = envfleet.make_vec(Where, 1, backend="process", start_method=sys.argv[1])
        files = {envfleet.__file__, *envs.get_attr("engine")}
        print(files == {sys.argv[2] + "/envfleet/__init__.py"})
        envs.close()
"""


@pytest.mark.parametrize("method", NEW)
def test_workers_load_the_engine_that_their_parent_has(method, tmp_path):
    shutil.copytree(Path(envfleet.__file__).parent, tmp_path / "mine" / "envfleet")
    code, out, err = run_program(tmp_path, OTHER_ENGINE, method, tmp_path / "mine")
    assert (code, out, err) == (0, "True\n", "")


# ---- what opening leaves as it was --------------------------------------------------------------

THREADS = """
    import os
    import threading
    import time
    from multiprocessing import forkserver

    from envfleet.engine import Fleet
    from envfleet.testing import Counter

    is_within = threading.Event()
    ensure_running = forkserver.ensure_running

    def slowly():
        is_within.set()
        time.sleep(1.0)  # the other thread comes meanwhile
        ensure_running()

    def opens_a_fleet():
        Fleet([Counter], start_method="forkserver").close()

    if __name__ == "__main__":
        forkserver.ensure_running = slowly
        before = dict(os.environ)
        threads = [threading.Thread(target=opens_a_fleet) for _ in range(3)]
        threads[0].start()
        is_within.wait(60)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        print("changed:", sorted(set(before.items()) ^ set(os.environ.items())))
"""


def test_variables_are_as_they_were_when_threads_have_opened_fleets(tmp_path):
    code, out, err = run_program(tmp_path, THREADS)
    assert (code, out) == (0, "changed: []\n"), err
