"""Law 4: nothing waits for ever. Law 2: giving up on a worker does not affect the others."""

import contextlib
import functools
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

import envfleet
from envfleet import errors
from envfleet.engine import Deadlines, Fleet, ResetPlan
from envfleet.testing import Counter, Hanging, Slow, VectorCounter
from tests.faults.stage import (
    GRACE_S,
    METHODS,
    MODES,
    Resident,
    left_after,
    opened,
    plans,
    step,
    zeros,
)
from tests.gates import PATIENCE_S, at_most, gated, in_time_at_best, opened_meanwhile

LIMIT_S = 0.35


class Simulator(Counter):
    """Waits for ever in its second step, in a function with a known name."""

    def __init__(self, for_s=3600.0):
        super().__init__(length=None)
        self.for_s = for_s

    def step(self, action):
        if self.t == 1:
            self.wait_for_the_simulator()
        return super().step(action)

    def wait_for_the_simulator(self):
        time.sleep(self.for_s)

    def ask_the_simulator(self):
        self.wait_for_the_simulator()


# ---- the deadline -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_the_error_shows_the_function_that_hangs(backend):
    for_s = 1.2 if backend == "thread" else 3600.0
    env_fns = [Resident, functools.partial(Simulator, for_s)]
    with opened(env_fns, num_workers=2, backend=backend, step_timeout_s=LIMIT_S) as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        envs.send(zeros(2))
        with at_most(LIMIT_S + GRACE_S), pytest.raises(errors.DeadlineExceeded) as caught:
            envs.recv()
        error = caught.value
        assert (error.slot, error.worker, error.doing) == (1, 1, "step")
        assert "wait_for_the_simulator" in str(error)
        assert "test_deadlines.py" in str(error)
        assert "raise step_timeout_s" in str(error)
        assert isinstance(error, TimeoutError)
        assert envs.recv().slots.tolist() == [0]


class Starts(Simulator):
    """Has its own child process, which it ends in `close`, and waits in its second step."""

    def __init__(self):
        super().__init__()
        self.process = subprocess.Popen(["sleep", "3600"])

    @property
    def its_pid(self):
        return self.process.pid

    def close(self):
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["restart", "raise", "dropped", "closed"])
@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's lists of children")
def test_what_an_environment_has_started_ends_with_a_worker_that_is_killed(how, method):
    on_failure = "restart" if how == "restart" else "raise"
    envs = envfleet.make_vec(
        [Starts, Starts],
        num_workers=2,
        backend="process",
        start_method=method,
        on_failure=on_failure,
        step_timeout_s=LIMIT_S if how in ("restart", "raise") else None,
    )
    envs.reset(seed=0)
    started = envs.get_attr("its_pid")
    envs.step(zeros(2))
    if how == "restart":
        envs.step(zeros(2))
        assert not left_after(started, PATIENCE_S)
        started = envs.get_attr("its_pid")
    elif how == "raise":
        with pytest.raises(errors.DeadlineExceeded):
            envs.step(zeros(2))
    else:
        envs.send(zeros(2))
    if how == "dropped":
        del envs
        gc.collect()
    else:
        envs.close()
    assert not left_after(started, PATIENCE_S)


def test_the_stack_is_the_environment_s_alone():
    """A worker has a thread of its own that watches for the end of the parent."""
    with opened([Simulator], step_timeout_s=LIMIT_S) as envs:
        envs.reset(seed=0)
        envs.step(zeros(1))
        with pytest.raises(errors.DeadlineExceeded) as caught:
            envs.step(zeros(1))
    thread, innermost, *frames = caught.value.stack.splitlines()
    assert "hread" in thread
    assert innermost.endswith("in wait_for_the_simulator")
    assert all(frame.startswith("  File") for frame in frames), "one thread"


