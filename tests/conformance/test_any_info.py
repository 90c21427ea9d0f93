"""Infos of any shape arrive complete, in the right slot."""

import numpy as np
import pytest

from envfleet.testing import Counter, first_difference, fleet_driven, hand_driven
from tests.conformance.matrix import BY_RAY, MODES, PROCESSES, QUICK

KEYS = ("a", "b", "_c", "d e", "é")


class RandomInfo(Counter):
    """Draws the keys, kinds and values of every info."""

    kinds = 14

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, self.draw_info()

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self.draw_info()

    def draw_info(self, depth=0):
        draw = self.np_random
        chosen = [key for key in KEYS if draw.random() < 0.5]
        return {key: self.draw_value(depth) for key in chosen}

    def draw_value(self, depth):
        draw = self.np_random
        kind = int(draw.integers(self.kinds))
        if kind == 0:
            return int(draw.integers(-5, 5))
        if kind == 1:
            return float(draw.normal())
        if kind == 2:
            return bool(draw.random() < 0.5)
        if kind == 3:
            return int(draw.choice([2**62 + 1, -(2**62) - 1, 2**53 + 1])) * int(draw.choice([1, 4]))
        if kind == 4:
            dtype = draw.choice(["float32", "int8", "uint64", "float16", "bool"])
            return np.array(draw.integers(0, 2)).astype(dtype)[()]
        if kind == 5:
            return draw.normal(size=draw.integers(0, 3, size=int(draw.integers(0, 3))))
        if kind == 6:
            return draw.integers(0, 9, size=2).astype(draw.choice(["int32", "uint8"]))
        if kind == 7:
            return "text " * int(draw.integers(0, 3))
        if kind == 8:
            return None
        if kind == 9:
            return [1, "two", (3.0,)]
        if kind == 10:
            return float("nan") if draw.random() < 0.5 else float("inf")
        if kind == 11:
            return np.array(["x", "yy"])
        if kind == 12:
            return draw.normal(size=300)
        return self.draw_info(depth + 1) if depth < 2 else {}


class RandomNumbers(RandomInfo):
    """The same with numbers only, which may take another path."""

    kinds = 5


def assert_same(env, mode, num_steps, seed, **kwargs):
    difference = first_difference(
        hand_driven(env, 3, num_steps, seed, mode),
        fleet_driven(env, 3, num_steps, seed, mode, **kwargs),
    )
    assert difference is None, str(difference)


@pytest.mark.parametrize("env", [RandomInfo, RandomNumbers])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", QUICK)
def test_infos_arrive_as_they_were_given(where, mode, env):
    assert_same(env, mode, 150, 0, **where)


@pytest.mark.parametrize("env", [RandomInfo, RandomNumbers])
@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_infos_arrive_in_the_order_of_the_batch(where, env):
    for min_slots in (1, 2):
        assert_same(env, "same_step", 100, 7, min_slots=min_slots, **where)


@pytest.mark.parametrize("where", PROCESSES)
def test_infos_arrive_under_each_start_method(where):
    assert_same(RandomInfo, "same_step", 60, 3, **where)
