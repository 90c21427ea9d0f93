"""A signal's handler may raise at any moment of a step: the fleet still knows what is under way."""

import random
import signal
import time

import numpy as np
import pytest

import envfleet

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