def test_only_the_one_that_hangs_is_named():
    """The worker has three environments; the middle one hangs."""
    env_fns = [Resident, Simulator, Resident, Resident]
    with opened(env_fns, num_workers=2, step_timeout_s=LIMIT_S) as envs:
        envs.reset(seed=0)
        envs.step(zeros(4))
        envs.send(zeros(4))
        with pytest.raises(errors.DeadlineExceeded) as caught:
            envs.recv()
        assert caught.value.slot == 1
        assert envs.recv().slots.tolist() == [2, 3]


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_call_has_the_deadline_of_resets(backend):
    for_s = 1.2 if backend == "thread" else 3600.0
    env_fns = [Resident, functools.partial(Simulator, for_s)]
    with opened(env_fns, num_workers=2, backend=backend, reset_timeout_s=LIMIT_S) as envs:
        envs.reset(seed=0)
        with at_most(LIMIT_S + GRACE_S), pytest.raises(errors.DeadlineExceeded) as caught:
            envs.call("ask_the_simulator", slots=[1])
        error = caught.value
        assert (error.slot, error.doing, error.option) == (1, "call", "reset_timeout_s")
        assert "wait_for_the_simulator" in error.stack
        assert envs.call("pid", slots=[0])


def test_resets_and_steps_have_deadlines_of_their_own():
    env_fn = functools.partial(Slow, step_s=1.2, reset_s=0.0, length=None)
    with opened([env_fn] * 2, num_workers=2, reset_timeout_s=0.8) as envs:
        envs.reset(seed=0)
        assert envs.step(zeros(2))[0].tolist() == [[1], [1]]
    env_fn = functools.partial(Slow, step_s=0.0, reset_s=1.2, length=None)
    with opened([env_fn] * 2, num_workers=2, step_timeout_s=0.8) as envs:
        envs.reset(seed=0)
        assert envs.step(zeros(2))[0].tolist() == [[1], [1]]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_the_reset_inside_an_autoreset_has_the_deadline_of_resets(mode):
    slow_reset = functools.partial(Slow, step_s=0.0, reset_s=1.0, length=1)
    with opened([slow_reset], autoreset=mode, step_timeout_s=0.7) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(zeros(1))
    endless_reset = functools.partial(Slow, reset_s=3600.0)
    with opened([endless_reset], autoreset=mode, reset_timeout_s=0.3) as envs:
        with pytest.raises(errors.DeadlineExceeded) as caught:
            envs.reset(seed=0)
        assert caught.value.doing == "reset"


# ---- slots that must not count as hung ----------------------------------------------------------


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_many_steps_in_time_are_in_time(num_workers, backend):
    """One worker takes twice the limit for all its environments, each well inside it.

    With two workers the other one is done long before, and has to wait.
    """
    slow = functools.partial(Slow, step_s=0.25, length=None)
    quick = [Resident] * 8 if num_workers == 2 else []
    env_fns = [*quick, *[slow] * 8]
    with opened(
        env_fns,
        num_workers=num_workers,
        backend=backend,
        step_timeout_s=1.0,
        reset_timeout_s=1.0,
    ) as envs:
        envs.reset(seed=0)
        obs, *_ = envs.step(zeros(len(env_fns)))
        assert obs[:, 0].tolist() == [1] * len(env_fns)
        assert envs.incidents == ()


@pytest.mark.parametrize("poll_s", [0.0, 0.003, 0.1])
def test_asking_often_does_not_bring_the_deadline_nearer(poll_s):
    with opened([functools.partial(Slow, step_s=0.8, length=None)], step_timeout_s=1.5) as envs:
        envs.reset(seed=0)
        envs.send(zeros(1))
        batch = envs.recv(timeout_s=poll_s)
        while not len(batch):
            batch = envs.recv(timeout_s=poll_s)
        assert batch.obs.tolist() == [[1]]


