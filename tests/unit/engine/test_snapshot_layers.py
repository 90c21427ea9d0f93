"""The attributes of layers: kept, put back, and what becomes of those that are no state."""

import itertools
import pickle
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest

from envfleet.engine import snapshot
from envfleet.testing import NoisyStream


class Wrapper(gymnasium.Wrapper):
    """Whatever it is given is an attribute of it."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, env, **attributes):
        super().__init__(env)
        vars(self).update(attributes)


class WorkerPart:
    def __init__(self):
        self.items = [1]


def test_containers_and_objects_are_as_they_were():
    env = Wrapper(NoisyStream(), queue=deque([1, 2], maxlen=2), table={"a": [1]}, part=WorkerPart())
    kept = snapshot.save_layers(env)
    env.queue.append(3)
    env.table["a"].append(2)
    env.part.items.append(2)
    for _ in range(2):
        snapshot.load_layers(env, kept)
        assert (env.queue, env.table, env.part.items) == (deque([1, 2]), {"a": [1]}, [1])
        env.queue.clear()
        env.part.items.clear()


def test_attributes_that_came_later_go():
    env = Wrapper(NoisyStream())
    kept = snapshot.save_layers(env)
    env.later = 1
    vars(env.unwrapped)["later"] = 2
    snapshot.load_layers(env, kept)
    assert not hasattr(env, "later")
    assert vars(env.unwrapped)["later"] == 2  # what is inside is put back by its own methods


def test_what_layers_share_they_still_share():
    shared = [1]
    env = Wrapper(Wrapper(NoisyStream(), mine=shared), mine=shared)
    snapshot.load_layers(env, snapshot.save_layers(env))
    assert env.mine is env.get_wrapper_attr("env").mine
    assert env.mine is not shared


def test_references_to_layers_and_their_parts_lead_to_those_that_are_there():
    def build():
        inner: Any = NoisyStream()
        inner.board = [0]
        inner.reset(seed=0)
        env = Wrapper(inner, inside={"env": inner}, board=inner.board, draw=inner.reset)
        return Wrapper(env)

    kept, other = snapshot.save_layers(build()), build()
    snapshot.load_layers(other, kept)
    inner = other.unwrapped
    assert other.env.env is inner
    assert other.env.inside["env"] is inner
    assert other.env.board is inner.board
    assert other.env.draw.__self__ is inner


def test_a_shared_generator_stays_shared():
    inner = NoisyStream()
    inner.reset(seed=0)
    env = Wrapper(inner, rng=inner.np_random)
    kept, expected = snapshot.save_layers(env), inner.np_random.random(3).tolist()
    snapshot.load_layers(env, kept)
    assert env.rng is inner.np_random
    assert env.rng.random(3).tolist() == expected


def test_tools_stay_where_they_are():
    lock, function = threading.Lock(), lambda: 1
    env = Wrapper(NoisyStream(), lock=lock, function=function, number=1)
    kept = snapshot.save_layers(env)
    env.number = 2
    snapshot.load_layers(env, kept)
    assert (env.lock, env.function, env.number) == (lock, function, 1)
    other = Wrapper(NoisyStream(), lock=threading.Lock(), function=len, number=3)
    snapshot.load_layers(other, kept)
    assert other.lock is not lock
    assert other.function is len


@pytest.mark.parametrize(
    "value",
    [(number for number in range(3)), {"lock": threading.Lock()}],
    ids=["a generator", "a lock within"],
)
def test_what_cannot_be_kept_is_an_error(value):
    with pytest.raises(TypeError):
        snapshot.save_layers(Wrapper(NoisyStream(), value=value))


class BuiltAnew(gymnasium.utils.EzPickle):
    """What is pickled of it is how it was made."""


def test_what_is_pickled_as_it_was_made_is_an_error():
    with pytest.raises(pickle.PicklingError, match="as it was when it was made"):
        snapshot.save_layers(Wrapper(NoisyStream(), other=[BuiltAnew()]))


class Window:
    def __init__(self):
        self.handle = threading.Lock()


Window.__module__ = "pygame.window"


def test_windows_stay_open():
    env = Wrapper(NoisyStream(), window=None, closed=None)
    before = snapshot.save_layers(env)
    window = env.window = Window()
    after = snapshot.save_layers(env)
    for kept in (before, after):
        snapshot.load_layers(env, kept)
        assert env.window is window
        assert env.closed is None


@pytest.fixture
def pendulum():
    env = gymnasium.make("InvertedPendulum-v5")
    env.reset(seed=0)
    yield env
    env.close()


PARTS = ("model", "data")


def test_the_model_and_its_data_are_not_kept_here(pendulum):
    inner = pendulum.unwrapped
    inner.sensors = {"all": inner.data, "numbers": [1]}
    kept, model, data, renderer = (
        snapshot.save_layers(pendulum, PARTS),
        inner.model,
        inner.data,
        inner.mujoco_renderer,
    )
    inner.sensors["numbers"].append(2)
    snapshot.load_layers(pendulum, kept)
    assert (inner.model, inner.data, inner.mujoco_renderer) == (model, data, renderer)
    assert inner.sensors["all"] is data
    assert inner.sensors["numbers"] == [1]


def test_views_of_the_data_are_still_views(pendulum):
    inner = pendulum.unwrapped
    inner.position = inner.data.qpos
    inner.deep = [inner.data.qvel[1:]]
    snapshot.load_layers(pendulum, snapshot.save_layers(pendulum, PARTS))
    inner.data.qpos[:] = [3, 4]
    inner.data.qvel[:] = [5, 6]
    assert inner.position.tolist() == [3, 4]
    assert inner.deep[0].tolist() == [6]


def test_arrays_are_as_they_were(pendulum):
    inner = pendulum.unwrapped
    inner.goal, inner.part = np.zeros(2), np.arange(6.0)[::2]
    kept = snapshot.save_layers(pendulum, PARTS)
    inner.goal += 1
    inner.part += 1
    snapshot.load_layers(pendulum, kept)
    assert inner.goal.tolist() == [0, 0]
    assert inner.part.tolist() == [0, 2, 4]


def test_iterators_that_can_be_kept_are():
    env = Wrapper(NoisyStream(), numbers=itertools.count())
    next(env.numbers)
    kept = snapshot.save_layers(env)
    assert next(env.numbers) == 1
    snapshot.load_layers(env, kept)
    assert next(env.numbers) == 1
