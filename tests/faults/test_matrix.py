"""Every fault at every moment of a worker's life, under every start method.

Law 3 and law 4: a named error or a recovery, inside two seconds beyond the deadline. Law 5: nothing
is left behind, which the fixture of the whole suite checks after each of these.
"""

import functools
import os
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from envfleet import errors
from envfleet.engine import Deadlines, Fleet, RestartPolicy
from envfleet.testing import Crashing, Hanging
from tests.faults.stage import (
    GRACE_S,
    METHODS,
    Resident,
    Unlucky,
    kill_and_wait,
    left_after,
    plans,
    step,
    zeros,
)
from tests.gates import PATIENCE_S, allowed_s, at_most, wait_for, waited_s

FAULTS: dict[str, Any] = {
    "sigkill": functools.partial(Crashing, mode="kill", length=None),
    "sigstop": functools.partial(Hanging, mode="stop", length=None),
    "os_exit": functools.partial(Crashing, mode="exit", exitcode=3, length=None),
    "exception": functools.partial(Crashing, mode="exception", length=None),
    "hang": functools.partial(Hanging, mode="sleep", length=None),
}
EXIT_CODES = {"sigkill": -signal.SIGKILL, "os_exit": 3}
SILENT = ("sigstop", "hang")

DEADLINE_S = {"fork": 0.5, "thread": 0.5, "spawn": 0.8, "forkserver": 0.8}
CLOSE_S = 0.4
START_S = {"fork": 1.0, "spawn": 2.5, "forkserver": 2.5}
"""A new interpreter takes most of a second to come up; on a busy machine more."""


@contextmanager
def fleet_of(broken, where="fork", good=Resident, start_s=30.0, **options):
    """The last slot, in its own worker, fails; the one before it does not.

    A new interpreter for a slot that does nothing costs a second, so under spawn and
    forkserver the failing slot is alone.
    """
    backend: Any = where if where in ("serial", "thread") else "process"
    is_new = where in ("spawn", "forkserver")
    deadlines = Deadlines(
        step_s=DEADLINE_S.get(where),
        reset_s=DEADLINE_S.get(where),
        start_s=start_s,
        close_s=CLOSE_S,
    )
    fleet = Fleet(
        [broken] if is_new else [good, broken],
        num_workers=1 if is_new else 2,
        backend=backend,
        start_method="fork" if backend != "process" else where,
        deadlines=deadlines,
        **options,
    )
    try:
        yield fleet
    finally:
        with at_most(CLOSE_S + GRACE_S):
            fleet.close()


def patient(where):
    """The number of the slot, and of the worker, that fails."""
    return 0 if where in ("spawn", "forkserver") else 1


def check(error, fault, doing, who=1):
    """The error has the right class and names the slot, the cause, the activity and the stack."""
    text = str(error)
    if fault in EXIT_CODES:
        assert type(error) is errors.WorkerDied
        assert (error.worker, error.slots) == (who, (who,))
        assert error.exitcode == EXIT_CODES[fault]
        assert error.doing == doing
        assert f"worker {who} died during {doing}" in text
        assert ("SIGKILL" if fault == "sigkill" else "exit code 3") in text
    elif fault in SILENT:
        assert type(error) is errors.DeadlineExceeded
        assert (error.worker, error.slot, error.doing) == (who, who, doing)
        assert error.seconds in DEADLINE_S.values()
        assert error.option == ("step_timeout_s" if doing == "step" else "reset_timeout_s")
        assert ("misbehave" if fault == "hang" else "stopped") in error.stack
        assert error.stack in text
    else:
        assert type(error) is errors.EnvFailed
        assert (error.slot, error.doing) == (who, doing)
        assert "crashed as asked" in text
        assert isinstance(error.__cause__, errors.RemoteTraceback)
        assert "in misbehave" in str(error.__cause__)


# ---- constructor --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", FAULTS)
def test_in_the_constructor(fault, method):
    env_fn = functools.partial(FAULTS[fault], at="constructor")
    for start_s in (START_S[method] * factor for factor in (1, 3, 9)):
        with (
            at_most(start_s + GRACE_S),
            pytest.raises(errors.EnvfleetError) as caught,
            fleet_of(env_fn, method, start_s=start_s),
        ):
            pass
        if has_got_there(caught.value):
            break
    error, who = caught.value, patient(method)
    if fault in EXIT_CODES:
        check(error, fault, f"the constructor of slot {who}", who)
    elif fault in SILENT:
        assert type(error) is errors.StartTimeout
        assert (error.worker, error.slots, error.seconds) == (who, (who,), start_s)
        assert ("misbehave" if fault == "hang" else "stopped") in error.doing
    else:
        assert type(error) is errors.EnvConstructionFailed
        assert error.slot == who
        assert "crashed as asked" in str(error)
        assert "in misbehave" in str(error.__cause__)