def test_a_pause_of_the_caller_does_not_count():
    """The parent does not look for longer than the limit; the answer came in time."""
    with opened([functools.partial(Slow, step_s=0.2, length=None)], step_timeout_s=1.0) as envs:
        envs.reset(seed=0)
        envs.send(zeros(1))
        time.sleep(1.3)
        assert envs.recv().obs.tolist() == [[1]]
        time.sleep(1.3)
        assert envs.step(zeros(1))[0].tolist() == [[2]]


def test_a_long_wait_in_first_ready_does_not_count_for_those_who_came_later(tmp_path):
    """Slot 1 is sent when slot 0 has used up most of its time, and answers after the rest."""
    gates = [tmp_path / "0", tmp_path / "1"]
    with opened([gated(gate) for gate in gates], num_workers=2, step_timeout_s=1.6) as envs:
        envs.reset(seed=0)
        envs.send(zeros(1), [0])
        assert len(envs.recv(timeout_s=0.9)) == 0
        envs.send(zeros(1), [1])
        gates[0].touch()
        assert envs.recv(min_slots=1).slots.tolist() == [0]
        assert len(envs.recv(timeout_s=0.9)) == 0
        gates[1].touch()
        assert envs.recv().slots.tolist() == [1]


# ---- slots that must ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_one_that_hangs_is_noticed_while_others_answer(backend):
    for_s = 1.5 if backend == "thread" else 3600.0
    env_fns = [functools.partial(Hanging, for_s=for_s), functools.partial(Slow, length=None)]
    with opened(env_fns, num_workers=2, backend=backend, step_timeout_s=LIMIT_S) as envs:
        envs.reset(seed=0)
        envs.send(zeros(2))

        def serve_slot_1_for_ever():
            count = 0
            while True:
                batch = envs.recv(min_slots=1)
                count += 1
                assert (batch.slots.tolist(), batch.obs.tolist()) == ([1], [[count]])
                envs.send(zeros(1), [1])

        with at_most(LIMIT_S + GRACE_S), pytest.raises(errors.DeadlineExceeded) as caught:
            serve_slot_1_for_ever()
        assert caught.value.slot == 0


@pytest.mark.parametrize("is_idle", [False, True])
def test_one_that_dies_is_noticed_while_others_answer(is_idle):
    with opened([functools.partial(Slow, step_s=0.01, length=None)] * 2, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        pid = envs.fleet.worker_pids()[1]
        assert pid is not None

        def serve_slot_0_and_then_both():
            if not is_idle:
                envs.send(zeros(1), [1])
            envs.send(zeros(1), [0])
            os.kill(pid, signal.SIGKILL)
            is_sent = not is_idle
            while True:
                slots = envs.recv(min_slots=1).slots
                time.sleep(0.02)
                envs.send(zeros(len(slots)), slots)
                if not is_sent:
                    envs.send(zeros(1), [1])
                    is_sent = True

        with at_most(GRACE_S), pytest.raises(errors.WorkerDied):
            serve_slot_0_and_then_both()


def test_a_reset_that_hangs_is_noticed_while_others_answer():
    hanging = functools.partial(Hanging, at="reset", nth=2, length=1)
    with opened(
        [hanging, functools.partial(Slow, length=None)], num_workers=2, reset_timeout_s=LIMIT_S
    ) as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))

        def serve_slot_1_for_ever():
            envs.send(zeros(2))
            while True:
                slots = envs.recv(min_slots=1).slots
                envs.send(zeros(len(slots)), slots)

        with at_most(LIMIT_S + GRACE_S), pytest.raises(errors.DeadlineExceeded):
            serve_slot_1_for_ever()


def test_one_that_hangs_is_noticed_while_polling():
    with opened([Hanging, Resident], num_workers=2, step_timeout_s=LIMIT_S) as envs:
        envs.reset(seed=0)
        envs.send(zeros(2))

        def poll_for_ever():
            while True:
                envs.recv(min_slots=2, timeout_s=0.0)

        with at_most(LIMIT_S + GRACE_S), pytest.raises(errors.DeadlineExceeded):
            poll_for_ever()


