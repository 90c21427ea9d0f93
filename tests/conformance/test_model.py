"""Any order of send, recv, reset, queue_reset, call, snapshot and restore, against a plain model.

The model drives one environment per slot by hand and knows what each answer has to be. It shares
nothing with the engine, so any difference between the two is a defect of one of them.
"""

import copy
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import envfleet
from envfleet.testing import NoisyStream
from tests.conformance.matrix import FORK, MODES, SERIAL, THREAD

NUM = 4
SOME_SLOTS = st.lists(st.integers(0, NUM - 1), min_size=1, max_size=NUM, unique=True)
SEEDS = st.one_of(st.none(), st.integers(0, 50))
TASKS = st.one_of(st.none(), st.integers(1, 9))


class Wanderer(NoisyStream):
    """A `NoisyStream` that also depends on its task."""

    def __init__(self):
        super().__init__(max_length=3, size=2)
        self.task = 0

    def reset(self, *, seed=None, options=None):
        self.task = (options or {}).get("task", 0)
        obs, info = super().reset(seed=seed)
        return obs + self.task, {**info, "task": self.task}

    def where(self, offset=0):
        return (self.t + offset, self.task)


class SavesItself(Wanderer):
    """Its snapshots use its own methods."""

    def get_state(self):
        return self.t, self.length, self.task

    def set_state(self, state):
        self.t, self.length, self.task = state


class CannotBePickled(Wanderer):
    """Its snapshots are replays, although the model can copy it."""

    def __reduce_ex__(self, protocol):
        raise TypeError("not for a pickle")

    def __deepcopy__(self, memo):
        twin = CannotBePickled()
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin


class ModelSlot:
    """What one slot does, according to the documentation."""

    def __init__(self, env, mode):
        self.env, self.mode = env, mode
        self.state = "unusable"
        self.queue: deque[Any] = deque()
        self.obs: Any = None

    def reset(self, seed=None, task=None):
        options = None if task is None else {"task": task}
        self.obs, info = self.env.reset(seed=seed, options=options)
        self.state = "running"
        return info

    def autoreset(self):
        return self.reset(*(self.queue.popleft() if self.queue else ()))

    def step(self, action):
        """Return obs, reward, terminated, truncated, valid, final_obs and info."""
        if self.state == "ended":
            info = self.autoreset()
            return self.obs, 0.0, False, False, False, self.obs, info
        self.obs, reward, terminated, truncated, info = self.env.step(action)
        final_obs = self.obs
        if terminated or truncated:
            if self.mode == "same_step":
                info = self.autoreset()
            else:
                self.state = "ended" if self.mode == "next_step" else "unusable"
        return self.obs, reward, terminated, truncated, True, final_obs, info

    def saved(self):
        return copy.deepcopy((self.env, self.state, self.queue, self.obs))

    def put_back(self, saved):
        self.env, self.state, self.queue, self.obs = copy.deepcopy(saved)


