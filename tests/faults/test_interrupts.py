"""A signal's handler may raise at any moment of a step: the fleet still knows what is under way."""

import random
import signal
import time
from contextlib import closing

import numpy as np
import pytest

import envfleet
from envfleet.engine import Fleet, ResetPlan
from envfleet.engine.backends.serial import SerialHandle
from envfleet.errors import EnvFailed
from envfleet.testing import Counter

NUM_ENVS = 8
HALVES = np.split(np.arange(NUM_ENVS), 2)


class Stop(KeyboardInterrupt):
    """What the handler raises: not the failure of an environment that it comes in."""


@pytest.fixture
def alarm():
    """Sets a timer whose signal raises `Stop`."""

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def in_steps(envs, actions):
    while True:
        envs.step(actions)


def in_halves(envs, actions):
    for half in HALVES:
        envs.send(actions[half], half)
    while True:
        slots = envs.recv(min_slots=len(HALVES[0])).slots
        envs.send(actions[: len(slots)], slots)


@pytest.mark.parametrize("work", [in_steps, in_halves])
def test_a_fleet_goes_on_after_an_interrupt_at_any_moment(work, alarm):
    dice = random.Random(0)
    actions = np.zeros(NUM_ENVS, np.int64)

    def work_until_stopped():
        alarm(dice.uniform(1e-5, 3e-3))
        work(envs, actions)

    with envfleet.make_vec("CartPole-v1", NUM_ENVS, num_workers=2, backend="process") as envs:
        for _ in range(150):
            envs.reset(seed=0)
            begun_s = time.monotonic()
            with pytest.raises(Stop):
                work_until_stopped()
            if work is in_steps:
                envs.step(actions)
            assert time.monotonic() - begun_s < 2.0
        obs, _ = envs.reset(seed=0)
        assert np.array_equal(obs, envs.reset(seed=0)[0])


@pytest.mark.parametrize("then", ["recv", "call", "reset", "close"])
def test_an_answer_lost_in_this_process_keeps_nobody_waiting(then, monkeypatch):
    """The handler raises as the answer is taken, before anything knows that it was."""
    with closing(Fleet([Counter] * 2, backend="serial")) as fleet:
        plans, zeros = [ResetPlan(seed=0)] * 2, np.zeros(2, np.int64)
        fleet.reset(plans)
        take = SerialHandle.take

        def interrupted(handle):
            monkeypatch.setattr(SerialHandle, "take", take)
            take(handle)
            raise KeyboardInterrupt

        monkeypatch.setattr(SerialHandle, "take", interrupted)
        fleet.send(zeros)
        with pytest.raises(KeyboardInterrupt):
            fleet.recv()
        if then == "recv":  # nothing else has been done since: its rows are as they were
            assert fleet.recv().obs.tolist() == [[1], [1]]
        elif then == "call":
            with pytest.raises(EnvFailed, match="signal's handler raised"):
                fleet.call("t")
        if then != "close":
            assert fleet.reset(plans).obs.tolist() == [[0], [0]]
            assert fleet.step(zeros).obs.tolist() == [[1], [1]]