@pytest.mark.parametrize("mode", MODES)
def test_one_hang_after_another_is_recovered_from(mode):
    """The same slot, again and again, within its budget."""
    with opened(
        [Resident, Simulator],
        num_workers=2,
        autoreset=mode,
        step_timeout_s=LIMIT_S,
        on_failure="restart",
    ) as envs:
        envs.reset(seed=0)
        for count in range(2):
            while len(envs.incidents) == count:
                _, _, terminated, truncated, _ = envs.step(zeros(2))
                ended = terminated | truncated
            assert truncated.tolist() == [False, True]
            if mode == "disabled":
                envs.reset(options={"reset_mask": ended})
        assert [incident.kind for incident in envs.incidents] == ["timeout"] * 2


# ---- timeouts of recv ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("min_slots", [None, 3])
def test_what_is_ready_is_given_when_the_time_is_over(min_slots, backend, tmp_path):
    gate = tmp_path / "gate"
    with opened([Resident, gated(gate), Resident], num_workers=3, backend=backend) as envs:
        envs.reset(seed=0)
        envs.send(zeros(3))
        batch = envs.recv(min_slots=min_slots, timeout_s=1.0)
        assert batch.slots.tolist() == [0, 2]
        in_time_at_best(lambda: envs.recv(timeout_s=0.2), 0.5)
        in_time_at_best(lambda: envs.recv(timeout_s=0.0), 0.3)
        assert len(envs.recv(timeout_s=0.0)) == 0
        gate.touch()
        batch = envs.recv()
        assert (batch.slots.tolist(), batch.obs.tolist()) == ([1], [[1]])


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("mode", MODES)
def test_hundreds_of_timeouts_leave_every_slot_in_step(mode, backend):
    """Each slot's count is exactly the number of its steps, also if another slot was late."""
    env_fn = functools.partial(
        Slow,
        step_s=0.0,
        slow_step_s=0.004,
        slow_share=0.3,
        length=None if mode == "disabled" else 7,
    )
    num_envs, rounds, number = 5, 300, 0
    with opened(env_fn, num_envs, num_workers=3, backend=backend, autoreset=mode) as envs:
        envs.reset(seed=0)
        envs.send(zeros(num_envs))
        counts = np.zeros(num_envs, np.int64)
        served, empty = np.zeros(num_envs, np.int64), 0
        # until it shows something, however fast the workers are
        while number < rounds or served.sum() <= rounds / 2 or empty <= 10:
            number += 1
            batch = envs.recv(min_slots=1 + number % num_envs, timeout_s=0.0005 * (number % 4))
            empty += not len(batch)
            for row, slot in enumerate(batch.slots.tolist()):
                served[slot] += 1
                if mode == "next_step" and counts[slot] == 7:
                    counts[slot] = 0
                    assert (batch.obs[row, 0], batch.valid[row]) == (0, False)
                    continue
                counts[slot] += 1
                assert batch.rewards[row] == counts[slot]
                assert batch.final_obs[row, 0] == counts[slot]
                assert batch.valid[row]
                assert batch.terminated[row] == (counts[slot] == 7 and mode != "disabled")
                if mode == "same_step" and counts[slot] == 7:
                    counts[slot] = 0
                assert batch.obs[row, 0] == counts[slot]
            if len(batch):
                envs.send(zeros(len(batch)), batch.slots)


def test_a_reset_after_a_timeout_drops_what_was_late(tmp_path):
    gate = tmp_path / "gate"
    with opened([gated(gate)] * 2, num_workers=2) as envs:
        for _ in range(3):
            envs.reset(seed=0)
            envs.send(zeros(2))
            assert len(envs.recv(timeout_s=0.01)) == 0
            with opened_meanwhile(gate):
                obs, _ = envs.reset(seed=0)
            assert obs.tolist() == [[0], [0]]
            assert envs.step(zeros(2))[0].tolist() == [[1], [1]]
            gate.unlink()


