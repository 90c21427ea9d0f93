"""What `auto` decides for natively vectorised environments, and what it says of it."""

import functools
import os
import re
import sys
import threading
import time
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import envfleet
from envfleet import errors
from envfleet.engine import plan as planning
from envfleet.engine import probe as probing
from envfleet.engine.plan import JOINT_GAIN, JOINT_TRIP_S, Plan, decide_native, own_share
from envfleet.engine.slots import deal
from envfleet.testing import Counter, Slow, VectorCounter

US, MS = 1e-6, 1e-3


@pytest.mark.parametrize(
    ("workers", "step_s", "is_shared"),
    [
        (2, (10 * MS, 6 * MS), True),
        (2, (180 * US, 130 * US), True),  # as a native CartPole-v1 of 4096: measured
        (8, (600 * US, 250 * US), True),
        (2, (10 * MS, 9.9 * MS), False),  # vectorised work that does not shrink
        (2, (100 * US, 75 * US), False),  # going there takes more than what is saved
        (2, (1 * MS, 0.93 * MS), False),  # a gain that is within the noise
        (2, (20 * US, 30 * US), False),
        (2, (0.0, 0.0), False),
    ],
)
def test_native_environments_are_shared_where_that_pays(workers, step_s, is_shared):
    plan = decide_native(4096, workers, step_s, "fork", may_be_serial=True)
    assert plan.start_method == "fork"
    if is_shared:
        assert (plan.backend, plan.num_workers) == ("process", workers)
        assert plan.num_here == own_share(4096, workers)
    else:
        assert (plan.backend, plan.num_workers, plan.num_here) == ("serial", 1, 0)


@pytest.mark.parametrize(
    ("step_s", "pays"),
    [
        ((10 * MS, 5 * MS), True),
        ((600 * US, 300 * US), True),
        ((300 * US, 150 * US), False),  # the round trip is more than what is saved
    ],
)
def test_what_is_supervised_is_in_processes(step_s, pays):
    plan = decide_native(4096, 2, step_s, "spawn", may_be_serial=False)
    assert (plan.backend, plan.num_workers, plan.num_here) == ("process", 2, 0)
    assert ("does not pay" in plan.why) != pays


def test_the_gain_must_be_more_than_noise():
    own_s = 1 * MS
    just_enough_s = (own_s + JOINT_TRIP_S) * JOINT_GAIN
    for whole_s, expected in ((just_enough_s * 1.001, "process"), (just_enough_s, "serial")):
        plan = decide_native(64, 2, (whole_s, own_s), "fork", may_be_serial=True)
        assert plan.backend == expected


@given(num_envs=st.integers(2, 5000), workers=st.integers(2, 64))
def test_everybody_has_a_share_and_ours_is_no_smaller(num_envs, workers):
    workers = min(workers, num_envs)
    num_here = own_share(num_envs, workers)
    shares = [hi - lo for lo, hi in deal(num_envs, workers, num_here)]
    assert sum(shares) == num_envs
    assert min(shares) >= 1
    assert shares[-1] == num_here
    if num_envs >= 8 * workers:
        assert num_here == max(shares)


def test_a_decision_depends_on_nothing_but_its_numbers(monkeypatch):
    def refuse(*_):
        raise AssertionError("a decision neither measures nor looks at the machine")

    def decided():
        steps_s = (10 * MS, 4 * MS)
        return decide_native(130, 4, steps_s, "fork", may_be_serial=True)

    before = decided()
    for name in ("usable_cores", "measure", "measure_native"):
        monkeypatch.setattr(planning, name, refuse)
    assert before == decided() == Plan("process", "fork", 4, before.why, 40)
    assert before.describe(130) == (
        "130 environments of which 40 in this process and the others in 3 worker processes (fork), "
        "up to 30 each: a step of all takes 10.0 ms, of 40 of them 4.0 ms, so sharing pays."
    )


def test_a_plan_says_what_was_measured(monkeypatch):
    monkeypatch.setattr(planning, "usable_cores", lambda: 2)
    with closing(envfleet.make_vec(envfleet.native("CartPole-v1"), 64)) as envs:
        assert re.fullmatch(
            r"64 environments .*: a step of all takes \d+.* [um]s, of 36 of them \d+.* [um]s, .*\.",
            envs.plan,
        )
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())


