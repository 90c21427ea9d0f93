"""Reaching the environments where they live: apply runs a function, get reads, call calls."""

import os
import threading

import numpy as np
import pytest

import envfleet
from envfleet import errors
from envfleet.testing import Counter, VectorCounter
from tests.conformance.matrix import EVERY, FORK, QUICK, opened


class Holding(Counter):
    """Has an attribute that is a function, and counts how often a property was read."""

    measure = staticmethod(len)

    def double(self, number):
        return 2 * number + self.t


@pytest.fixture(params=QUICK)
def envs(request):
    with opened(Holding, 3, **request.param) as envs:
        envs.reset(seed=0)
        yield envs


@pytest.mark.parametrize("where", EVERY)
def test_a_function_is_run_where_the_environments_live(where):
    with opened(Counter, 3, **where) as envs:
        envs.reset(seed=0)
        envs.send(np.zeros(1, np.int64), [2])
        envs.recv()
        offset = 10
        assert envs.apply(lambda env: env.unwrapped.t + offset) == (10, 10, 11)
        pids = envs.apply(lambda env: os.getpid())
    is_away = where["backend"] not in ("serial", "thread")
    assert (pids[0] != os.getpid()) == is_away


def test_results_are_in_the_order_of_the_slots_named(envs):
    envs.set_attr("t", [5, 6, 7])
    assert envs.apply(lambda env: env.get_wrapper_attr("t"), slots=[2, 0]) == (7, 5)


def test_what_a_function_changes_stays_changed(envs):
    def advance(env):
        env.unwrapped.t += 4

    assert envs.apply(advance, slots=[1]) == (None,)
    assert envs.step(np.zeros(3, np.int64))[0][:, 0].tolist() == [1, 5, 1]


def test_a_function_that_raises_names_the_slot(envs):
    def divide(env):
        return 1 / env.unwrapped.t

    envs.set_attr("t", [1, 0, 2])
    with pytest.raises(errors.EnvFailed, match=r"slot 1 .*apply.*ZeroDivisionError") as caught:
        envs.apply(divide)
    assert "in divide" in str(caught.value.__cause__)
    assert envs.apply(divide, slots=[0, 2]) == (1.0, 0.5)
    assert envs.step(np.zeros(3, np.int64))[0][:, 0].tolist() == [2, 1, 3]


def test_a_function_that_cannot_travel_is_refused_before_anything_is_done():
    lock = threading.Lock()
    with opened(Counter, 2, **FORK) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.ConfigError, match="the function cannot be sent"):
            envs.apply(lambda env: lock.locked())
        assert envs.step(np.zeros(2, np.int64))[0].tolist() == [[1], [1]]


def test_an_attribute_is_read_and_a_method_called(envs):
    assert envs.get_attr("measure") == (len, len, len)
    assert envs.call("measure", "four") == (4, 4, 4)
    assert envs.call("double", 4) == (8, 8, 8)
    assert envs.get_attr("t", slots=[1]) == envs.call("t", slots=[1]) == (0,)
    with pytest.raises(errors.NoSuchAttribute, match=r"slot 0 .*'no_such'"):
        envs.get_attr("no_such")


@pytest.mark.parametrize("where", QUICK)
def test_a_natively_vectorised_environment_is_given_as_one(where):
    if where.get("num_here"):
        where = {**where, "num_here": 2}
    with opened(envfleet.native(lambda num: VectorCounter((5,) * num)), 4, **where) as envs:
        envs.reset(seed=0)
        sizes = envs.apply(lambda env: env.num_envs)
    assert sizes == ((4,) * 4 if where["backend"] == "serial" else (2,) * 4)