def test_a_call_after_a_timeout_waits_its_turn(tmp_path):
    gate = tmp_path / "gate"
    with opened([gated(gate)] * 2, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.send(zeros(2))
        assert len(envs.recv(timeout_s=0.01)) == 0
        with opened_meanwhile(gate):
            assert envs.call("add", 10) == (11, 11)
        assert envs.recv().obs.tolist() == [[1], [1]]


# ---- the warning --------------------------------------------------------------------------------


def test_without_a_deadline_a_warning_comes_after_thirty_seconds():
    assert Deadlines().warn_s == 30.0
    assert Deadlines().step_s is None


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_the_warning_names_the_slot_and_shows_its_stack(backend):
    fleet = Fleet(
        [Resident, functools.partial(Simulator, 1.5), Resident],
        num_workers=3,
        backend=backend,
        deadlines=Deadlines(warn_s=0.4),
    )
    fleet.reset(plans(0, 1, 2))
    step(fleet)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = step(fleet)
    assert batch.obs[:, 0].tolist() == [2, 2, 2], "it may take as long as it takes"
    (warning,) = caught
    text = str(warning.message)
    assert warning.category is RuntimeWarning
    assert "slot 1 (worker 1) in step" in text
    assert "set step_timeout_s" in text
    assert "wait_for_the_simulator" in text
    assert warning.filename == step.__code__.co_filename, "it points at the caller, not at us"
    fleet.close()


def test_the_warning_comes_for_resets_too_and_once_for_each_wait():
    fleet = Fleet(
        [functools.partial(Slow, reset_s=0.9)], deadlines=Deadlines(warn_s=0.25, close_s=0.5)
    )
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"slot 0 .*reset; set reset_timeout_s") as caught:
            fleet.reset(plans(0))
        assert len(caught) == 1
    fleet.close()