def test_sizes_are_measured_of_what_will_run(monkeypatch):
    """For 5 slots in 2 workers the larger share counts; shared with this process, its own."""
    monkeypatch.setattr(planning, "usable_cores", lambda: 2)
    probes = []

    def measured(probe, start_method, deadlines):
        probes.append((probe.args[1], start_method))
        return 10 * MS, 4 * MS

    monkeypatch.setattr(probing, "_ask", measured)
    plan = planning.plan_fleet([envfleet.native("CartPole-v1")] * 5, "spawn", may_be_serial=True)
    assert probes == [((5, 2), "spawn")]
    assert plan == decide_native(5, 2, (10 * MS, 4 * MS), "spawn", may_be_serial=True)
    assert plan.num_here == 2
    planning.plan_fleet([envfleet.native("CartPole-v1")] * 5, "spawn", may_be_serial=False)
    assert probes[1] == ((5, 3), "spawn")


class OnlyOne(VectorCounter):
    """There may be one at a time in a process, as with a port or a licence."""

    is_there = False

    def __init__(self, num_envs):
        if OnlyOne.is_there:
            raise RuntimeError("there is one already")
        OnlyOne.is_there = True
        super().__init__((3,) * num_envs)

    def close_extras(self, **kwargs):
        OnlyOne.is_there = False


def test_instances_that_cannot_be_side_by_side_are_measured_one_after_another(monkeypatch):
    monkeypatch.setattr(planning, "usable_cores", lambda: 2)
    with closing(envfleet.make_vec(envfleet.native(OnlyOne), 4)) as envs:
        assert "a step of all takes" in envs.plan
        envs.reset(seed=0)


