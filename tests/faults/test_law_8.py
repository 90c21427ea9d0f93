"""Law 8: errors travel as text; nothing that cannot be pickled kills a worker or the protocol."""

import asyncio
import functools
import pickle
import sys
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envfleet import errors
from envfleet.engine import messages
from envfleet.engine.backends import encoding
from envfleet.testing import (
    Counter,
    TwoArgumentError,
    TwoArgumentException,
    UnpicklableException,
    UnpicklableInfo,
)
from tests.faults.stage import METHODS, Resident, opened, zeros
from tests.gates import at_most

PROCESSES = [
    pytest.param({"backend": "process", "start_method": method}, id=method) for method in METHODS
]
WHERE = [*PROCESSES, pytest.param({"backend": "thread"}, id="thread")]


class NoRepr:
    """Can neither be pickled nor shown."""

    def __reduce__(self):
        raise TypeError("no pickle of me")

    def __repr__(self):
        raise RuntimeError("no picture of me")


class NoReturn:
    """Can be pickled, and cannot be unpickled."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return NoReturn, ()


class Informs(Resident):
    """Returns any info in its second step, and any value from a call."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {"t": self.t, "odd": self.make()} if self.t == 2 else {"t": self.t}
        return obs, reward, terminated, truncated, info

    def answer(self):
        return self.make()


def two_argument_error():
    return TwoArgumentError(1, "here")


ODD = [threading.Lock, NoRepr, functools.partial(NoReturn, 1), two_argument_error]
ODD_IDS = ["lock", "no repr", "no return", "two-argument error"]


# ---- infos --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
def test_an_info_that_cannot_be_pickled_arrives_as_far_as_it_can(where):
    with opened([UnpicklableInfo] * 2, num_workers=1, **where) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["t"].tolist() == [0, 0]
        for t in (1, 2, 3):
            obs, _, _, _, infos = envs.step(zeros(2))
            assert obs.tolist() == [[t], [t]]
            assert infos["t"].tolist() == [t, t]
            assert "lock" in repr(infos["lock"][0])
            assert infos["_lock"].tolist() == [True, True]


@pytest.mark.parametrize("make", ODD, ids=ODD_IDS)
def test_an_odd_value_in_an_info_affects_no_other_slot(make):
    """It arrives, or a readable text replaces it; the rest of the info is complete."""
    with opened([functools.partial(Informs, make), Resident], num_workers=1) as envs:
        envs.reset(seed=0)
        pids = envs.get_attr("pid")
        for t in range(1, 6):
            obs, rewards, _, _, infos = envs.step(zeros(2))
            assert obs.tolist() == [[t], [t]]
            assert rewards.tolist() == [t, t]
            assert infos["t"][0] == t
            assert ("odd" in infos) == (t == 2)
        assert envs.get_attr("pid") == pids
        assert envs.incidents == ()


@pytest.mark.parametrize("make", ODD, ids=ODD_IDS)
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_an_odd_value_in_the_last_info_affects_no_other_slot(mode, make):
    class Ends(Informs):
        def step(self, action):
            obs, reward, _, truncated, info = super().step(action)
            return obs, reward, self.t == 2, truncated, info

    with opened([functools.partial(Ends, make)] * 2, num_workers=1, autoreset=mode) as envs:
        envs.reset(seed=0)
        for _ in range(7):
            *_, infos = envs.step(zeros(2))
            assert infos is not None
        assert envs.incidents == ()