class FleetAgainstModel(RuleBasedStateMachine):
    """Which slots are ready depends on timing, so no rule's precondition may depend on it."""

    where = SERIAL
    env: Any = Wanderer
    envs: Any = None
    saved: Any = None

    @initialize(mode=st.sampled_from(MODES), seed=st.integers(0, 99))
    def open(self, mode, seed):
        self.mode = mode
        self.envs = envfleet.make_vec(self.env, NUM, autoreset=mode, **self.where)
        self.model = [ModelSlot(self.env(), mode) for _ in range(NUM)]
        self.expected: dict[int, Any] = {}
        obs, infos = self.envs.reset(seed=seed)
        for slot, model in enumerate(self.model):
            info = model.reset(seed + slot)
            assert infos["length"][slot] == info["length"]
        self.check_observations(obs)

    def teardown(self):
        if self.envs is not None:
            self.envs.close()

    def check_observations(self, obs):
        for slot, model in enumerate(self.model):
            if slot not in self.expected:
                assert obs[slot].tolist() == model.obs.tolist(), f"slot {slot}"

    @rule(slots=SOME_SLOTS, value=st.floats(-1, 1, width=32))
    def send(self, slots, value):
        chosen = [
            slot
            for slot in slots
            if slot not in self.expected and self.model[slot].state != "unusable"
        ]
        if not chosen:
            return
        actions = np.array([[value, slot] for slot in chosen], dtype=np.float32)
        self.envs.send(actions, slots=chosen)
        for slot, action in zip(chosen, actions, strict=True):
            self.expected[slot] = copy.deepcopy(self.model[slot].step(action))

    @rule(min_slots=st.integers(1, NUM))
    def recv(self, min_slots):
        if not self.expected:
            return
        batch = self.envs.recv(min_slots=min_slots)
        slots = batch.slots.tolist()
        assert len(slots) >= min(min_slots, len(self.expected))
        assert len(set(slots)) == len(slots)
        for row, slot in enumerate(slots):
            obs, reward, terminated, truncated, valid, final_obs, info = self.expected.pop(slot)
            assert batch.obs[row].tolist() == obs.tolist()
            assert batch.rewards[row] == reward
            assert bool(batch.terminated[row]) is terminated
            assert bool(batch.truncated[row]) is truncated
            assert bool(batch.valid[row]) is valid
            assert batch.final_obs[row].tolist() == final_obs.tolist()
            for key, item in info.items():
                assert batch.infos[f"_{key}"][row]
                assert batch.infos[key][row] == item

    @rule(value=st.floats(-1, 1, width=32))
    def step(self, value):
        self.recv(NUM)
        if any(model.state == "unusable" for model in self.model):
            return
        actions = np.full((NUM, 2), value, dtype=np.float32)
        obs, rewards, terminated, truncated, _ = self.envs.step(actions)
        for slot, model in enumerate(self.model):
            row = model.step(actions[slot])
            assert (rewards[slot], terminated[slot], truncated[slot]) == row[1:4]
        self.check_observations(obs)

    @rule(slots=SOME_SLOTS, seeds=st.lists(SEEDS, min_size=NUM, max_size=NUM), task=TASKS)
    def reset_some(self, slots, seeds, task):
        mask = np.isin(np.arange(NUM), slots)
        options = {"reset_mask": mask} | ({} if task is None else {"task": task})
        obs, infos = self.envs.reset(seed=seeds, options=options)
        for slot in slots:
            self.expected.pop(slot, None)
            info = self.model[slot].reset(seeds[slot], task)
            assert infos["length"][slot] == info["length"]
        assert infos["_length"].tolist() == mask.tolist()
        self.check_observations(obs)

    @precondition(lambda self: self.mode != "disabled")
    @rule(slots=SOME_SLOTS, seed=SEEDS, task=TASKS)
    def queue(self, slots, seed, task):
        slots = [slot for slot in slots if slot not in self.expected]
        if not slots:
            return
        options = None if task is None else {"task": task}
        self.envs.queue_reset(seed=[seed] * len(slots), options=options, slots=slots)
        for slot in slots:
            self.model[slot].queue.append((seed, task))

    @rule(slots=SOME_SLOTS, offset=st.integers(-5, 5))
    def call(self, slots, offset):
        slots = [slot for slot in slots if slot not in self.expected]
        if slots:
            expected = tuple(self.model[slot].env.where(offset) for slot in slots)
            assert self.envs.call("where", offset, slots=slots) == expected

    @rule()
    def snapshot(self):
        self.recv(NUM)
        if any(model.state == "unusable" for model in self.model):
            return
        self.saved = self.envs.snapshot(), [model.saved() for model in self.model]

    @rule(slots=SOME_SLOTS)
    def restore(self, slots):
        self.recv(NUM)
        if self.saved is None:
            return
        snapshots, states = self.saved
        obs = self.envs.restore([snapshots[slot] for slot in slots], slots=slots)
        for slot in slots:
            self.model[slot].put_back(states[slot])
        self.check_observations(obs)

    @invariant()
    def is_open(self):
        assert self.envs is None or not self.envs.closed


@pytest.mark.parametrize(
    ("where", "env", "examples"),
    [
        pytest.param(SERIAL, Wanderer, 40, id="serial"),
        pytest.param(THREAD, Wanderer, 30, id="thread"),
        pytest.param(FORK, Wanderer, 15, id="fork"),
        pytest.param(SERIAL, SavesItself, 40, id="serial-own-state"),
        pytest.param(SERIAL, CannotBePickled, 80, id="serial-replay"),
        pytest.param(FORK, CannotBePickled, 15, id="fork-replay"),
    ],
)
def test_any_order_of_calls(where, env, examples):
    machine = type("Machine", (FleetAgainstModel,), {"where": where, "env": env})
    # without shrinking: on a slow machine it would outlast the test's deadline and hide the failure
    phases = [Phase.explicit, Phase.generate]
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=25, phases=phases),
    )