def test_a_worker_that_is_gone_before_its_parent_looks_is_named(monkeypatch):
    """The fork server reaps it, so nothing is left to look at."""
    look = os.pidfd_open

    def look_late(pid):
        wait_for(Path(f"/proc/{pid}"), is_there=False)
        return look(pid)

    monkeypatch.setattr(os, "pidfd_open", look_late)
    env_fn = functools.partial(FAULTS["sigkill"], at="constructor")
    with pytest.raises(errors.WorkerDied) as caught, fleet_of(env_fn, "forkserver"):
        pass
    check(caught.value, "sigkill", "the constructor of slot 0", 0)


def has_got_there(error):
    """Whether the deadline passed in the constructor, not while an interpreter started."""
    is_late = isinstance(error, errors.StartTimeout)
    return not is_late or "misbehave" in error.doing or "stopped" in error.doing


@pytest.mark.parametrize("where", ["serial", "thread"])
def test_an_exception_in_the_constructor_without_processes(where):
    env_fn = functools.partial(Crashing, at="constructor")
    with pytest.raises(errors.EnvConstructionFailed) as caught, fleet_of(env_fn, where):
        pass
    assert caught.value.slot == 1
    assert "in misbehave" in str(caught.value.__cause__)


def test_a_hang_in_the_constructor_of_a_thread():
    env_fn = functools.partial(Hanging, at="constructor", for_s=1.5)
    with (
        at_most(1.0 + GRACE_S),
        pytest.raises(errors.StartTimeout, match="misbehave") as caught,
        fleet_of(env_fn, "thread", start_s=1.0),
    ):
        pass
    assert (caught.value.worker, caught.value.slots) == (1, (1,))


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_environments_built_before_a_failing_constructor_are_closed(backend, tmp_path):
    """In the same worker; those of another worker end with their process."""
    closed = tmp_path / "closed"
    with pytest.raises(errors.EnvConstructionFailed, match="slot 1"):
        Fleet(
            [functools.partial(Resident, closed), functools.partial(Crashing, at="constructor")],
            backend=backend,
        )
    assert closed.exists()


# ---- reset and step -----------------------------------------------------------------------------


def reset(fleet):
    return fleet.reset(plans(*range(fleet.num_slots)))


def provoke(fleet, moment):
    """Reset, or step until it happens."""
    if moment == "reset":
        reset(fleet)
    while True:
        step(fleet)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("moment", ["reset", "step"])
@pytest.mark.parametrize("fault", FAULTS)
def test_in_reset_and_step(fault, moment, method):
    env_fn = functools.partial(FAULTS[fault], at=moment, nth=2 if moment == "step" else 1)
    with fleet_of(env_fn, method) as fleet:
        if moment == "step":
            reset(fleet)
        with at_most(DEADLINE_S[method] + GRACE_S), pytest.raises(errors.EnvfleetError) as caught:
            provoke(fleet, moment)
        who = patient(method)
        check(caught.value, fault, moment, who)
        others_are_unharmed(fleet, moment)
        if fault == "exception":
            fleet.reset(plans(5), [who])
            fleet.send(zeros(1), [who])
            assert fleet.recv().obs.tolist() == [[1]]
        else:
            with pytest.raises(type(caught.value)):
                fleet.send(zeros(1), [who])


def others_are_unharmed(fleet, moment):
    """Slot 0 gets its result of the same step, and goes on."""
    if fleet.num_slots == 1:
        return
    if moment == "step":
        batch = fleet.recv()
        assert batch.slots.tolist() == [0]
        assert batch.obs.tolist() == [[2]]
        assert batch.valid.all()
        expected = 3
    else:
        fleet.reset(plans(0), [0])
        expected = 1
    fleet.send(zeros(1), [0])
    assert fleet.recv().obs.tolist() == [[expected]]


@pytest.mark.parametrize("where", ["serial", "thread"])
@pytest.mark.parametrize("moment", ["reset", "step"])
def test_an_exception_without_processes(moment, where):
    env_fn = functools.partial(Crashing, at=moment, nth=2 if moment == "step" else 1)
    with fleet_of(env_fn, where) as fleet:
        if moment == "step":
            reset(fleet)
        with pytest.raises(errors.EnvFailed) as caught:
            provoke(fleet, moment)
        check(caught.value, "exception", moment)
        others_are_unharmed(fleet, moment)


