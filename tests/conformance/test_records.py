"""Slots whose observations and actions are records with an agent axis."""

import functools
import threading
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envfleet
from envfleet.engine import Fleet, ResetPlan
from envfleet.errors import ActionError, EnvFailed
from envfleet.layout import RecordSpace
from envfleet.testing import (
    FleetConformance,
    Streams,
    first_difference,
    fleet_driven,
    hand_driven,
)
from envfleet.testing.streams import slot_actions
from envfleet.testing.values import snapshot as copied
from envfleet.testing.values import value_difference
from tests.conformance.matrix import BY_RAY, EVERY, FORK, MODES, QUICK, SERIAL, THREAD, opened

FORMS = ("array", "scalar", "new")


class Skirmish(gymnasium.Env[Any, Any]):
    """Agents that act in turns, earn at random and die; every record differs from the one before.

    `form` says what it returns: one array that it fills again and again, a scalar that is a view
    of such an array, or a new array each time.
    """

    def __init__(self, num_agents: int = 3, form: str = "array") -> None:
        self.num_agents, self.form = num_agents, form
        shape = (num_agents,)
        self.observation_space: Any = RecordSpace(
            {
                "observation": Box(-np.inf, np.inf, (num_agents, 2)),
                "reward": Box(-np.inf, np.inf, shape, np.float64),
                "terminated": Box(0, 1, shape, np.bool_),
                "alive": MultiBinary(num_agents),
                "mask": Box(0, 1, (num_agents, 4), np.int8),
                "turn": Discrete(num_agents),
            }
        )
        self.action_space = RecordSpace(
            {"move": MultiDiscrete([4] * num_agents), "force": Box(-1, 1, (num_agents, 2))}
        )
        self.records = np.zeros(2, self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(1, 6))
        return self.record(np.zeros(self.num_agents)), {}

    def step(self, action):
        self.t += 1
        rewards = action["force"].sum(axis=1) + action["move"]
        is_over = self.t >= self.length
        return self.record(rewards), float(rewards.sum()), is_over, False, {}

    def record(self, rewards):
        record = self.records[1, ...] if self.form != "new" else self.observation_space.zeros()
        record["observation"] = self.np_random.normal(size=(self.num_agents, 2))
        record["reward"] = rewards
        record["terminated"] = self.t >= self.length
        record["alive"] = self.np_random.integers(0, 2, self.num_agents)
        record["mask"] = self.np_random.integers(0, 2, (self.num_agents, 4))
        record["turn"] = self.t % self.num_agents
        return self.records[1] if self.form == "scalar" else record