class Refuses(gymnasium.Env):
    """Raises at any action but the one that only its user knows."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(1_000_000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        if action != 123_456:
            raise ValueError("not this one")
        return 1, 1.0, False, False, {}


def test_an_environment_that_refuses_actions_drawn_at_random_can_be_planned_for():
    with closing(envfleet.make_vec(Refuses, 2)) as envs:
        envs.reset(seed=0)
        assert envs.step(np.full(2, 123_456))[1].tolist() == [1.0, 1.0]


# ---- what is slow, or goes wrong, while it is measured ------------------------------------------


class Noted(Slow):
    """Writes down what it is asked for."""

    def __init__(self, path, **pauses):
        super().__init__(**pauses)
        self.path = path

    def note(self, what):
        with open(self.path, "a") as file:
            file.write(f"{what}\n")

    def reset(self, *, seed=None, options=None):
        self.note("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.note("step")
        return super().step(action)


@pytest.mark.parametrize(
    ("pauses", "asked"),
    [
        ({"step_s": 0.3}, "reset step"),
        ({"step_s": 0.15}, "reset step reset step step"),
        # how many steps there is time for depends on what else the machine does
        ({"step_s": 0.01, "reset_s": 0.3, "length": None}, "reset step( step){1,5}"),
        ({"step_s": 0.01, "reset_s": 0.3, "length": 1}, "reset step reset step reset"),
    ],
    ids=["long steps", "steps", "long resets", "long resets at each step"],
)
def test_what_takes_long_is_not_measured_longer_than_need_be(pauses, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "usable_cores", lambda: 2)
    monkeypatch.setattr(probing, "LONG_S", 0.2)
    notes = tmp_path / "notes"
    env_fn = functools.partial(Noted, notes, **pauses)
    plan = planning.plan_fleet([env_fn] * 8, "fork", may_be_serial=True)
    assert plan.backend == "thread"
    assert re.fullmatch(rf"{asked}( \w+)?", " ".join(notes.read_text().split()))


class Busy(Counter):
    def step(self, action):
        while True:
            pass


class OnePerProcess(Counter):
    """As emulators of stable-retro."""

    num_open = 0

    def __init__(self):
        super().__init__()
        if OnePerProcess.num_open:
            raise RuntimeError("Cannot create multiple instances per process")
        OnePerProcess.num_open += 1

    def close(self):
        OnePerProcess.num_open -= 1


def test_an_environment_that_must_be_alone_in_its_process_is(monkeypatch):
    monkeypatch.setattr(planning, "usable_cores", lambda: 2)
    with closing(envfleet.make_vec(OnePerProcess, 3)) as envs:
        assert "a second one in the same process failed" in envs.plan
        assert len(set(envs.fleet.worker_pids())) == 3
        envs.reset(seed=0)
    for options in ({"backend": "serial"}, {"backend": "process", "num_workers": 2}):
        with pytest.raises(errors.EnvConstructionFailed, match="with num_workers=num_envs"):
            envfleet.make_vec(OnePerProcess, 3, **options)
        OnePerProcess.num_open = 0


class HangingReset(Counter):
    def reset(self, *, seed=None, options=None):
        time.sleep(3600)


@pytest.mark.parametrize(
    ("env_fn", "workers", "why"),
    [
        (functools.partial(Slow, 3600.0), 5, "step takes more than 0.4 s, in which it waits, so"),
        (Busy, 2, "one step takes more than 0.4 s"),
        (HangingReset, 2, "one reset takes more than 0.5 s"),
    ],
)
@pytest.mark.parametrize("limits", [{}, {"step_timeout_s": 60.0, "reset_timeout_s": 200.0}])
def test_what_takes_longer_than_anybody_waits_is_slow_and_no_error(
    env_fn, workers, why, limits, monkeypatch
):
    monkeypatch.setattr(planning, "usable_cores", lambda: 2)
    monkeypatch.setattr(probing, "STEP_LIMIT_S", 0.4)
    monkeypatch.setattr(probing, "RESET_LIMIT_S", 0.5)
    begun_s = time.monotonic()
    with closing(envfleet.make_vec(env_fn, 5, start_method="fork", **limits)) as envs:
        assert time.monotonic() - begun_s < 30.0
        assert f"5 environments in {workers} worker processes (fork)" in envs.plan
        assert why in envs.plan


class SlowVector(VectorCounter):
    def __init__(self, path, num_envs):
        super().__init__((5,) * num_envs)
        self.path = path

    def step(self, actions):
        with open(self.path, "a") as file:
            file.write("step\n")
        time.sleep(0.15)
        return super().step(actions)


def test_a_native_one_that_takes_long_is_stepped_once_in_each_size(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "usable_cores", lambda: 2)
    monkeypatch.setattr(probing, "LONG_S", 0.2)
    native = envfleet.native(functools.partial(SlowVector, tmp_path / "notes"))
    plan = planning.plan_fleet([native] * 4, "fork", may_be_serial=True)
    assert "a step of all takes" in plan.why
    assert len((tmp_path / "notes").read_text().split()) == 2


class Picky(Counter):
    def reset(self, *, seed=None, options=None):
        if options is None:
            raise KeyError("level")
        return super().reset(seed=seed)


def test_an_environment_whose_reset_needs_options_can_be_planned_for():
    with closing(envfleet.make_vec(Picky, 2)) as envs:
        assert "reset raised \"KeyError: 'level'\" when it was measured" in envs.plan
        envs.reset(options={"level": 1})
        with pytest.raises(errors.EnvFailed, match="raised during reset"):
            envs.reset()


class Mortal(Counter):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def reset(self, *, seed=None, options=None):
        if self.at == "reset":
            os._exit(5)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        os._exit(5)


@pytest.mark.parametrize("at", ["step", "reset"])
def test_an_early_death_is_told_by_what_it_was_in_and_left_to_the_fleet(at):
    with closing(envfleet.make_vec(functools.partial(Mortal, at), 2)) as envs:
        assert f"died during {at} (exit code 5) when it was measured" in envs.plan
        with pytest.raises(errors.WorkerDied, match=f"died during {at}"):
            step_once(envs)


def step_once(envs):
    envs.reset(seed=0)
    envs.step(np.zeros(envs.num_envs, np.int64))


@pytest.mark.parametrize("name", ["torch", "pyglet.gl", "pyglet.window", "OpenGL.GL"])
def test_nothing_is_forked_beside_libraries_that_do_not_survive_it(name, monkeypatch):
    for known in planning._NOT_FORK_SAFE:
        monkeypatch.delitem(sys.modules, known, raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    if sys.platform == "linux":
        assert planning.choose_start_method(None) == "fork"
    monkeypatch.setitem(sys.modules, name, sys)
    assert planning.choose_start_method(None) != "fork"
    assert planning.choose_start_method("fork") == "fork"
