"""The short ways through a host: rewards to their slots, and generators looked up in idle time.

The hosts of most tests are made by hand, over plain memory.
"""

import math
import warnings
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

import envfleet
from envfleet.engine import Fleet, ResetPlan, rng, snapshot
from envfleet.engine.host import EnvHost, Guard, SlotState
from envfleet.engine.infos import SchemaRegistry
from envfleet.engine.memory import Control, ControlPlan, Data, group_spaces
from envfleet.engine.snapshot import Replay, Snapshot
from envfleet.testing import Counter, NoisyStream
from tests.faults.stage import Resident, Troubled, kill_and_wait

FIRST, AFTER = 2, 3
"""Slots of others before and after a host's own."""
UNTOUCHED = -77.0


class Paid(Counter):
    """Pays what it was told to."""

    wage: Any = 0.0

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, self.wage, terminated, truncated, info


def hosted(env_fns, autoreset="next_step"):
    """A host that has been reset, and the control part that it shares with a parent."""
    envs = [env_fn() for env_fn in env_fns]
    num_slots = FIRST + len(envs) + AFTER
    plan = ControlPlan.of([(0, num_slots)])
    control = Control(plan, bytearray(plan.nbytes))
    space_groups = group_spaces([(envs[0].observation_space, envs[0].action_space)] * num_slots)
    data = Data(space_groups, bytearray(Data.measure(space_groups)))
    host = EnvHost(FIRST, envs, env_fns, autoreset, Guard(), SchemaRegistry())
    host.bind(control, data, control.status[0])
    host.reset(None, [ResetPlan(seed) for seed in range(len(envs))])
    control.rewards[:] = UNTOUCHED
    return host, control, envs


# ---- rewards ------------------------------------------------------------------------------------


def what_it_is_worth(wage):
    """A reward as a plain loop would take it: one number, or None."""
    if wage is None or isinstance(wage, str) or wage is TOO_LARGE:
        return None
    wage = np.asarray(wage)
    return float(wage.reshape(())) if wage.size == 1 else None


def same_number(left, right):
    return left == right or (math.isnan(left) and math.isnan(right))


TOO_LARGE = 10**400
NO_WAGES = [None, "x", np.array([1.0, 2.0]), np.zeros(0), [1, 2]]
WAGES = [
    *[3, -(2**40), 0.1, True, math.nan, math.inf, -math.inf, -0.0, np.float16(1.5)],
    *[np.float32(0.1), np.float64(0.1), np.int8(-3), np.uint64(2**63), np.True_, np.float64("nan")],
    *[np.array(0.1), np.array(0.1, np.float32), np.array(7), np.array([2.5]), np.array([[True]])],
]


@pytest.mark.parametrize("is_warned", [True, False], ids=["warned", "not warned"])
@pytest.mark.parametrize(
    "wage",
    [*WAGES, *NO_WAGES, pytest.param(TOO_LARGE, id="10**400")],
    ids=repr,
)
def test_a_reward_is_one_number_or_a_failure_of_its_slot(wage, is_warned):
    """Numpy warns of arrays of one, and a warning may be an error."""
    host, control, envs = hosted([Paid] * 3)
    for env, one in zip(envs, (0.25, wage, 0.75), strict=True):
        env.wage = one
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_warned else "ignore")
        reply = host.step(None, None)
    expected = what_it_is_worth(wage)
    before, found, after = control.rewards[FIRST : FIRST + 3].tolist()
    assert (before, after) == (0.25, 0.75)
    if expected is not None:
        assert reply is None
        assert same_number(found, expected)
        assert math.copysign(1, found) == math.copysign(1, expected)
        return
    assert found == 0.0
    assert reply is not None
    (failure,) = reply.failures
    assert (failure.slot, failure.doing) == (FIRST + 1, "step")
    assert "the reward must be one number" in failure.reason


@given(
    st.permutations(range(5)),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.sampled_from([*WAGES, *NO_WAGES[:3]]), min_size=5, max_size=5),
)
def test_rewards_land_in_the_slots_that_were_paid(order, count, is_whole, wages):
    host, control, envs = hosted([Paid] * 5)
    rows = range(5) if is_whole else order[:count]
    expected = [UNTOUCHED] * len(control.rewards)
    failed = []
    for row, wage in zip(rows, wages, strict=False):
        envs[row].wage = wage
        worth = what_it_is_worth(wage)
        expected[FIRST + row] = 0.0 if worth is None else worth
        if worth is None:
            failed.append(FIRST + row)
    reply = host.step(None if is_whole else [FIRST + row for row in rows], None)
    assert all(map(same_number, control.rewards.tolist(), expected)), control.rewards
    assert [failure.slot for failure in reply.failures] == failed if reply else not failed