class Nests(Resident):
    """Returns an info that is deep or contains itself, or has a key that cannot be pickled."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def step(self, action):
        obs, reward, _, truncated, _ = super().step(action)
        tree: Any = {"n": self.t, "children": []}
        if self.how == "ring":
            tree["self"] = tree
        elif self.how == "tree":
            tree["children"].append({"n": 2, "parent": tree})
        elif self.how == "ring with a lock":
            tree |= {"lock": threading.Lock(), "self": tree}
        elif self.how == "key":
            tree[NoRepr()] = 1
        else:
            for _ in range(900):
                tree = [tree] if self.how == "deep lists" else {"in": tree}
        ends = self.t == 2
        return obs, reward, ends, truncated, {"t": self.t, "odd": tree, "even": {"t": self.t}}


NESTS = ("ring", "tree", "ring with a lock", "deep lists", "deep dicts")


@pytest.mark.parametrize("how", [*NESTS, "key"])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_an_info_that_nests_too_deep_affects_no_other_slot(mode, how):
    with opened([functools.partial(Nests, how), Resident], num_workers=1, autoreset=mode) as envs:
        envs.reset(seed=0)
        (pid, _) = envs.fleet.call("pid")
        for t in range(1, 6):
            obs, _, _, _, infos = envs.step(zeros(2))
            assert obs[1].tolist() == [t]
            if t == 1:
                assert "odd" in infos
                assert infos["t"].tolist() == [1, 0]
                assert infos["even"]["t"].tolist() == [1, 0]
        assert envs.fleet.call("pid") == [pid, pid]
        assert envs.incidents == ()


@pytest.mark.parametrize("how", NESTS)
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_nor_does_it_in_this_process(mode, how):
    """It arrives as it is, and the rest of the info in the usual form."""
    with opened([functools.partial(Nests, how)] * 2, backend="serial", autoreset=mode) as envs:
        envs.reset(seed=0)
        *_, infos = envs.step(zeros(2))
        assert infos["even"]["t"].tolist() == [1, 1]
        assert infos["_odd"].tolist() == [True, True]
        if how == "ring":
            assert infos["odd"][1]["self"] is infos["odd"][1]
        *_, infos = envs.step(zeros(2))
        last = infos["final_info"] if mode == "same_step" else infos
        assert last["even"]["t"].tolist() == [2, 2]
        assert last["_odd"].tolist() == [True, True]


def test_an_answer_that_cannot_travel_at_all_is_a_failure_of_its_slots(monkeypatch):
    monkeypatch.setattr(encoding, "_why_it_cannot_travel", lambda value: None)
    known = messages.EnvFailure.of(5, "step", ValueError("known"))
    odd = {"lock": threading.Lock()}
    reply = messages.Reply(failures=[known], infos={3: odd, 4: {"t": 1}, 5: {}})
    arrived = pickle.loads(encoding.encode_reply(reply))
    assert arrived.failures[0] == known
    assert [failure.slot for failure in arrived.failures] == [5, 3, 4]
    assert "lock" in arrived.failures[1].reason


# ---- exceptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("env", "text"),
    [
        (TwoArgumentException, "TwoArgumentError: error 7 at step"),
        (UnpicklableException, "an exception that cannot be pickled"),
    ],
    ids=["two arguments", "unpicklable"],
)
def test_an_exception_that_cannot_travel_arrives_as_text(env, text, where):
    with opened([Counter, functools.partial(env, nth=2)], num_workers=2, **where) as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        with pytest.raises(errors.EnvFailed) as caught:
            envs.step(zeros(2))
        assert caught.value.slot == 1
        assert text in str(caught.value)
        assert "in misbehave" in str(caught.value.__cause__)
        envs.reset(seed=0)
        assert envs.step(zeros(2))[0].tolist() == [[1], [1]]


class Raises(Resident):
    """Raises the given exception in its second step."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def step(self, action):
        if self.t == 1:
            raise self.make()
        return super().step(action)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("backend", ["process", "thread", "serial"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Mute, "Mute"),
        (functools.partial(sys.exit, 3), "SystemExit"),
        (asyncio.CancelledError, "CancelledError"),
        (GeneratorExit, "GeneratorExit"),
        (StopIteration, "StopIteration"),
        (MemoryError, "MemoryError"),
        (functools.partial(ExceptionGroup, "several", [ValueError("one")]), "several"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_an_environment_raises_is_its_own_failure(make, name, backend):
    """Also what asyncio, sys.exit and generators raise, which is not an Exception."""
    with opened([Resident, functools.partial(Raises, make)], num_workers=2, backend=backend) as e:
        e.reset(seed=0)
        e.step(zeros(2))
        with at_most(2.0), pytest.raises(errors.EnvFailed, match=name) as caught:
            e.step(zeros(2))
        assert caught.value.slot == 1
        e.reset(seed=0)
        assert e.step(zeros(2))[0].tolist() == [[1], [1]]


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_keyboard_interrupt_raised_by_an_environment_is_its_own_failure_too(backend):
    """Not a real Ctrl-C: that goes to the parent, and workers ignore it."""
    env_fn = functools.partial(Raises, KeyboardInterrupt)
    with opened([Resident, env_fn], num_workers=2, backend=backend) as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        with at_most(2.0), pytest.raises(errors.EnvFailed, match="KeyboardInterrupt"):
            envs.step(zeros(2))


def test_a_chain_of_causes_arrives_whole():
    class Chained(Resident):
        def step(self, action):
            try:
                raise KeyError("the first cause")
            except KeyError as exc:
                raise ValueError("the second") from exc

    with opened([Chained]) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed) as caught:
            envs.step(zeros(1))
        text = str(caught.value.__cause__)
        assert "the first cause" in text
        assert "direct cause" in text
        assert "the second" in text


def test_an_endless_recursion_arrives_as_an_error():
    class Deep(Resident):
        def step(self, action):
            return self.step(action)

    with opened([Deep, Resident], num_workers=2) as envs:
        envs.reset(seed=0)
        with at_most(3.0), pytest.raises(errors.EnvFailed, match="RecursionError"):
            envs.step(zeros(2))


@pytest.mark.parametrize("moment", ["constructor", "reset"])
def test_a_two_argument_exception_at_other_moments(moment):
    env_fn = functools.partial(TwoArgumentException, at=moment)
    with pytest.raises(errors.EnvfleetError, match="error 7 at") as caught:
        open_and_reset([env_fn])
    expected = errors.EnvConstructionFailed if moment == "constructor" else errors.EnvFailed
    assert type(caught.value) is expected


def open_and_reset(env_fns):
    with opened(env_fns) as envs:
        envs.reset(seed=0)


def test_our_own_errors_pickle_with_their_data():
    """A fleet may run inside another worker process, and its errors travel on from there."""
    with opened([Resident, functools.partial(Raises, ValueError)], num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        with pytest.raises(errors.EnvFailed) as caught:
            envs.step(zeros(2))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.slot) == (errors.EnvFailed, str(caught.value), 1)


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PROCESSES)
def test_a_result_that_cannot_travel_is_a_named_error(where):
    with opened([UnpicklableInfo] * 2, num_workers=2, **where) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed, match=r"slot [01] .*lock"):
            envs.get_attr("unpicklable")
        assert envs.get_attr("t") == (0, 0)
        assert envs.step(zeros(2))[0].tolist() == [[1], [1]]


