"""Every vectoriser of environments with several agents equals a loop over one, bit for bit."""

import functools
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpe2 import simple_spread_v3
from pettingzoo.utils import aec_to_parallel, wrappers

from envfleet.multiagent import AECVecEnv, AsyncPettingZooVecEnv, GridWorldEnvMultiAgent
from envfleet.multiagent.grid_world import GridWorldEnvParallel
from tests.conformance.matrix import EVERY, QUICK
from tests.unit.multiagent import by_hand
from tests.unit.multiagent.dying_agents import (
    DyingAgents,
    DyingAgentsParallel,
    boxes,
    mixed_actions,
    numbered_actions,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.classic import connect_four_v3, rps_v2, tictactoe_v3


class ComingBack(DyingAgentsParallel):
    """An agent that died comes back two steps later, while another is left."""

    def begin(self, seed):
        super().begin(seed)
        self.gone = {}

    def step(self, actions):
        before = list(self.agents)
        answer = super().step(actions)
        for name in before:
            if name not in self.agents:
                self.gone[name] = 2
        for name in list(self.gone) if self.agents else ():
            self.gone[name] -= 1
            if not self.gone[name]:
                del self.gone[name]
                self.agents.append(name)
                seen, rewards, terminated, truncated, infos = answer
                seen[name], rewards[name] = self.seen[name], 0.0
                terminated[name] = truncated[name] = False
                infos[name] = {}
        return answer


class Forgetful(GridWorldEnvMultiAgent):
    """Draws where it says an agent is, whenever it is asked."""

    def observe(self, agent):
        assert self._rng is not None
        return super().observe(agent) | {"agent": self._rng.integers(5, size=2)}


def forgetful_in_cycles():
    world = Forgetful(size=5, max_steps=7)
    checked = wrappers.AssertOutOfBoundsWrapper(world)
    return aec_to_parallel(wrappers.OrderEnforcingWrapper(checked))


PARALLEL = [
    pytest.param(functools.partial(DyingAgentsParallel, is_truncating=True), id="dying"),
    pytest.param(functools.partial(ComingBack, is_truncating=True), id="coming back"),
    pytest.param(functools.partial(DyingAgentsParallel, numbered_actions()), id="choices"),
    pytest.param(functools.partial(DyingAgentsParallel, boxes(), has_masks=False), id="boxes"),
    pytest.param(
        functools.partial(DyingAgentsParallel, mixed_actions(), has_masks=False), id="mixed"
    ),
    pytest.param(functools.partial(DyingAgentsParallel, death_rate=1.0), id="all at once"),
    pytest.param(functools.partial(GridWorldEnvParallel, size=5, max_steps=7), id="grid"),
    pytest.param(functools.partial(simple_spread_v3.parallel_env, max_cycles=7), id="spread"),
    pytest.param(rps_v2.parallel_env, id="rock, paper, scissors"),
    pytest.param(forgetful_in_cycles, id="cycles"),
]
TURNS = [
    pytest.param(functools.partial(DyingAgents, is_truncating=True), id="dying"),
    pytest.param(functools.partial(DyingAgents, numbered_actions()), id="choices"),
    pytest.param(functools.partial(DyingAgents, mixed_actions(), has_masks=False), id="mixed"),
    pytest.param(functools.partial(DyingAgents, death_rate=1.0), id="all at once"),
    pytest.param(functools.partial(GridWorldEnvMultiAgent, size=5, max_steps=7), id="grid"),
    pytest.param(connect_four_v3.env, id="connect four"),
    pytest.param(rps_v2.env, id="rock, paper, scissors"),
]


@pytest.mark.parametrize("make", PARALLEL)
@pytest.mark.parametrize("where", QUICK)
def test_parallel_environments_give_what_a_loop_gives(where, make):
    expected = by_hand.parallel_by_hand(make, 3, 25, 0)
    with AsyncPettingZooVecEnv([make] * 3, **where) as vec:
        by_hand.assert_same(expected, by_hand.parallel_by_fleet(vec, 25, 0))
    assert any("ended" in step for steps in expected for step in steps)


@pytest.mark.parametrize("where", EVERY)
def test_every_start_method_gives_the_same(where):
    make = functools.partial(DyingAgentsParallel, is_truncating=True)
    expected = by_hand.parallel_by_hand(make, 3, 12, 5)
    with AsyncPettingZooVecEnv([make] * 3, **where) as vec:
        by_hand.assert_same(expected, by_hand.parallel_by_fleet(vec, 12, 5))
    turns = by_hand.turns_by_hand(connect_four_v3.env, 3, 12, 5)
    with AECVecEnv([connect_four_v3.env] * 3, **where) as vec:
        by_hand.assert_same(turns, by_hand.turns_by_fleet(vec, 12, 5))


@pytest.mark.parametrize("make", PARALLEL[:2])
@pytest.mark.parametrize("where", QUICK)
def test_parallel_environments_come_first_ready(where, make):
    expected = by_hand.parallel_by_hand(make, 4, 20, 3)
    with AsyncPettingZooVecEnv([make] * 4, **where) as vec:
        by_hand.assert_same(expected, by_hand.parallel_by_fleet(vec, 20, 3, min_slots=1))


@pytest.mark.parametrize("make", TURNS)
@pytest.mark.parametrize("where", QUICK)
def test_turns_are_those_of_a_loop(where, make):
    expected = by_hand.turns_by_hand(make, 3, 60, 0)
    with AECVecEnv([make] * 3, **where) as vec:
        by_hand.assert_same(expected, by_hand.turns_by_fleet(vec, 60, 0))
    assert any(step["ended"] for steps in expected for step in steps)


@pytest.mark.parametrize("make", [TURNS[0], TURNS[5]])
@pytest.mark.parametrize("where", QUICK)
def test_turns_come_first_ready(where, make):
    expected = by_hand.turns_by_hand(make, 4, 30, 3)
    with AECVecEnv([make] * 4, **where) as vec:
        by_hand.assert_same(expected, by_hand.turns_by_fleet(vec, 30, 3, min_slots=1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    make=st.sampled_from([connect_four_v3.env, tictactoe_v3.env]),
    seed=st.integers(0, 2**31 - 1),
    legal_rate=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_illegal_moves_end_games_as_with_the_wrappers(make, seed, legal_rate):
    """The loop goes through PettingZoo's wrappers, the fleet past them."""
    expected = by_hand.turns_by_hand(make, 2, 40, seed, legal_rate)
    with AECVecEnv([make] * 2, backend="serial") as vec:
        by_hand.assert_same(expected, by_hand.turns_by_fleet(vec, 40, seed, legal_rate))


def test_illegal_moves_are_among_those_that_are_tried():
    steps = by_hand.turns_by_hand(connect_four_v3.env, 2, 40, 0, 0.0)
    brought = [one for slot in steps for step in slot for one in step["brought"].values()]
    assert (-1.0, True, True) in brought
    assert (0.0, True, True) in brought


@pytest.mark.parametrize("where", QUICK)
def test_groups_have_one_batch_each(where):
    make = functools.partial(DyingAgentsParallel, boxes(), has_masks=False)
    with AsyncPettingZooVecEnv([GridWorldEnvParallel] * 3, by_group=True, **where) as vec:
        assert vec.groups == {"agent": ("agent_1", "agent_2")}
        obs, _ = vec.reset(seed=0)
        assert obs["agent"]["agent"].shape[:2] == (3, 2)
        _, rewards, *_ = vec.step({"agent": np.ones((3, 2), np.int64)})
        with AsyncPettingZooVecEnv([GridWorldEnvParallel] * 3, **where) as by_agent:
            by_agent.reset(seed=0)
            _, single, *_ = by_agent.step({name: np.ones(3, np.int64) for name in vec.agents})
        assert rewards["agent"].T.tolist() == [single[name].tolist() for name in vec.agents]
    with AsyncPettingZooVecEnv([make] * 2, **where) as vec:  # different spaces are no group
        assert vec.groups == {"wolf_0": ("wolf_0",), "wolf_1": ("wolf_1",)}