def test_no_warning_for_many_short_steps_in_one_worker():
    fleet = Fleet([functools.partial(Slow, step_s=0.3)] * 6, deadlines=Deadlines(warn_s=1.2))
    fleet.reset(plans(*range(6)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(fleet)
    fleet.close()


def test_the_wait_goes_on_when_the_warning_is_turned_into_an_error():
    """With -W error nothing is lost: the next recv returns the result."""
    fleet = Fleet([functools.partial(Slow, step_s=0.8)], deadlines=Deadlines(warn_s=0.2))
    fleet.reset(plans(0))
    fleet.send(zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            fleet.recv()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fleet.recv().obs.tolist() == [[1]]
    fleet.close()


def test_a_deadline_is_a_quarter_late_at_most():
    limit_s = 2.0
    took_s: list[float] = []
    while not took_s or (len(took_s) < 4 and took_s[-1] > 1.25 * limit_s + 0.3):
        with sleepers(0.0, 30.0, deadlines=Deadlines(step_s=limit_s)) as fleet:
            fleet.step(np.zeros(2, np.int64))
            begun_s = time.monotonic()
            with pytest.raises(errors.DeadlineExceeded):
                fleet.step(np.zeros(2, np.int64))
            took_s.append(time.monotonic() - begun_s)
    assert min(took_s) < 1.25 * limit_s + 0.3


class Stop(Exception):
    """Raised by the signal handler."""


@pytest.mark.parametrize("slow", [0, 1])
def test_after_an_interrupted_step_no_call_waits_for_an_old_signal(slow):
    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    pauses = [0.0, 0.0]
    pauses[slow] = 0.6
    took_s: list[float] = []
    try:
        while not took_s or (len(took_s) < 4 and took_s[-1] > 0.8):
            with sleepers(*pauses) as fleet:
                fleet.step(np.zeros(2, np.int64))
                with pytest.raises(Stop):
                    interrupted_step(fleet)
                begun_s = time.monotonic()
                batch = fleet.step(np.zeros(2, np.int64))
                took_s.append(time.monotonic() - begun_s)
                assert batch.valid.all()
        assert min(took_s) < 0.8
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupted_step(fleet):
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    fleet.step(np.zeros(2, np.int64))


@contextlib.contextmanager
def sleepers(*pauses_s, **options):
    fleet = Fleet(
        [functools.partial(Simulator, pause_s) for pause_s in pauses_s],
        num_workers=len(pauses_s),
        **options,
    )
    try:
        fleet.reset([ResetPlan(0)] * len(pauses_s))
        yield fleet
    finally:
        fleet.close()


# ---- while "auto" measures ----------------------------------------------------------------------

IN_NO_TIME_S = 20.0
"""Much less than the 120 s that a start may take."""


@pytest.mark.parametrize("mode", ["sleep", "gil", "stop"])
@pytest.mark.parametrize("at", ["step", "reset"])
def test_what_hangs_at_once_is_told_by_its_own_deadline(at, mode):
    limits = {f"{at}_timeout_s": LIMIT_S}
    env_fn = functools.partial(Hanging, mode=mode, at=at)
    with at_most(IN_NO_TIME_S), contextlib.ExitStack() as stack:
        envs = stack.enter_context(opened(env_fn, 2, backend="auto", **limits))
        assert f"{at} passed {at}_timeout_s=0.35 at once, so it must be supervised" in envs.plan
        with pytest.raises(errors.DeadlineExceeded, match=f"raise {at}_timeout_s"):
            step_once(envs)


@pytest.mark.parametrize("limit_s", [math.inf, 1e300, 40 * 24 * 3600.0])
@pytest.mark.parametrize("backend", ["process", "thread", "serial"])
def test_deadlines_may_be_longer_than_the_system_counts(backend, limit_s):
    names = [
        "start_s",
        "close_s",
        "warn_s",
        *(["step_s", "reset_s"] if backend != "serial" else []),
    ]
    limits = Deadlines(**dict.fromkeys(names, limit_s))
    fleet = Fleet(
        [Counter] * 2, num_workers=2 - (backend == "serial"), backend=backend, deadlines=limits
    )
    with contextlib.closing(fleet):
        fleet.reset([ResetPlan(0)] * 2)
        fleet.send(zeros(2))
        assert len(fleet.recv(timeout_s=limit_s).slots) == 2
        assert fleet.call("t") == [1, 1]


class NeverCloses(Counter):
    def close(self):
        time.sleep(3600)


def test_what_never_closes_is_not_run_in_this_process():
    with at_most(IN_NO_TIME_S), opened(NeverCloses, 2, backend="auto") as envs:
        assert "has not closed within 3 s when it was measured" in envs.plan
        assert envs.fleet.worker_pids()[0] != os.getpid()


def step_once(envs):
    envs.reset(seed=0)
    envs.step(zeros(envs.num_envs))


class HangingVector(VectorCounter):
    def __init__(self, num_envs):
        super().__init__((5,) * num_envs)

    def step(self, actions):
        time.sleep(3600)


def test_so_is_a_native_one():
    with at_most(IN_NO_TIME_S), contextlib.ExitStack() as stack:
        native = envfleet.native(HangingVector)
        envs = stack.enter_context(opened(native, 4, backend="auto", step_timeout_s=LIMIT_S))
        assert "step passed step_timeout_s=0.35 at once" in envs.plan
        with pytest.raises(errors.DeadlineExceeded, match="raise step_timeout_s"):
            step_once(envs)


def test_steps_and_resets_within_their_deadlines_are_measured_in_peace():
    """For any number of them: a probe's own step ends before its deadline."""
    env_fn = functools.partial(Slow, step_s=0.2, reset_s=0.5, length=1)
    with opened(env_fn, 2, backend="auto", step_timeout_s=0.4) as envs:
        assert re.search(r"one step takes [67]\d\d\.\d ms", envs.plan), envs.plan
    with opened(functools.partial(Counter, None), 2, backend="auto", step_timeout_s=0.04) as envs:
        assert re.search(r"one step takes \d+ us", envs.plan), envs.plan
