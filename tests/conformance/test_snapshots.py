"""Snapshot and restore: after a restore the stream is what it would have been without it."""

import functools
import itertools
import os
import signal
import threading
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv

from envfleet.errors import EnvfleetError, SnapshotError
from envfleet.testing import AnySpace, Counter, NoisyStream, TaskCounter
from envfleet.testing.streams import slot_actions
from envfleet.testing.values import snapshot as copied
from envfleet.testing.values import value_difference
from tests.conformance.matrix import EVERY, FORK, MODES, QUICK, SERIAL, opened


class HasStateMethods(NoisyStream):
    """Offers its own pair of methods."""

    def get_state(self):
        return {"t": self.t, "length": self.length}

    def set_state(self, state):
        self.t, self.length = state["t"], state["length"]


class GivesAwayItsState(NoisyStream):
    """Its state methods return and take the object that it changes later."""

    def __init__(self):
        super().__init__()
        self.inside: dict[str, Any] = {"array": np.zeros(2)}

    def reset(self, *, seed=None, options=None):
        answer = super().reset(seed=seed, options=options)
        self.inside["array"][:] = 0
        return answer

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        self.inside["array"] += 1
        return obs, float(self.inside["array"].sum()), terminated, truncated, info

    def get_state(self):
        self.inside |= {"t": self.t, "length": self.length}
        return self.inside

    def set_state(self, state):
        self.inside, self.t, self.length = state, state["t"], state["length"]