@pytest.mark.parametrize("moment", ["reset", "step"])
def test_a_hang_in_a_thread(moment):
    nth = 2 if moment == "step" else 1
    env_fn = functools.partial(Hanging, at=moment, nth=nth, for_s=1.5)
    with fleet_of(env_fn, "thread") as fleet:
        if moment == "step":
            reset(fleet)
        with (
            at_most(DEADLINE_S["thread"] + GRACE_S),
            pytest.raises(errors.DeadlineExceeded) as caught,
        ):
            provoke(fleet, moment)
        check(caught.value, "hang", moment)
        others_are_unharmed(fleet, moment)


@pytest.mark.parametrize("fault", FAULTS)
def test_recovery_in_step(fault, tmp_path):
    env_fn = functools.partial(FAULTS[fault], at="step", nth=2, once=tmp_path / "happened")
    with fleet_of(env_fn, on_failure="restart") as fleet:
        reset(fleet)
        step(fleet)
        with at_most(DEADLINE_S["fork"] + GRACE_S):
            batch = step(fleet)
        comes_back_truncated(fleet, batch)


def comes_back_truncated(fleet, batch, t=2):
    """Slot 0 goes on counting; slot 1 is truncated, then reset, then counts from one again."""
    assert batch.slots.tolist() == [0, 1]
    assert batch.obs[0].tolist() == [t]
    assert batch.valid.tolist() == [True, False]
    assert batch.terminated.tolist() == [False, False]
    assert batch.truncated.tolist() == [False, True]
    assert batch.rewards.tolist() == [t, 0.0]
    (incident,) = batch.incidents
    assert (incident.slot, incident.slots, incident.worker) == (1, (1,), 1)
    assert list(batch.infos["incident"]) == [None, incident]
    assert batch.infos["_incident"].tolist() == [False, True]
    assert list(fleet.incidents) == [incident]
    again, after = step(fleet), step(fleet)
    assert again.obs.tolist() == [[t + 1], [0]]
    assert again.valid.tolist() == [True, False]
    assert after.obs.tolist() == [[t + 2], [1]]
    assert after.valid.all()
    assert again.incidents == after.incidents == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_recovery_in_reset(fault, tmp_path):
    """The new environment repeats the reset, and no episode is lost."""
    env_fn = functools.partial(FAULTS[fault], at="reset", once=tmp_path / "happened")
    with fleet_of(env_fn, on_failure="restart") as fleet:
        with at_most(DEADLINE_S["fork"] + GRACE_S):
            batch = reset(fleet)
        assert batch.slots.tolist() == [0, 1]
        assert batch.obs.tolist() == [[0], [0]]
        assert not batch.truncated.any()
        (incident,) = batch.incidents
        assert (incident.slot, incident.doing) == (1, "reset")
        assert step(fleet).obs.tolist() == [[1], [1]]
        assert step(fleet).obs.tolist() == [[2], [2]]


@pytest.mark.parametrize("moment", ["reset", "step"])
@pytest.mark.parametrize("fault", FAULTS)
def test_recovery_by_replay(fault, moment, tmp_path):
    """The rows are those of a fleet without the fault; only the incident tells of it."""
    env_fn = functools.partial(FAULTS[fault], at=moment, nth=2, once=tmp_path / "happened")
    with fleet_of(env_fn, on_failure="resume") as fleet:
        for seeds in (plans(0, 1), plans(None, None)):
            with at_most(DEADLINE_S["fork"] + GRACE_S):
                assert fleet.reset(seeds).obs.tolist() == [[0], [0]]
            for t in range(1, 4):
                with at_most(DEADLINE_S["fork"] + GRACE_S):
                    batch = step(fleet)
                assert batch.obs.tolist() == [[t], [t]]
                assert batch.rewards.tolist() == [t, t]
                assert batch.valid.all()
                assert not (batch.terminated | batch.truncated).any()
                assert (batch.incidents, batch.infos) == ((), {})
        (incident,) = fleet.incidents
        assert (incident.kind, incident.slot, incident.doing) == (KINDS[fault], 1, moment)


KINDS = {
    "sigkill": "death",
    "os_exit": "death",
    "sigstop": "timeout",
    "hang": "timeout",
    "exception": "exception",
}


@contextmanager
def recovery_in_time(fleet, method):
    """Starting a new process has its own deadline and is not part of the two seconds."""
    before, started_s, waited_before_s = fleet.worker_pids(), time.monotonic(), waited_s()
    yield
    took_s, after = time.monotonic() - started_s, fleet.worker_pids()
    if after != before:
        took_s -= age_s(after[-1])
    assert took_s < allowed_s(DEADLINE_S[method] + GRACE_S, waited_s() - waited_before_s)


