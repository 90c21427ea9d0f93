"""What `auto` decides for natively vectorised environments, and what it says of it."""

import re
from contextlib import closing

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.engine import auto
from envfleet.engine.auto import MIN_GAIN, ROUND_TRIP_S, Plan, decide_native

US, MS = 1e-6, 1e-3


@pytest.mark.parametrize(
    ("workers", "step_s", "expected"),
    [
        (2, (10 * MS, 5 * MS), "process"),
        (2, (600 * US, 300 * US), "process"),
        (2, (300 * US, 150 * US), "serial"),  # as a native CartPole-v1 of 4096: measured
        (8, (600 * US, 300 * US), "process"),
        (2, (10 * MS, 9.9 * MS), "serial"),  # vectorised work that does not shrink
        (2, (100 * US, 50 * US), "serial"),  # the round trip is more than what is saved
        (2, (1 * MS, 0.87 * MS), "serial"),  # a gain that is within the noise
        (2, (20 * US, 30 * US), "serial"),
        (2, (0.0, 0.0), "serial"),
    ],
)
def test_native_environments_are_shared_where_that_pays(workers, step_s, expected):
    plan = decide_native(workers, step_s, "fork", may_be_serial=True)
    assert (plan.backend, plan.start_method) == (expected, "fork")
    assert plan.num_workers == (workers if expected == "process" else 1)
    supervised = decide_native(workers, step_s, "spawn", may_be_serial=False)
    assert supervised.backend == "process"
    assert (supervised.num_workers, supervised.start_method) == (workers, "spawn")
    assert ("does not pay" in supervised.why) == (expected == "serial")


def test_the_gain_must_be_more_than_noise():
    share_s = 1 * MS
    just_enough_s = (share_s + ROUND_TRIP_S) * MIN_GAIN
    for whole_s, expected in ((just_enough_s * 1.001, "process"), (just_enough_s, "serial")):
        plan = decide_native(2, (whole_s, share_s), "fork", may_be_serial=True)
        assert plan.backend == expected


def test_a_decision_depends_on_nothing_but_its_numbers(monkeypatch):
    def refuse(*_):
        raise AssertionError("a decision neither measures nor looks at the machine")

    before = decide_native(4, (10 * MS, 3 * MS), "fork", may_be_serial=True)
    for name in ("usable_cores", "_ask", "_step_s", "time"):
        monkeypatch.setattr(auto, name, refuse)
    after = decide_native(4, (10 * MS, 3 * MS), "fork", may_be_serial=True)
    assert before == after == Plan("process", "fork", 4, before.why)
    assert before.why == (
        "a step of all takes 10.0 ms, of one of 4 shares 3.0 ms, so one natively vectorised "
        "environment in each worker pays"
    )


def test_a_plan_says_what_was_measured(monkeypatch):
    monkeypatch.setattr(auto, "usable_cores", lambda: 2)
    with closing(envfleet.make_vec(envfleet.native("CartPole-v1"), 64)) as envs:
        assert re.fullmatch(
            r"64 environments in .*: a step of all takes \d+.* [um]s, of one of 2 shares \d+.*"
            r" [um]s, .*\.",
            envs.plan,
        )
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())


def test_both_sizes_are_measured_of_what_will_run(monkeypatch):
    """For 5 slots in 2 workers the larger share counts."""
    monkeypatch.setattr(auto, "usable_cores", lambda: 2)
    probes = []

    def measured(probe, start_method):
        probes.append((probe.args[1], start_method))
        return 10 * MS, 4 * MS

    monkeypatch.setattr(auto, "_ask", measured)
    plan = auto.plan_fleet([envfleet.native("CartPole-v1")] * 5, "spawn", may_be_serial=True)
    assert probes == [((5, 3), "spawn")]
    assert plan == decide_native(2, (10 * MS, 4 * MS), "spawn", may_be_serial=True)


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