class ChangesItsActions(NoisyStream):
    """Adds up its actions in place, and can only be replayed."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def reset(self, *, seed=None, options=None):
        self.sum = 0.0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        action += 1
        self.sum += float(action[0])
        obs, _, terminated, truncated, info = super().step(action)
        return obs, self.sum, terminated, truncated, info


class CannotBePickled(NoisyStream):
    """Holds a lock, so it can only be replayed."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class DoesNotRepeatItself(CannotBePickled):
    """Its observation does not depend on its seed."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + next(NUMBERS), *rest


NUMBERS = itertools.count()


POSITIONS: dict[int, int] = {}


class LeavesItsStateOutside(NoisyStream):
    """Knows its simulator by a number, as those of PyBullet do; its pickle is without it."""

    def __init__(self):
        super().__init__()
        self.number = next(NUMBERS)

    def reset(self, *, seed=None, options=None):
        POSITIONS[self.number] = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        POSITIONS[self.number] += 1
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(POSITIONS[self.number]), terminated, truncated, info

    def close(self):
        POSITIONS.pop(self.number, None)


class LosesItsConnection(NoisyStream):
    """Its pickle loads, and cannot go on."""

    def __init__(self):
        super().__init__(max_length=1)
        self.connection = True

    def __getstate__(self):
        return {**self.__dict__, "connection": False}

    def reset(self, *, seed=None, options=None):
        assert self.connection, "not connected"
        return super().reset(seed=seed, options=options)


class LosesWhatComesLater(NoisyStream):
    """Its pickle goes on as it does, up to a step that reads what is not in it."""

    def __init__(self):
        super().__init__(max_length=40)
        self.later = 1.0

    def __getstate__(self):
        return {**self.__dict__, "later": 0.0}

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, self.later if self.t % 5 == 0 else reward, *rest


class Emulator:
    """As much of ale-py as is asked: its state leaves out the action that is in effect."""

    def __init__(self):
        self.lock = threading.Lock()
        self.generator = np.random.default_rng()
        self.effect = 0

    def begin(self):
        self.place = self.effect = self.frame = 0
        self.length = 5 + int(self.generator.integers(5))

    def getFloat(self, name):
        assert name == "repeat_action_probability"
        return 0.5

    def getLegalActionSet(self):
        return [0, 1, 2]

    def act(self, action):
        if self.generator.random() >= 0.5:
            self.effect = action
        self.frame += 1
        self.place = min(max(self.place + self.effect - 1, 0), 3)  # ways part and meet again
        return self.place

    def cloneState(self, *, include_rng):
        generator = self.generator.bit_generator.state if include_rng else None
        return self.place, self.frame, self.length, generator

    def restoreState(self, state):
        self.place, self.frame, self.length, generator = state
        if generator is not None:
            self.generator.bit_generator.state = generator


class RepeatsActions(gymnasium.Env):
    """Is seeded as Atari is: by a reset with a seed, and by no other."""

    observation_space = spaces.Box(0, 3, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, *, continuous=False):
        self.ale, self.continuous = Emulator(), continuous

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.ale.generator = np.random.default_rng(seed)
        self.ale.begin()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        place = self.ale.act(action)
        is_over = self.ale.frame >= self.ale.length
        return np.full(1, place, np.float32), float(place), is_over, False, {}

    def clone_state(self, include_rng=False):
        return self.ale.cloneState(include_rng=include_rng)

    def restore_state(self, state):
        self.ale.restoreState(state)


class HasNoSampleOrder(AnySpace):
    def __init__(self):
        super().__init__(
            spaces.Dict(text=spaces.Text(9), graph=spaces.Graph(spaces.Discrete(3), None))
        )


class KeepsAList(InvertedPendulumEnv):
    """A MuJoCo environment with state outside MuJoCo."""

    def reset_model(self):
        self.visited = []
        return super().reset_model()

    def step(self, action):
        obs, _, _, truncated, info = super().step(action)
        self.visited.append(1)
        return obs, float(len(self.visited)), len(self.visited) == 12, truncated, info


class DrawsItsModel(InvertedPendulumEnv):
    """A MuJoCo environment with other masses and gravity in each episode."""

    def reset_model(self):
        self.model.body_mass[1:] = self.np_random.uniform(1, 5, len(self.model.body_mass) - 1)
        self.model.opt.gravity[2] = -self.np_random.uniform(5, 15)
        self.model.opt.timestep = self.np_random.uniform(0.01, 0.03)
        return super().reset_model()


class HoldsAGenerator(gymnasium.Wrapper):
    """Its state cannot be saved."""

    def reset(self, *, seed=None, options=None):
        self.numbers = (number for number in range(99))
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(next(self.numbers)), terminated, truncated, info


WRAPPERS = {
    "stack": functools.partial(wrappers.FrameStackObservation, stack_size=3),
    "observation": wrappers.NormalizeObservation,
    "reward": wrappers.NormalizeReward,
    "delay": functools.partial(wrappers.DelayObservation, delay=2),
    "statistics": wrappers.RecordEpisodeStatistics,
    "function": functools.partial(wrappers.TransformReward, func=lambda reward: float(reward) / 2),
}


def wrapped(wrapper, env):
    return wrapper(HasStateMethods() if env == "own" else gymnasium.make("InvertedPendulum-v5"))


METHODS = {
    "own": HasStateMethods,
    "pickle": NoisyStream,
    "replay": CannotBePickled,
    "mujoco": "InvertedPendulum-v5",
}


def go_on(envs, sources, num_steps):
    """Step with the next actions and record the results of each slot."""
    seen = []
    for _ in range(num_steps):
        actions = np.stack([next(source) for source in sources])
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        seen.append(copied((obs, rewards, terminated, truncated)))
        if envs.metadata["autoreset_mode"].name == "DISABLED" and (terminated | truncated).any():
            obs, _ = envs.reset(options={"reset_mask": terminated | truncated})
            seen.append(copied(obs))
    return seen


def actions_for(envs, skip=0):
    sources = [slot_actions(envs.single_action_space, slot) for slot in range(envs.num_envs)]
    for source in sources:
        for _ in range(skip):
            next(source)
    return sources


def assert_same(expected, got):
    found = value_difference(expected, got)
    assert found is None, found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", QUICK)
def test_the_stream_after_a_restore_is_the_uninterrupted_one(where, mode, method):
    with opened(METHODS[method], 3, autoreset=mode, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 9)
        taken = envs.snapshot()
        assert {one.method for one in taken} == {method}
        expected = go_on(envs, actions_for(envs, skip=9), 30)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=9), 30))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("method", ["own", "mujoco"])
@pytest.mark.parametrize("where", [SERIAL, FORK], ids=["serial", "fork"])
def test_what_wrappers_hold_is_part_of_the_state(where, method, wrapper):
    with opened(functools.partial(wrapped, WRAPPERS[wrapper], method), 2, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 9)
        taken = envs.snapshot()
        assert {one.method for one in taken} == {method}
        expected = go_on(envs, actions_for(envs, skip=9), 10)
        for _ in range(2):
            envs.restore(taken)
            assert_same(expected, go_on(envs, actions_for(envs, skip=9), 10))
    with opened(functools.partial(wrapped, WRAPPERS[wrapper], method), 2, **SERIAL) as envs:
        envs.reset(seed=5)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=9), 10))


@pytest.mark.parametrize("env", [KeepsAList, DrawsItsModel])
@pytest.mark.parametrize("where", QUICK)
def test_what_an_environment_of_mujoco_holds_is_part_of_the_state(where, env):
    with opened(env, 2, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 5)
        taken = envs.snapshot()
        expected = go_on(envs, actions_for(envs, skip=5), 20)
        envs.reset(seed=9)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=5), 20))


@pytest.mark.parametrize("env", ["Ant-v5", "InvertedPendulum-v5"])
def test_a_mujoco_without_mj_copy_data_goes_on_equally(monkeypatch, env):
    """It came with 3.5; Ant-v5 has contacts."""
    monkeypatch.delattr(mujoco, "mj_copyData", raising=False)
    with opened(env, 2, **SERIAL) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 15)
        taken = envs.snapshot()
        expected = go_on(envs, actions_for(envs, skip=15), 30)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=15), 30))


@pytest.mark.parametrize("env", [LeavesItsStateOutside, LosesWhatComesLater])
@pytest.mark.parametrize("where", QUICK)
def test_a_pickle_that_is_not_all_of_it_is_replayed(where, env):
    with opened(env, 2, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 9)
        taken = envs.snapshot()
        assert {one.method for one in taken} == {"replay"}
        expected = go_on(envs, actions_for(envs, skip=9), 20)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=9), 20))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", [SERIAL, FORK], ids=["serial", "fork"])
def test_sticky_actions_are_part_of_the_state_in_any_episode(where, mode):
    with (
        opened(RepeatsActions, 4, autoreset=mode, **where) as envs,
        opened(RepeatsActions, 4, autoreset=mode, **SERIAL) as undisturbed,
    ):
        sources = actions_for(envs), actions_for(undisturbed)
        for fleet in (envs, undisturbed):
            fleet.reset(seed=0)
        for number in range(8):
            go_on(envs, sources[0], 5)
            go_on(undisturbed, sources[1], 5)
            taken = envs.snapshot()
            assert {one.method for one in taken} == {"own"}
            if number % 2:  # elsewhere meanwhile; otherwise a snapshot is all that happens
                envs.reset(seed=number)
                go_on(envs, actions_for(envs), number)
                envs.restore(taken)
            assert_same(go_on(undisturbed, sources[1], 6), go_on(envs, sources[0], 6))


def test_actions_with_strengths_are_replayed_in_episodes_with_a_seed():
    with opened(functools.partial(RepeatsActions, continuous=True), 2, **SERIAL) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 3)
        taken = envs.snapshot()
        assert {one.method for one in taken} == {"replay"}
        expected = go_on(envs, actions_for(envs), 1)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs), 1))
        envs.reset()
        go_on(envs, actions_for(envs), 3)
        with pytest.raises(EnvfleetError, match="later episodes cannot be replayed"):
            envs.restore(envs.snapshot())


@pytest.mark.parametrize("where", QUICK)
def test_a_pickle_is_tried_after_the_end_of_an_episode_too(where):
    with opened(LosesItsConnection, 2, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 1)
        taken = envs.snapshot()
        assert {one.method for one in taken} == {"replay"}
        expected = go_on(envs, actions_for(envs, skip=1), 5)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=1), 5))


@pytest.mark.parametrize("env", [DoesNotRepeatItself, CannotBePickled])
@pytest.mark.parametrize("where", QUICK)
def test_a_replay_is_tried_before_it_is_trusted(where, env):
    with opened(env, 2, **where) as envs, opened(env, 2, **SERIAL) as others:
        for fleet in (envs, others):
            fleet.reset(seed=0)
            go_on(fleet, actions_for(fleet), 3)
        repeats = env is CannotBePickled
        assert envs.fleet.rehearse(envs.snapshot()) == [repeats, repeats]
        if repeats:
            expected = go_on(others, actions_for(others, skip=3), 9)
            assert_same(expected, go_on(envs, actions_for(envs, skip=3), 9))


class HoldsMujoco(gymnasium.Env):
    """Is no wrapper, but plays another environment that it has, as a task or a game would."""

    def __init__(self):
        self.simulator = gymnasium.make("Swimmer-v5")
        self.observation_space = self.simulator.observation_space
        self.action_space = self.simulator.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.simulator.reset(seed=seed)

    def step(self, action):
        return self.simulator.step(action)


@pytest.mark.parametrize("where", QUICK)
def test_an_environment_that_holds_another_of_mujoco_is_replayed(where):
    """Pickled, what it holds would come back as it was when it was made."""
    with opened(HoldsMujoco, 2, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 9)
        taken = envs.snapshot()
        assert {one.method for one in taken} == {"replay"}
        expected = go_on(envs, actions_for(envs, skip=9), 10)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=9), 10))


@pytest.mark.parametrize("method", ["own", "mujoco"])
@pytest.mark.parametrize("where", QUICK)
def test_where_a_wrapper_holds_what_cannot_be_kept_all_is_replayed(where, method):
    with opened(functools.partial(wrapped, HoldsAGenerator, method), 2, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 5)
        taken = envs.snapshot()
        assert {one.method for one in taken} == {"replay"}
        expected = go_on(envs, actions_for(envs, skip=5), 20)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=5), 20))


@pytest.mark.parametrize("env", [GivesAwayItsState, ChangesItsActions])
@pytest.mark.parametrize("where", QUICK)
def test_a_snapshot_is_not_changed_by_what_comes_later(where, env):
    with opened(env, 3, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 9)
        taken = envs.snapshot()
        expected = go_on(envs, actions_for(envs, skip=9), 10)
        for _ in range(2):
            envs.restore(taken)
            assert_same(expected, go_on(envs, actions_for(envs, skip=9), 10))


@pytest.mark.parametrize("method", ["own", "pickle", "replay"])
def test_a_snapshot_goes_on_in_another_fleet(method):
    with opened(METHODS[method], 3, **FORK) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 9)
        taken = envs.snapshot()
        expected = go_on(envs, actions_for(envs, skip=9), 20)
    with opened(METHODS[method], 3, **SERIAL) as envs:
        envs.reset(seed=99)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs, skip=9), 20))


@pytest.mark.parametrize("where", EVERY)
def test_a_restore_right_after_a_seeded_reset(where):
    with opened(CannotBePickled, 2, **where) as envs:
        envs.reset(seed=0)
        taken = envs.snapshot()
        expected = go_on(envs, actions_for(envs), 15)
        envs.restore(taken)
        assert_same(expected, go_on(envs, actions_for(envs), 15))


@pytest.mark.parametrize("method", ["own", "pickle", "replay"])
@pytest.mark.parametrize("is_seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("where", QUICK)
def test_a_snapshot_taken_after_a_restore_is_as_good_as_the_first(where, is_seeded, method):
    with opened(METHODS[method], 3, **where) as envs:
        envs.reset(seed=0)
        if not is_seeded:
            envs.reset()
        first = envs.snapshot()
        expected = go_on(envs, actions_for(envs), 20)
        envs.restore(first)
        second = envs.snapshot()
        envs.reset(seed=50)
        envs.restore(second)
        assert_same(expected, go_on(envs, actions_for(envs), 20))


@pytest.mark.parametrize("method", ["own", "pickle", "replay"])
@pytest.mark.parametrize("where", QUICK)
def test_one_slot_goes_back_and_the_others_go_on(where, method):
    with opened(METHODS[method], 3, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 5)
        taken = envs.snapshot(slots=[1])
        assert len(taken) == 1
        first = go_on(envs, actions_for(envs, skip=5), 8)
        envs.restore(taken, slots=[1])
        again = go_on(envs, actions_for(envs, skip=5), 8)
    assert_same([step[0][1] for step in first], [step[0][1] for step in again])
    assert value_difference([s[0][0] for s in first], [s[0][0] for s in again]) is not None


@pytest.mark.parametrize("where", QUICK)
def test_a_slot_may_take_the_state_of_another(where):
    """Branching: two slots continue equally from one state with the same actions."""
    with opened(NoisyStream, 2, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 5)
        envs.restore(envs.snapshot(slots=[0]), slots=[1])
        same = np.zeros((2, 2), np.float32)
        for _ in range(12):
            obs, rewards, terminated, truncated, _ = envs.step(same)
            assert obs[0].tolist() == obs[1].tolist()
            assert rewards[0] == rewards[1]
            assert (terminated[0], truncated[0]) == (terminated[1], truncated[1])


@pytest.mark.parametrize("where", QUICK)
def test_a_pending_autoreset_and_queued_plans_are_part_of_the_state(where):
    zero = np.zeros(2, np.int64)
    with opened(TaskCounter, 2, **where) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(zero)
        envs.queue_reset(options={"task": 8})
        taken = envs.snapshot()
        first, _, _, _, _ = envs.step(zero)
        envs.restore(taken)
        second, _, _, _, _ = envs.step(zero)
    assert first[:, 1].tolist() == [8, 8]
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("where", QUICK)
def test_spilled_observations_are_part_of_the_state(where):
    zero = np.zeros(2, np.int64)
    with opened(HasNoSampleOrder, 2, **where) as envs:
        envs.reset(seed=0)
        envs.step(zero)
        taken = envs.snapshot()
        first = [copied(envs.step(zero)[0]) for _ in range(8)]
        envs.restore(taken)
        second = [copied(envs.step(zero)[0]) for _ in range(8)]
    assert_same(first, second)


@pytest.mark.parametrize("where", QUICK)
def test_a_replay_that_leads_elsewhere_is_refused(where):
    with opened(DoesNotRepeatItself, 2, **where) as envs:
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 1)
        taken = envs.snapshot()
        with pytest.raises(EnvfleetError, match="does not repeat itself"):
            envs.restore(taken)
        envs.reset(seed=0)
        go_on(envs, actions_for(envs), 1)


class OnlyReplayed(Counter):
    """Cannot be pickled, and ends its worker, or raises, at an action of 1."""

    def __init__(self, how):
        super().__init__(length=None)
        self.how, self.lock = how, threading.Lock()

    def step(self, action):
        if action == 1 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 1:
            raise RuntimeError("it was told to raise")
        return super().step(action)


@pytest.mark.parametrize("how", ["kill", "exception"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_snapshot_right_after_a_restart_does_not_repeat_what_failed(mode, how):
    env_fn = functools.partial(OnlyReplayed, how)
    with opened([env_fn, Counter], on_failure="restart", autoreset=mode, **FORK) as envs:
        envs.reset(seed=0)
        envs.step(np.array([0, 0]))
        truncated = envs.step(np.array([1, 0]))[3]
        assert truncated.tolist() == [True, False]
        saved = envs.snapshot([0])
        assert saved[0].method == "replay"
        once = [envs.step(np.array([0, 0]))[0].tolist() for _ in range(3)]
        envs.restore(saved, [0])
        assert len(envs.incidents) == 1
        again = [envs.step(np.array([0, 0]))[0].tolist() for _ in range(3)]
        assert [rows[0] for rows in again] == [rows[0] for rows in once]


class Another(NoisyStream):
    """Another class."""


class AnotherWithStateMethods(HasStateMethods):
    """Another class, with the same methods."""


@pytest.mark.parametrize("where", [SERIAL, FORK], ids=["serial", "fork"])
def test_a_snapshot_of_another_environment_is_refused_and_changes_nothing(where):
    around = functools.partial(wrapped, wrappers.RecordEpisodeStatistics, "own")
    env_fns = [NoisyStream, Another, HasStateMethods, AnotherWithStateMethods, around]
    with opened(env_fns, **where) as envs:

        def episode():
            first = copied(envs.reset(seed=3)[0])
            return first, go_on(envs, actions_for(envs), 3)

        before = episode()
        taken = envs.snapshot()
        for slot, foreign in ((0, 1), (1, 0), (2, 3), (0, 2), (2, 4), (4, 2)):
            with pytest.raises(SnapshotError, match="cannot be restored to a slot that holds"):
                envs.restore([taken[foreign]], slots=[slot])
        assert_same(before, episode())
