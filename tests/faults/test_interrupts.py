"""A signal handler may raise at any moment of a step: the fleet still knows what is in flight."""

import gc
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.engine import Fleet, ResetPlan
from envfleet.engine.backends.serial import SerialHandle
from envfleet.errors import EnvFailed, ResetNeeded
from envfleet.testing import Counter
from tests.gates import at_most

NUM_ENVS = 8
HALVES = np.split(np.arange(NUM_ENVS), 2)


class Stop(KeyboardInterrupt):
    """Raised by the handler; not a failure of the environment that it interrupts."""


@pytest.fixture
def alarm():
    """Sets a timer whose signal raises `Stop`; 0 stops it.

    It comes again: Python drops what is raised in a destructor.
    """

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    gc.disable()  # where it calls others back, what is raised is dropped as well
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds, 5.0 if seconds else 0.0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.enable()
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
        try:
            work(envs, actions)
        finally:
            alarm(0)

    with envfleet.make_vec("CartPole-v1", NUM_ENVS, num_workers=2, backend="process") as envs:
        for _ in range(150):
            envs.reset(seed=0)
            with pytest.raises(Stop):
                work_until_stopped()
            if work is in_steps:
                with at_most(2.0):
                    envs.step(actions)
        obs, _ = envs.reset(seed=0)
        assert np.array_equal(obs, envs.reset(seed=0)[0])


class Recorder(gymnasium.Env):
    """Remembers its actions, can only be restored by a replay, and has short episodes."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(1000)
    done: list[int] = []  # noqa: RUF012 - replaced by every reset

    def __init__(self):
        self.keeps_pickle_away = threading.Lock()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.done = []
        return np.zeros(1), {}

    def step(self, action):
        self.done.append(int(action))
        return np.array([len(self.done) / 1]), 0.0, len(self.done) >= 7, False, self.info()

    def info(self):
        return {}


class Talker(Recorder):
    """Its infos change their form from step to step, so they travel by the control path."""

    def info(self):
        return {"text": "x" * len(self.done)} if len(self.done) % 3 else {}


class Moves:
    """Actions that differ from all earlier ones."""

    def __init__(self):
        self._count = itertools.count()

    def __call__(self, num):
        return np.array([next(self._count) % 1000 for _ in range(num)])


def stepping(fleet, moves):
    while True:
        fleet.step(moves(fleet.num_slots))


def polling(fleet, moves):
    fleet.send(moves(fleet.num_slots))
    while True:
        slots = fleet.recv(timeout_s=0).slots
        if len(slots):
            fleet.send(moves(len(slots)), slots)


def one_by_one(fleet, moves):
    fleet.send(moves(fleet.num_slots))
    while True:
        for slot in fleet.recv(min_slots=1).slots.tolist():
            fleet.send(moves(1), [slot])


def calling(fleet, moves):
    while True:
        fleet.call("done")
        fleet.set_attr("mark", [1] * fleet.num_slots)


def resetting(fleet, moves):
    while True:
        fleet.reset([ResetPlan(seed=1)], [1])


BACKENDS: dict[str, Any] = {
    "process": {"backend": "process"},
    "thread": {"backend": "thread"},
    "serial": {"backend": "serial"},
    "shared": {"backend": "process", "num_here": 2},
}


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("env", [Recorder, Talker])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("work", [stepping, polling, one_by_one, calling, resetting])
def test_the_books_are_right_after_an_interrupt_at_any_moment(work, backend, env, autoreset, alarm):
    """The replay record of a slot has exactly what its environment went through."""
    dice, moves = random.Random(0), Moves()
    options = {"num_workers": 3, "autoreset": autoreset, **BACKENDS[backend]}

    def work_until_stopped():
        alarm(dice.uniform(1e-5, 3e-3))
        try:
            work(fleet, moves)
        finally:
            alarm(0)

    with closing(Fleet([env] * 6, **options)) as fleet:
        for _ in range(25):
            fleet.reset([ResetPlan(seed=slot) for slot in range(6)])
            with pytest.raises(Stop):
                work_until_stopped()
            begun_s = time.monotonic()
            fleet.drop()
            try:
                fleet.snapshot()  # waits for what is under way
            except ResetNeeded:
                assert backend in ("serial", "shared")  # the environment itself was interrupted
                continue
            done = fleet.call("done")
            replays: list[Any] = [snapshot.taken for snapshot in fleet.snapshot()]
            assert time.monotonic() - begun_s < 20.0
            assert [list(replay.actions) for replay in replays] == done


@pytest.mark.parametrize("then", ["recv", "call", "reset", "close"])
def test_an_answer_that_was_being_taken_in_this_process_is_not_lost(then, monkeypatch):
    """The handler raises while the answer is taken, before that is recorded."""
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
            assert fleet.call("t") == [1, 1]
        if then != "close":
            assert fleet.reset(plans).obs.tolist() == [[0], [0]]
            assert fleet.step(zeros).obs.tolist() == [[1], [1]]


class Terminated(Counter):
    """Gets a signal in the middle of a step, or of a reset, and would take no notice of it."""

    def __init__(self, at="step"):
        super().__init__(length=None)
        self.at, self.is_armed = at, False

    def reset(self, *, seed=None, options=None):
        if self.is_armed and self.at == "reset":
            self.is_armed = False
            signal.raise_signal(signal.SIGTERM)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.is_armed and self.at == "step":
            self.is_armed = False
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.01)
        return super().step(action)


class Handler:
    """A handler that is an object with a method, as programs have them."""

    def __init__(self, error):
        self.error = error

    def on_signal(self, *_):
        self.give_up()

    def give_up(self):
        raise self.error("enough")


@pytest.mark.parametrize("on_failure", ["raise", "restart", "resume", "fallback"])
@pytest.mark.parametrize("error", [SystemExit, TimeoutError])
@pytest.mark.parametrize("at", ["step", "reset"])
@pytest.mark.parametrize("where", ["serial", "shared"])
def test_what_a_handler_raises_in_an_environment_ends_the_call(where, at, error, on_failure):
    """It is not taken for a failure of the environment that it came in."""
    options = {"num_workers": 2, "on_failure": on_failure, **BACKENDS[where]}
    before = signal.signal(signal.SIGTERM, Handler(error).on_signal)
    try:
        env_fns: list[Callable[[], Any]] = [Counter, Counter, Counter, lambda: Terminated(at)]
        with closing(Fleet(env_fns, **options)) as fleet:
            plans = [ResetPlan(seed=slot) for slot in range(4)]
            fleet.reset(plans)
            fleet.step(np.zeros(4, np.int64))
            fleet.set_attr("is_armed", [True], [3])
            calls: dict[str, tuple[Callable[[Any], Any], Any]] = {
                "step": (fleet.step, np.zeros(4, np.int64)),
                "reset": (fleet.reset, plans),
            }
            call, argument = calls[at]
            with pytest.raises(error, match="enough"):
                call(argument)
            fleet.reset(plans)
            assert fleet.step(np.zeros(4, np.int64)).obs.tolist() == [[1]] * 4
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("error", [SystemExit, TimeoutError])
def test_the_same_raised_by_an_environment_itself_is_its_failure(error):
    class Leaving(Counter):
        def step(self, action):
            raise error("its own")

    before = signal.signal(signal.SIGTERM, Handler(error).on_signal)
    try:
        with closing(Fleet([Leaving], backend="serial")) as fleet:
            fleet.reset([ResetPlan(0)])
            with pytest.raises(EnvFailed, match=error.__name__):
                fleet.step(np.zeros(1, np.int64))
    finally:
        signal.signal(signal.SIGTERM, before)
