"""Checkpoints keep environments only in ways that lead back."""

import itertools
import threading
import warnings

import numpy as np
import pytest

from envfleet.learn.slot_keeper import SlotKeeper
from envfleet.testing import NoisyStream
from tests.conformance.matrix import SERIAL, opened

NUMBERS = itertools.count()


class OnlyReplayed(NoisyStream):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class DoesNotRepeatItself(OnlyReplayed):
    """Nor does it repeat itself."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + next(NUMBERS), *rest


class RepeatsItsFirstEpisode(OnlyReplayed):
    """Draws from a generator of its own, which only a seed sets."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.own = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.float32(self.own.random()), *rest


class BeginsElsewhere(OnlyReplayed):
    """Its seed is not what it begins with."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return obs + next(NUMBERS), info


class DrawsItsNextEpisode(OnlyReplayed):
    """What it begins with is drawn from nowhere, unless there is a seed."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return obs + (next(NUMBERS) if seed is None else 0), info


def kept_twice(env):
    with opened(env, 2, **SERIAL) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros((2, 2), np.float32))
        keeper = SlotKeeper(envs)
        return keeper.take(), keeper.take()


@pytest.mark.parametrize("env", [DoesNotRepeatItself, DrawsItsNextEpisode])
def test_a_replay_that_does_not_repeat_is_found_at_the_first_checkpoint(env):
    with pytest.warns(RuntimeWarning, match="does not repeat itself.*begins new episodes") as told:
        assert kept_twice(env) == (None, None)
    assert len(told) == 1


@pytest.mark.parametrize(("env", "is_found"), [(BeginsElsewhere, True), (OnlyReplayed, False)])
def test_a_reset_that_does_not_repeat_is_found_before_the_first_step(env, is_found):
    with opened(env, 2, **SERIAL) as envs, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        envs.reset(seed=0)
        assert (SlotKeeper(envs).take() is None) == is_found
    assert ["does not repeat itself" in str(one.message) for one in told] == [True] * is_found


def test_every_slot_is_tried_for_not_all_of_them_need_repeat():
    made = itertools.count()

    def make():
        return DoesNotRepeatItself() if next(made) == 1 else OnlyReplayed()

    with opened([make, make], **SERIAL) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros((2, 2), np.float32))
        with pytest.warns(RuntimeWarning, match="does not repeat itself"):
            assert SlotKeeper(envs).take() is None


def test_a_replay_that_repeats_is_kept_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for slots in kept_twice(OnlyReplayed):
            assert [slot.method for slot in slots] == ["replay", "replay"]


def test_an_episode_without_a_seed_is_tried_too():
    with opened(RepeatsItsFirstEpisode, 1, **SERIAL) as envs:
        keeper = SlotKeeper(envs)
        envs.reset(seed=0)
        envs.step(np.zeros((1, 2), np.float32))
        assert keeper.take() is not None
        envs.reset()
        envs.step(np.zeros((1, 2), np.float32))
        with pytest.warns(RuntimeWarning, match="does not repeat itself"):
            assert keeper.take() is None
