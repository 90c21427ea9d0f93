"""call, get_attr, set_attr and render, for all slots or for some."""

import functools

import numpy as np
import pytest

from envfleet import errors
from envfleet.testing import Counter, Crashing
from tests.conformance.matrix import QUICK, opened

ZERO = np.zeros(3, dtype=np.int64)


@pytest.fixture(params=QUICK)
def envs(request):
    with opened(Counter, 3, **request.param) as envs:
        envs.reset(seed=0)
        yield envs


def test_call_gives_one_result_per_slot(envs):
    envs.step(ZERO)
    assert envs.call("add", 10, right=5) == (16, 16, 16)


def test_call_by_slot_keeps_the_order_asked_for(envs):
    envs.send(np.zeros(1, np.int64), slots=[2])
    envs.recv()
    assert envs.call("add", 10, slots=[2, 0]) == (11, 10)


def test_call_of_an_attribute_reads_it(envs):
    assert envs.call("length") == (5, 5, 5)


def test_get_attr_by_slot(envs):
    envs.set_attr("length", [2, 3, 4])
    assert envs.get_attr("length") == (2, 3, 4)
    assert envs.get_attr("length", slots=[2, 0]) == (4, 2)


def test_set_attr_of_one_value_is_for_all(envs):
    envs.set_attr("length", 2)
    envs.step(ZERO)
    _, _, terminated, _, _ = envs.step(ZERO)
    assert terminated.all()


def test_set_attr_by_slot(envs):
    envs.set_attr("length", [1, 2], slots=[2, 1])
    assert envs.get_attr("length") == (5, 2, 1)
    _, _, terminated, _, _ = envs.step(ZERO)
    assert terminated.tolist() == [False, False, True]


def test_a_wrong_number_of_values_is_refused(envs):
    with pytest.raises(ValueError, match="3"):
        envs.set_attr("length", [1, 2])


def test_an_unknown_name_is_named_and_affects_no_other_slot(envs):
    with pytest.raises((AttributeError, errors.EnvFailed), match="no_such_name"):
        envs.get_attr("no_such_name")
    with pytest.raises((AttributeError, errors.EnvFailed), match="no_such_name"):
        envs.call("no_such_name")
    obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", QUICK)
def test_a_call_that_raises_names_the_slot_and_affects_no_other_slot(where):
    env_fns = [functools.partial(Crashing, at=at) for at in ("never", "call", "never")]
    with opened(env_fns, **where) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed, match="as asked") as caught:
            envs.call("probe")
        assert caught.value.slot == 1
        obs, _, _, _, _ = envs.step(ZERO)
        assert envs.call("probe") == (1, 1, 1)
    assert obs[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", QUICK)
def test_attributes_are_found_through_wrappers(where):
    with opened("CartPole-v1", 2, **where) as envs:
        assert envs.get_attr("gravity") == (9.8, 9.8)
        envs.set_attr("gravity", [1.0, 2.0])
        assert envs.get_attr("gravity") == (1.0, 2.0)


@pytest.mark.parametrize("where", QUICK)
def test_render_gives_one_frame_per_slot(where):
    env = functools.partial(Counter, render_mode="ansi")
    with opened(env, 3, **where) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        assert envs.render() == ("t=1", "t=1", "t=1")
        assert envs.render_mode == "ansi"