@pytest.mark.parametrize("make", ODD, ids=ODD_IDS)
def test_an_odd_answer_affects_no_other_slot(make):
    with opened([functools.partial(Informs, make), Resident], num_workers=1) as envs:
        envs.reset(seed=0)
        pids = envs.get_attr("pid")
        with pytest.raises(errors.EnvfleetError, match="slot 0"):
            envs.call("answer", slots=[0])
        assert envs.call("t") == (0, 0)
        for t in (1, 2, 3):
            assert envs.step(zeros(2))[0].tolist() == [[t], [t]]
        assert envs.get_attr("pid") == pids


def test_answers_of_others_are_not_lost_with_one_that_cannot_travel():
    with opened([functools.partial(Informs, threading.Lock), Resident], num_workers=1) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed, match="slot 0"):
            envs.call("answer", slots=[0])
        assert envs.call("t", slots=[1]) == (0,)


# ---- what the caller sends ----------------------------------------------------------------------

CALLER = ("call", "set_attr", "reset", "queue_reset")


def send_odd(envs, how, value):
    match how:
        case "call":
            envs.call("add", value)
        case "set_attr":
            envs.set_attr("toy", value)
        case "reset":
            envs.reset(options={"toy": value})
        case _:
            envs.queue_reset(options={"toy": value})


@pytest.mark.parametrize("how", CALLER)
@pytest.mark.parametrize("make", [threading.Lock, NoRepr], ids=["lock", "no repr"])
def test_what_cannot_be_sent_is_refused_and_nothing_is_out_of_step(make, how):
    with opened([Resident] * 3, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(zeros(3))
        with pytest.raises(errors.EnvfleetError, match="pickle"):
            send_odd(envs, how, make())
        assert envs.call("add", 10) == (11, 11, 11)
        for t in (2, 3):
            assert envs.step(zeros(3))[0][:, 0].tolist() == [t] * 3
        envs.reset(seed=0)
        assert envs.step(zeros(3))[0][:, 0].tolist() == [1] * 3


@pytest.mark.parametrize("how", CALLER)
@pytest.mark.parametrize(
    "make", [functools.partial(NoReturn, 1), two_argument_error], ids=["no return", "two arguments"]
)
def test_what_cannot_be_read_by_a_worker_does_not_kill_it(make, how):
    with opened([Resident] * 3, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(zeros(3))
        pids = envs.get_attr("pid")
        with at_most(2.0), pytest.raises(errors.EnvfleetError):
            send_odd(envs, how, make())
        assert envs.get_attr("pid") == pids
        envs.reset(seed=0)
        for t in (1, 2):
            assert envs.step(zeros(3))[0][:, 0].tolist() == [t] * 3


# ---- observations of spaces that only pickle can carry ------------------------------------------


class Anything(spaces.Space):
    """A custom space, which spills to the control path."""

    def __init__(self):
        super().__init__((), None)

    def contains(self, x):
        return True

    def sample(self, mask=None, probability=None):
        return 0

    def __eq__(self, other):
        return isinstance(other, Anything)


class Odd(gymnasium.Env):
    """Observes a number, and in its second step an object that cannot be sent."""

    def __init__(self, make):
        self.observation_space = Anything()
        self.action_space = spaces.Discrete(2)
        self.make = make
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return (self.make() if self.t == 2 else self.t), 1.0, False, False, {}


@pytest.mark.parametrize("make", ODD, ids=ODD_IDS)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_an_observation_that_cannot_travel_is_that_slot_s_failure(on_failure, make):
    calm = functools.partial(Odd, lambda: 2)
    with opened(
        [calm, functools.partial(Odd, make), calm], num_workers=1, on_failure=on_failure
    ) as envs:
        envs.reset(seed=0)
        assert envs.step(zeros(3))[0] == (1, 1, 1)
        envs.send(zeros(3))
        if on_failure == "raise":
            with pytest.raises(errors.EnvFailed) as caught:
                envs.recv()
            assert caught.value.slot == 1
            batch = envs.recv()
            assert (batch.slots.tolist(), batch.obs) == ([0, 2], (2, 2))
            assert envs.reset(options={"reset_mask": np.array([False, True, False])})[0][1] == 0
        else:
            batch = envs.recv()
            assert batch.truncated.tolist() == [False, True, False]
            assert (batch.obs[0], batch.obs[2]) == (2, 2)
            assert envs.step(zeros(3))[0] == (3, 0, 3)