def age_s(pid):
    """When a process started; psutil knows it only to the second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    born_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - born_s


@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_recovery_from_one_fault_after_another(method, tmp_path):
    """Every fault in step and in reset, in one fleet, because interpreters start slowly."""
    in_step = [("step", fault) for fault in FAULTS]
    in_reset = [("reset", fault) for fault in FAULTS]
    env_fn = functools.partial(Unlucky, in_step + in_reset, tmp_path / "met")
    policy = RestartPolicy(max_restarts=len(in_step + in_reset))
    with fleet_of(env_fn, method, on_failure="restart", restarts=policy) as fleet:
        fleet.reset(plans(99))
        for _, fault in in_step:
            assert step(fleet).obs.tolist() == [[1]]
            with recovery_in_time(fleet, method):
                batch = step(fleet)
            assert (batch.truncated.tolist(), batch.valid.tolist()) == ([True], [False])
            (incident,) = batch.incidents
            assert (incident.kind, incident.doing) == (KINDS[fault], "step")
            assert incident.exitcode == EXIT_CODES.get(fault)
            if fault != in_step[-1][1]:
                assert step(fleet).obs.tolist() == [[0]]
        for number, (_, fault) in enumerate(in_reset, len(in_step)):
            with recovery_in_time(fleet, method):
                batch = fleet.reset(plans(number))
            assert batch.obs.tolist() == [[0]]
            (incident,) = batch.incidents
            assert (incident.kind, incident.doing) == (KINDS[fault], "reset")
        assert step(fleet).obs.tolist() == [[1]]
        assert len(fleet.incidents) == len(in_step + in_reset)


@pytest.mark.parametrize("moment", ["reset", "step"])
def test_recovery_of_a_hung_thread(moment, tmp_path):
    nth = 2 if moment == "step" else 1
    env_fn = functools.partial(
        Hanging, at=moment, nth=nth, for_s=1.0, once=tmp_path / "happened", length=None
    )
    with fleet_of(env_fn, "thread", on_failure="restart") as fleet:
        batch = reset(fleet)
        if moment == "step":
            step(fleet)
            with at_most(DEADLINE_S["thread"] + GRACE_S):
                batch = step(fleet)
            comes_back_truncated(fleet, batch)
        else:
            assert batch.obs.tolist() == [[0], [0]]
        # the old thread comes back from its sleep while the new one is at work
        before, count = step(fleet).obs, 0
        until_s = time.monotonic() + 0.8
        while time.monotonic() < until_s:
            count += 1
            assert step(fleet).obs.tolist() == (before + count).tolist()


# ---- idle ---------------------------------------------------------------------------------------


def strike_idle(fleet, fault):
    """Cause the fault while the worker is idle, and wait until it has happened."""
    who = fleet.num_slots - 1
    (pid,) = fleet.call("pid", slots=[who])
    if fault == "sigkill":
        kill_and_wait(pid)
    elif fault == "sigstop":
        os.kill(pid, signal.SIGSTOP)
    else:
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "told"
            if fault == "os_exit":
                fleet.call("leave_when_told", (told, 3), slots=[who])
            else:
                fleet.call("seize_when_told", (told, 3600.0), slots=[who])
            told.touch()
            wait_for(told, is_there=False)
        if fault == "os_exit":
            assert not left_after([pid], PATIENCE_S)


IDLE_FAULTS = ("sigkill", "os_exit", "sigstop", "hang")
"""An idle worker cannot raise; its hang is a thread that holds the interpreter lock."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", IDLE_FAULTS)
def test_while_idle(fault, method):
    with fleet_of(Resident, method) as fleet:
        reset(fleet)
        step(fleet)
        strike_idle(fleet, fault)
        with at_most(DEADLINE_S[method] + GRACE_S), pytest.raises(errors.EnvfleetError) as caught:
            step(fleet)
        error: Any = caught.value
        who = patient(method)
        if fault in EXIT_CODES:
            check(error, fault, error.doing, who)
            assert error.doing in ("idle time", "step")
        else:
            assert type(error) is errors.DeadlineExceeded
            assert (error.worker, error.slot) == (who, who)
            if fault == "sigstop":
                assert "stopped" in error.stack
            else:  # written by the kernel's signal, with the interpreter lock in other hands
                assert "threading.py" in error.stack
        others_are_unharmed(fleet, "step")