class OnlyReplays(Skirmish):
    """Cannot be pickled, and leaves anything in the bytes between the fields."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def record(self, rewards):
        record = np.empty((), self.observation_space.dtype)
        junk = np.random.default_rng().integers(0, 256, record.itemsize, np.uint8)
        record.reshape(1).view(np.uint8)[:] = junk
        record[()] = super().record(rewards)
        return record


class OtherFields(Skirmish):
    """Returns records of the right size whose fields are in another order."""

    def __init__(self, is_scalar=False):
        super().__init__()
        self.is_scalar = is_scalar
        self.observation_space = RecordSpace({"x": Box(-9, 9, (2,)), "y": Box(-9, 9, (2,))})

    def record(self, rewards):
        swapped = np.zeros((), [("y", "f4", 2), ("x", "f4", 2)])
        return swapped[()] if self.is_scalar else swapped


def assert_same_streams(expected: Streams, got: Streams) -> None:
    difference = first_difference(expected, got)
    assert difference is None, str(difference)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", [*EVERY, *BY_RAY])
def test_every_backend_gives_the_records_of_a_loop_by_hand(where, mode):
    expected = hand_driven(Skirmish, 3, 25, 0, mode)
    assert_same_streams(expected, fleet_driven(Skirmish, 3, 25, 0, mode, **where))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", QUICK)
def test_records_come_first_ready_as_well(where, mode):
    expected = hand_driven(Skirmish, 4, 20, 0, mode)
    assert_same_streams(expected, fleet_driven(Skirmish, 4, 20, 0, mode, min_slots=1, **where))


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    num_agents=st.integers(1, 5),
    form=st.sampled_from(FORMS),
    num_envs=st.integers(2, 5),
    mode=st.sampled_from(MODES),
    where=st.sampled_from([SERIAL, THREAD, FORK]),
    copy=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_record_in_any_form_equals_a_loop_by_hand(
    num_agents, form, num_envs, mode, where, copy, seed
):
    env = functools.partial(Skirmish, num_agents, form)
    expected = hand_driven(env, num_envs, 15, seed, mode)
    assert_same_streams(expected, fleet_driven(env, num_envs, 15, seed, mode, copy=copy, **where))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("where", QUICK)
def test_the_final_record_is_the_one_before_the_reset(where, copy, form):
    """The row of an ended episode shows the first record of the next; `final_obs` the last."""
    with opened(
        functools.partial(Skirmish, 3, form), 3, autoreset="same_step", copy=copy, **where
    ) as envs:
        envs.reset(seed=0)
        num_ends = 0
        for _ in range(12):
            actions = envs.action_space.sample()
            envs.send(actions)
            batch = envs.recv()
            expected = actions["force"].sum(axis=2) + actions["move"]
            ended = batch.terminated
            assert (batch.final_obs["reward"] == expected).all()
            assert (batch.final_obs["terminated"] == ended[:, None]).all()
            assert (batch.rewards == batch.final_obs["reward"].sum(axis=1)).all()
            assert not batch.obs["reward"][ended].any()
            assert not batch.obs["terminated"].any()
            for slot in np.flatnonzero(ended):
                final = batch.infos["final_obs"][slot]
                assert (final["reward"] == expected[slot]).all()
                assert final in envs.single_observation_space
            num_ends += ended.sum()
        assert num_ends >= 3


@pytest.mark.parametrize("where", QUICK)
def test_views_are_fields_of_shared_memory(where):
    with opened(Skirmish, 3, copy=False, **where) as envs:
        first, _ = envs.reset(seed=0)
        rewards = first["reward"]
        second, *_ = envs.step(envs.action_space.sample())
        assert np.shares_memory(rewards, second)
        assert rewards.tolist() == second["reward"].tolist()
        assert (second["observation"].shape, second["turn"].tolist()) == ((3, 3, 2), [1] * 3)


@pytest.mark.parametrize("where", QUICK)
def test_copies_stay_as_they_were(where):
    with opened(Skirmish, 3, **where) as envs:
        first, _ = envs.reset(seed=0)
        as_it_was = copied(first)
        first["turn"] += 1
        second, *_ = envs.step(envs.action_space.sample())
        assert second["turn"].tolist() == [1] * 3
        first["turn"] -= 1
        assert value_difference(as_it_was, first) is None


def by_hand(env, seed, actions):
    """The records and rewards of one environment until its first end, and its first reset."""
    seen = [copied(env.reset(seed=seed)[0])]
    for action in actions:
        obs, reward, is_over, _, _ = env.step(action)
        seen.append((copied(obs), reward, is_over))
        if is_over:
            break
    seen.append(copied(env.reset()[0]))
    return seen


@pytest.mark.parametrize("where", QUICK)
def test_slots_may_hold_different_records(where):
    envs = [functools.partial(Skirmish, count) for count in (1, 2, 3, 2)]
    with closing(Fleet(envs, autoreset="same_step", **{"num_workers": 1, **where})) as fleet:
        first = fleet.reset([ResetPlan(seed=slot) for slot in range(4)]).obs
        actions = [
            [next(source) for _ in range(6)]
            for source in (
                slot_actions(facts.action_space, slot) for slot, facts in enumerate(fleet.facts)
            )
        ]
        expected = [by_hand(env(), slot, actions[slot]) for slot, env in enumerate(envs)]
        for slot in range(4):
            assert value_difference(expected[slot][0], first[slot]) is None
        running = set(range(4))
        for t in range(6):
            batch = fleet.step([actions[slot][t] for slot in range(4)])
            for slot in sorted(running):
                record, reward, is_over = expected[slot][t + 1]
                assert value_difference(record, batch.final_obs[slot]) is None
                assert (batch.rewards[slot], batch.terminated[slot]) == (reward, is_over)
                after = expected[slot][-1] if is_over else record
                assert value_difference(after, batch.obs[slot]) is None
                if is_over:
                    running.remove(slot)
        assert not running


@pytest.mark.parametrize("env", [Skirmish, OnlyReplays], ids=["pickle", "replay"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("where", QUICK)
def test_the_stream_goes_on_after_a_restore(where, mode, env):
    with opened(env, 3, autoreset=mode, **where) as envs:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        actions = [envs.action_space.sample() for _ in range(20)]
        for one in actions[:5]:
            envs.step(one)
        taken = envs.snapshot()
        assert {one.method for one in taken} == {"replay" if env is OnlyReplays else "pickle"}
        expected = [copied(envs.step(one)[:4]) for one in actions[5:]]
        envs.restore(taken)
        got = [copied(envs.step(one)[:4]) for one in actions[5:]]
        found = value_difference(expected, got)
        assert found is None, found


@pytest.mark.parametrize("is_scalar", [False, True], ids=["array", "scalar"])
@pytest.mark.parametrize("where", QUICK)
def test_a_record_with_fields_in_another_order_is_refused(where, is_scalar):
    """It is as large as the right one: copied as bytes, x would be y."""
    with (
        opened(functools.partial(OtherFields, is_scalar), 2, **where) as envs,
        pytest.raises(EnvFailed, match="observation"),
    ):
        envs.reset(seed=0)


@pytest.mark.parametrize("where", QUICK)
def test_a_step_that_returns_other_fields_is_refused(where):
    class TurnsBad(OtherFields):
        def record(self, rewards):
            return self.observation_space.zeros() if self.t == 0 else super().record(rewards)

    with opened(TurnsBad, 2, **where) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvFailed, match="observation"):
            envs.step(envs.action_space.sample())


@pytest.mark.parametrize("where", QUICK)
def test_actions_of_another_record_are_refused(where):
    with opened(Skirmish, 2, **where) as envs:
        envs.reset(seed=0)
        right = envs.action_space.sample()
        wrong = np.zeros(2, [("force", "f4", (3, 2)), ("move", "i8", 3)])
        for actions in (wrong, right[:1], right["move"], None):
            with pytest.raises(ActionError, match="do not fit the action space"):
                envs.step(actions)
        envs.step(list(right))  # records one by one are as good


def test_a_lost_slot_shows_its_last_record():
    """on_failure="restart": the truncated row repeats the record that was seen before."""

    class DiesOnce(Skirmish):
        def step(self, action):
            if action["move"][0] == 3:
                raise RuntimeError("died")
            return super().step(action)

    with opened(DiesOnce, 2, autoreset="same_step", on_failure="restart", **FORK) as envs:
        before, _ = envs.reset(seed=0)
        actions = envs.action_space.sample()
        actions["move"] = 3
        envs.send(actions)
        batch = envs.recv()
        assert batch.truncated.all()
        assert value_difference(before, batch.final_obs) is None


def test_gymnasium_s_own_vector_environment_gives_the_same():
    sync = gymnasium.vector.SyncVectorEnv([Skirmish] * 3)
    with opened(Skirmish, 3, **FORK) as envs, closing(sync):
        assert envs.observation_space == sync.observation_space
        found = value_difference(sync.reset(seed=0)[0], envs.reset(seed=0)[0])
        assert found is None, found
        envs.action_space.seed(0)
        for _ in range(15):
            actions = envs.action_space.sample()
            expected, got = sync.step(actions), envs.step(actions)
            found = value_difference(expected[:4], got[:4])
            assert found is None, found


class TestSkirmish(FleetConformance):
    def make_env(self):
        return Skirmish()


def test_the_fleet_chooses_by_itself_for_records():
    with closing(envfleet.make_vec(Skirmish, 2, backend="auto")) as envs:
        obs, _ = envs.reset(seed=0)
        assert obs["alive"].shape == (2, 3)