@given(st.permutations(range(5)), st.integers(1, 5))
def test_what_is_special_about_a_row_is_told_of_that_row(order, count):
    """Ends and resets among plain steps, with slots in any order."""
    host, control, envs = hosted([Counter] * 5)
    for row in (1, 3):
        envs[row].length = 1
    envs[4].limit = 1
    expected = control.flags.copy()
    for is_over in (False, True, False):  # some end, those are reset, they end again
        for row in order[:count]:
            is_short, is_limited = row in (1, 3), row == 4
            is_reset = is_over and (is_short or is_limited)
            expected[:, FIRST + row] = is_short > is_over, is_limited > is_over, is_reset
        host.step([FIRST + row for row in order[:count]], None)
        assert control.flags.tolist() == expected.tolist()


# ---- methods that environments replace ----------------------------------------------------------


class Lazy(gymnasium.Env):
    """Gives itself another `step` in its first step and another `reset` in its first reset."""

    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.reset = self.later_reset  # type: ignore[method-assign]
        return np.zeros(1, np.float32), {}

    def later_reset(self, *, seed=None, options=None):
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.step = self.second  # type: ignore[method-assign]
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def second(self, action):
        self.step = self.third  # type: ignore[method-assign]
        return np.zeros(1, np.float32), 2.0, True, False, {}

    def third(self, action):
        return np.zeros(1, np.float32), 3.0, False, False, {}


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "in a wrapper"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_a_method_that_an_environment_replaces_is_replaced(backend, mode, wrapped):
    def make():
        return gymnasium.wrappers.TimeLimit(Lazy(), 99) if wrapped else Lazy()

    def seen(envs):
        obs, _ = envs.reset(seed=0)
        steps = [envs.step(np.zeros(2, np.int64))[:3] for _ in range(5)]
        envs.close()
        return obs.tolist(), [[part.tolist() for part in step] for step in steps]

    expected = seen(SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode[mode.upper()]))
    rewards = [step[1] for step in expected[1]]
    assert rewards[:2] == [[1, 1], [2, 2]]
    assert seen(envfleet.make_vec(make, 2, backend=backend, autoreset=mode)) == expected


def test_a_method_that_a_native_environment_replaces_is_replaced():
    class Replacing(SyncVectorEnv):
        def __init__(self, count):
            super().__init__([Counter] * count)

        def reset(self, **arguments):
            self.step = self.first_step  # type: ignore[method-assign]
            return super().reset(**arguments)

        def first_step(self, actions):
            del self.step
            obs, rewards, *rest = self.step(actions)
            return obs, rewards + 10, *rest

    expected, zeros = Replacing(2), np.zeros(2, np.int64)
    with closing(expected), closing(envfleet.make_vec(envfleet.native(Replacing), 2)) as envs:
        expected.reset(seed=0)
        envs.reset(seed=0)
        for _ in range(3):
            assert envs.step(zeros)[1].tolist() == expected.step(zeros)[1].tolist()


# ---- where the next episode starts --------------------------------------------------------------


class Drawing(NoisyStream):
    """Ends after one step, so that every second step is an autoreset; can be stirred from afar."""

    def __init__(self):
        super().__init__(max_length=1)

    def stir(self):
        self.np_random.random(3)

    @property
    def stirred(self):
        return 0

    @stirred.setter
    def stirred(self, times):
        self.np_random.random(times)


def start_of(control, row=0):
    return control.rng[FIRST + row].tobytes()


def stir(host, how):
    if how == "call":
        host.call([FIRST], "stir", (), {})
    elif how == "set_attr":
        host.set_attr([FIRST], [("stirred", 5)])
    elif how == "restore":
        other = Drawing()
        other.reset(seed=99)
        taken = snapshot.take(other)
        assert isinstance(taken, snapshot.Pickled)
        host.restore([FIRST], [Snapshot(taken, np.zeros(3), SlotState.ENDED, ())])


@pytest.mark.parametrize("how", ["nothing", "call", "set_attr", "restore"])
def test_looking_ahead_records_what_looking_at_the_reset_would(how):
    starts = []
    for looks_ahead in (True, False):
        host, control, _ = hosted([Drawing] * 2)
        host.step(None, None)
        before = start_of(control)
        if looks_ahead:
            host.idle()
        assert start_of(control) == before, "the running episode's own start is still needed"
        stir(host, how)
        if looks_ahead:
            host.idle()
        expected = [rng.state_of(env) for env in host._envs]
        host.step(None, None)
        assert [start_of(control, row) for row in (0, 1)] == expected
        starts.append(expected)
    assert starts[0] == starts[1]


def test_what_was_looked_up_is_used(monkeypatch):
    host, control, _ = hosted([Drawing] * 2)
    host.step(None, None)
    host.idle()
    monkeypatch.setattr(rng, "keep", lambda env, cell: pytest.fail("looked up again"))
    host.step([FIRST], None)
    assert rng.unpacked(start_of(control)) is not None


