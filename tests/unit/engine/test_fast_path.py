"""Plain steps give the same streams on every backend, with and without the compiled functions."""

import functools
import os
import time
from contextlib import contextmanager

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envfleet
from envfleet.adapters import opening
from envfleet.engine import rows_python
from envfleet.engine.backends.process import backend
from envfleet.engine.backends.serial import SerialHandle
from envfleet.errors import ConfigError, NothingSent, StillInFlight
from tests import pipe_backend  # noqa: F401  registers itself
from tests.gates import wait_for, wait_for_answers

BOUNDS = [(0, 2), (2, 4), (4, 6)]
NUM_ENVS = 6


class Talker(gymnasium.Env):
    """Counts; now and then it has something to say that no row can hold."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total = float(self.np_random.integers(100))
        self.count = 0
        return np.array([self.total]), {}

    def step(self, action):
        self.total, self.count = self.total * 3 % 1009 + int(action), self.count + 1
        info = {"word": str(self.count)} if self.count % 5 == 0 else {}
        return np.array([self.total]), self.total, self.total % 7 == 0, False, info


def opened(backend="process", **options):
    return envfleet.make_vec(Talker, NUM_ENVS, num_workers=len(BOUNDS), backend=backend, **options)


@contextmanager
def opened_at(place):
    """A fleet whose workers live there."""
    with pytest.MonkeyPatch.context() as patch:
        if "without C" in place:
            patch.setattr(backend, "post_steps", rows_python.post_steps)
            patch.setattr(backend, "collect_steps", rows_python.collect_steps)
        name, _, share = place.partition(" and ")
        options = {"num_here": 2} if share.startswith("this process") else {}
        with opened(name.partition(" ")[0], **options) as envs:
            yield envs


PLACES = [
    "process",
    "process without C",
    "process and this process",
    "process and this process without C",
    "thread",
    "pipes",
]


def under_way(envs):
    return [worker for worker, state in enumerate(envs.fleet._inflight.plain) if state]


workers = st.sets(st.sampled_from(range(len(BOUNDS))), min_size=1).map(
    lambda chosen: [slot for worker in chosen for slot in range(*BOUNDS[worker])]
)
slots = st.one_of(workers, workers, st.lists(st.integers(0, NUM_ENVS - 1), min_size=1, unique=True))
orders = st.lists(
    st.one_of(
        st.tuples(st.just("send"), slots),
        st.tuples(st.just("send"), slots),
        st.tuples(st.just("recv"), st.integers(1, NUM_ENVS)),
        st.tuples(st.just("recv slots"), workers),
        st.tuples(st.just("poll"), st.just(None)),
        st.tuples(st.just("step"), st.just(None)),
        st.tuples(st.just("call"), st.just(None)),
    ),
    max_size=40,
)


def told(envs, orders):
    """What each slot did, whenever that was heard of."""
    stories: list[list[object]] = [[] for _ in range(NUM_ENVS)]
    in_flight: set[int] = set()

    def take(batch):
        infos = batch.each_info
        for index, slot in enumerate(batch.slots.tolist()):
            in_flight.discard(slot)
            row = (batch.obs[index].tolist(), batch.rewards[index], batch.terminated[index])
            stories[slot].append((*row, infos[index]))

    def send(wanted):
        chosen = [slot for slot in wanted if slot not in in_flight]
        if chosen:
            envs.send(np.array([len(stories[slot]) % 10 for slot in chosen]), chosen)
            in_flight.update(chosen)

    envs.reset(seed=3)
    for order, what in orders:
        if order == "send":
            send(what)
        elif order == "recv" and in_flight:
            take(envs.recv(min_slots=what))
        elif order == "recv slots" and in_flight >= set(what):
            take(envs.recv(slots=what))
        elif order == "poll" and in_flight:
            take(envs.recv(min_slots=1, timeout_s=0.0))
        elif order == "step" and not in_flight:
            send(range(NUM_ENVS))
            take(envs.recv())
        elif order == "call":
            assert envs.call("has_wrapper_attr", "count") == (True,) * NUM_ENVS
    if in_flight:
        take(envs.recv())
    return stories


@pytest.fixture(scope="module", params=PLACES)
def fleets(request):
    with opened_at(request.param) as there, opened("serial") as here:
        yield there, here


@given(orders=orders)
@settings(max_examples=150, deadline=None)
def test_any_order_of_things_gives_the_same_streams(fleets, orders):
    for there, here in zip(*(told(envs, orders) for envs in fleets), strict=True):
        count = min(len(there), len(here))  # which is ready first is a matter of time
        assert there[:count] == here[:count]


@pytest.mark.parametrize("place", PLACES)
def test_steps_are_plain_again_after_something_special(place):
    ones, shares = np.ones(2, np.int64), [list(range(*bounds)) for bounds in BOUNDS]
    with opened_at(place) as envs:
        envs.reset(seed=0)
        for slots in shares:
            envs.send(ones, slots)
        seen = []
        for slots in shares * 13:  # one worker at a time, so that the others are under way
            envs.recv(slots=slots)
            envs.send(ones, slots)
            seen.append(len(under_way(envs)))
        assert min(seen) < len(BOUNDS), "a step whose info is no number is not plain"
        assert max(seen) == len(BOUNDS), "but all others are"
        envs.recv()
        assert under_way(envs) == []


def test_more_than_all_is_all():
    with opened() as envs:
        envs.reset(seed=0)
        envs.send(np.zeros(NUM_ENVS, np.int64))
        assert len(envs.recv(min_slots=10**30)) == NUM_ENVS


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_what_is_ready_is_not_lost_by_sending_again(backend):
    zeros = np.zeros(NUM_ENVS, np.int64)
    with opened(backend) as envs:
        envs.reset(seed=0)
        envs.send(zeros)
        envs.recv(slots=[0])
        with pytest.raises(StillInFlight, match=r"slots \[1\] have been sent and not yet received"):
            envs.send(zeros[:1], [1])
        assert envs.recv().slots.tolist() == [1, 2, 3, 4, 5]
        assert envs.get_attr("count") == (1,) * NUM_ENVS


def test_this_process_steps_its_own_while_others_step_theirs(tmp_path):
    class Meeting(Talker):
        """No step ends before both are in it."""

        def __init__(self, mine, other):
            self.mine, self.other = mine, other

        def step(self, action):
            (tmp_path / f"{self.mine}{self.count}").touch()
            wait_for(tmp_path / f"{self.other}{self.count}")
            return super().step(action)

    env_fns = [functools.partial(Meeting, *names) for names in ("ab", "ba")]
    with envfleet.make_vec(env_fns, num_workers=2, backend="process", num_here=1) as envs:
        envs.reset(seed=0)
        assert [pid is None for pid in envs.fleet.worker_pids()] == [False, True]
        for _ in range(4):
            envs.step(np.zeros(2, np.int64))


def test_who_has_enough_does_not_wait_for_this_process():
    stepped_here = []

    class Here(Talker):
        def step(self, action):
            stepped_here.append(os.getpid())
            return super().step(action)

    env_fns = [Talker, Talker, Talker, Here]
    with envfleet.make_vec(env_fns, num_workers=3, num_here=1) as envs:
        envs.reset(seed=0)
        envs.send(np.zeros(4, np.int64))
        wait_for_answers(envs.fleet, 0, 1)
        assert envs.recv(min_slots=2).slots.tolist() == [0, 1, 2]
        assert stepped_here == []
        assert envs.recv().slots.tolist() == [3]
        assert stepped_here == [os.getpid()]


def test_as_many_as_were_asked_for_come_from_both():
    with opened(num_here=2) as envs:
        envs.reset(seed=0)
        for chosen in ([0, 1, 4, 5], [2, 3, 4, 5], [4, 5], [0, 1]):
            envs.send(np.zeros(len(chosen), np.int64), chosen)
            time.sleep(0.02)
            assert envs.recv(min_slots=len(chosen)).slots.tolist() == chosen


def test_workers_by_default_leave_somebody_something(monkeypatch):
    monkeypatch.setattr(opening, "usable_cores", lambda: 4)
    with envfleet.make_vec(Talker, 6, num_here=5) as envs:
        assert envs.fleet.bounds == [(0, 1), (1, 6)]


@pytest.mark.parametrize("worker", range(len(BOUNDS)))
def test_a_step_that_is_interrupted_while_it_is_posted_is_not_done(worker, monkeypatch):
    """A signal's handler raises when some workers here know of it, and others do not."""
    post = SerialHandle.post

    def interrupted(handle, command):
        post(handle, command)
        if handle.worker == worker:
            raise KeyboardInterrupt

    with opened("serial") as envs:
        envs.reset(seed=0)
        monkeypatch.setattr(SerialHandle, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.send(np.zeros(NUM_ENVS, np.int64))
        monkeypatch.setattr(SerialHandle, "post", post)
        with pytest.raises(NothingSent):
            envs.recv()
        envs.step(np.zeros(NUM_ENVS, np.int64))
        assert envs.get_attr("count") == (1,) * NUM_ENVS


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"backend": "serial"}, "num_here shares slots .* got backend='serial'"),
        ({"backend": "thread", "num_workers": 2}, "num_here shares slots"),
        ({"num_workers": 1}, "two workers or more"),
        ({"num_here": 3}, "num_here=3 leaves 0 of 3 slots for 1 worker processes"),
        ({"num_here": -1}, "num_here"),
        ({"num_here": 1.5}, "num_here"),
        ({"step_timeout_s": 1.0}, "cannot be interrupted"),
    ],
)
def test_shares_that_cannot_be(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        envfleet.make_vec(Talker, 3, **{"num_here": 1, "num_workers": 2, **options})