@pytest.mark.parametrize("fault", IDLE_FAULTS)
def test_recovery_while_idle(fault):
    with fleet_of(Resident, on_failure="restart") as fleet:
        reset(fleet)
        step(fleet)
        strike_idle(fleet, fault)
        with at_most(DEADLINE_S["fork"] + GRACE_S):
            batch = step(fleet)
        comes_back_truncated(fleet, batch)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_recovery_while_idle_one_after_another(method):
    with fleet_of(Resident, method, on_failure="restart") as fleet:
        reset(fleet)
        for fault in IDLE_FAULTS:
            step(fleet)
            strike_idle(fleet, fault)
            with recovery_in_time(fleet, method):
                batch = step(fleet)
            assert (batch.truncated.tolist(), batch.valid.tolist()) == ([True], [False])
            assert [incident.kind for incident in batch.incidents] == [KINDS[fault]]
            assert step(fleet).obs.tolist() == [[0]]


@pytest.mark.parametrize("then", ["reset", "call", "close"])
@pytest.mark.parametrize("fault", ["sigkill", "os_exit", "sigstop"])
def test_while_idle_and_then_something_else_than_a_step(fault, then):
    with fleet_of(Resident) as fleet:
        reset(fleet)
        strike_idle(fleet, fault)
        if then == "close":
            return  # fleet_of closes, and holds the watch
        with at_most(DEADLINE_S["fork"] + GRACE_S), pytest.raises(errors.EnvfleetError) as caught:
            reset(fleet) if then == "reset" else fleet.call("pid")
        expected = errors.WorkerDied if fault in EXIT_CODES else errors.DeadlineExceeded
        assert type(caught.value) is expected
        assert caught.value.worker == 1


# ---- close --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", FAULTS)
def test_in_close(fault, method, tmp_path):
    closed, who = tmp_path / "closed", patient(method)
    env_fn = functools.partial(FAULTS[fault], at="close")
    with fleet_of(env_fn, method, good=functools.partial(Resident, closed)) as fleet:
        reset(fleet)
        step(fleet)
        if fault == "exception":
            with pytest.warns(RuntimeWarning, match=rf"slot {who} .*crashed as asked"):
                fleet.close()
        else:
            with at_most(CLOSE_S + GRACE_S):
                fleet.close()
        assert fleet.is_closed
        assert closed.exists() or fleet.num_slots == 1, "a neighbour was not closed"
        fleet.close()


def test_an_exception_in_close_does_not_keep_neighbours_open(tmp_path):
    """In one worker: those before it and those after it."""
    files = [tmp_path / "before", tmp_path / "after"]
    fleet = Fleet(
        [
            functools.partial(Resident, files[0]),
            functools.partial(Crashing, at="close"),
            functools.partial(Resident, files[1]),
        ]
    )
    with pytest.warns(RuntimeWarning, match="slot 1"):
        fleet.close()
    assert all(file.exists() for file in files)


@pytest.mark.parametrize("where", ["serial", "thread"])
def test_an_exception_in_close_without_processes(where):
    env_fn = functools.partial(Crashing, at="close")
    with fleet_of(env_fn, where) as fleet, pytest.warns(RuntimeWarning, match="slot 1"):
        fleet.close()


def test_a_hang_in_close_of_a_thread():
    with fleet_of(functools.partial(Hanging, at="close", for_s=1.5), "thread") as fleet:
        reset(fleet)


@pytest.mark.parametrize("fault", SILENT)
def test_close_does_not_wait_for_a_step_that_never_ends(fault):
    with fleet_of(functools.partial(FAULTS[fault], at="step")) as fleet:
        reset(fleet)
        fleet.send(zeros(2))


# ---- native code --------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["constructor", "reset", "step"])
def test_a_segmentation_fault_shows_where_it_happened(moment):
    env_fn = functools.partial(Crashing, mode="segfault", at=moment)
    with pytest.raises(errors.WorkerDied) as caught, fleet_of(env_fn) as fleet:
        provoke(fleet, "reset")
    error = caught.value
    assert error.exitcode == -signal.SIGSEGV
    assert moment in error.doing
    assert "segmentation fault" in str(error)
    assert "misbehave" in error.dump
    assert error.dump.count("most recent call first") == 1, "the environment's thread alone"


@pytest.mark.parametrize("mode", ["gil", "deaf"])
def test_a_hang_that_nothing_but_the_kernel_can_end(mode):
    """Native code that keeps the interpreter lock; a process that ignores SIGTERM and SIGINT."""
    with fleet_of(functools.partial(Hanging, mode=mode)) as fleet:
        reset(fleet)
        with (
            at_most(DEADLINE_S["fork"] + GRACE_S),
            pytest.raises(errors.DeadlineExceeded, match="misbehave"),
        ):
            step(fleet)