def test_each_episode_has_its_own_start():
    host, control, envs = hosted([Drawing])
    seen = set()
    for _ in range(4):
        host.step(None, None)
        host.idle()
        expected = rng.state_of(envs[0])
        host.step(None, None)
        host.idle()
        assert start_of(control) == expected
        seen.add(expected)
    assert len(seen) == 4


def test_a_start_that_was_looked_up_is_forgotten_with_a_manual_reset():
    host, control, envs = hosted([Drawing])
    host.step(None, None)
    host.idle()
    host.reset(None, [ResetPlan(5)])
    assert start_of(control) == rng.SEED_SAYS_ALL
    host.step(None, None)
    expected = rng.state_of(envs[0])
    host.step(None, None)
    assert start_of(control) == expected


def test_a_planned_seed_says_more_than_what_was_looked_up():
    host, control, _ = hosted([Drawing])
    host.step(None, None)
    host.queue([FIRST], [ResetPlan(8)])
    host.idle()
    host.step(None, None)
    assert start_of(control) == rng.SEED_SAYS_ALL


def test_an_environment_that_has_no_generator_to_look_at_is_left_alone():
    class Shy(Counter):
        @property
        def np_random(self):
            raise RuntimeError("not before the next reset")

        @np_random.setter
        def np_random(self, generator):
            pass

    host, _, _ = hosted([lambda: Shy(length=1)])
    host.step(None, None)
    host.idle()
    reply = host.step(None, None)
    assert reply is not None
    assert [failure.doing for failure in reply.failures] == ["reset"]


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_nothing_is_looked_up_where_no_autoreset_is_due(mode, monkeypatch):
    host, _, _ = hosted([Drawing], mode)
    host.step(None, None)
    monkeypatch.setattr(rng, "keep", lambda env, cell: pytest.fail("no reset is due"))
    host.idle()


# ---- through real workers -----------------------------------------------------------------------


class Roaming(Troubled):
    """Its start, its steps and its length are drawn."""

    def stir(self):
        self.np_random.random(3)


@pytest.mark.parametrize("is_stirred", [False, True], ids=["left alone", "called between"])
def test_a_killed_worker_s_unseeded_episode_can_be_driven_again(is_stirred):
    """What was observed since an autoreset comes again from what the incident holds."""
    fleet = Fleet([Roaming] * 2, num_workers=2, on_failure="restart")
    generator = np.random.default_rng(1)
    with closing(fleet):
        fleet.reset([ResetPlan(3), ResetPlan(4)])
        episodes: list[list[Any]] = [[], []]
        num_began, ended = [0, 0], np.zeros(2, np.bool_)
        while min(num_began) < 3 or min(map(len, episodes)) < 2 or ended.any():
            fleet.send(generator.uniform(-1, 1, (2, 2)).astype(np.float32))
            batch = fleet.recv()
            for slot in (0, 1):
                if not batch.valid[slot]:
                    episodes[slot] = []
                    num_began[slot] += 1
                episodes[slot].append(batch.obs[slot])
            ended = batch.terminated | batch.truncated
            if is_stirred and ended.any():
                fleet.call("stir", slots=np.flatnonzero(ended).tolist())
        for pid in fleet.call("pid"):
            kill_and_wait(pid)
        fleet.send(np.zeros((2, 2), np.float32))
        batch = fleet.recv()
        incidents = sorted(fleet.incidents, key=lambda incident: incident.slot)
    assert batch.truncated.tolist() == [True, True]
    assert [(one.slot, one.kind, one.seed) for one in incidents] == [
        (0, "death", None),
        (1, "death", None),
    ]
    for incident, seen in zip(incidents, episodes, strict=True):
        assert len(incident.actions) == len(seen)  # the last one was not taken any more
        env = Roaming()
        obs, _ = snapshot.begin(env, Replay(None, incident.options, incident.rng, ()))
        again = [obs, *(env.step(action)[0] for action in incident.actions[:-1])]
        assert np.array_equal(again, seen)
        assert incident.replay().steps == len(incident.actions)


def test_a_slot_that_fails_while_nobody_waits_for_it_does_not_spoil_its_neighbour():
    class Weak(Resident):
        def step(self, action):
            if self.t == 1:
                raise ValueError("too weak for a second step")
            return super().step(action)

    for on_failure in ("raise", "restart"):
        with closing(Fleet([Resident, Weak], on_failure=on_failure)) as fleet:
            fleet.reset([ResetPlan(0), ResetPlan(1)])
            for expected in (1, 2):
                fleet.send(np.zeros(2, np.int64))
                fleet.drop([1])
                batch = fleet.recv()
                assert (batch.slots.tolist(), batch.rewards.tolist()) == ([0], [expected])
            assert [incident.slot for incident in fleet.incidents] == [1]
