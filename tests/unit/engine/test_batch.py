"""What a batch says of itself: whether anything happened, and its infos when they are asked for."""

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest

from envfleet.engine import Fleet, ResetPlan
from envfleet.engine import batch as module
from envfleet.engine.batch import any_set
from envfleet.engine.infos import collate
from envfleet.testing import Counter, MixedInfo, NoisyStream

MODES = ("next_step", "same_step", "disabled")


def batches(env_fns, steps, autoreset="next_step", slots=None):
    """What a fleet gives: first the batch of the reset, then those of some steps."""
    fleet = Fleet(env_fns, backend="serial", autoreset=autoreset)
    with closing(fleet):
        yield fleet.reset([ResetPlan(seed) for seed in range(len(env_fns))])
        for _ in range(steps):
            actions = [fleet.facts[0].action_space.sample() for _ in slots or env_fns]
            fleet.send(np.array(actions), slots)
            yield fleet.recv()


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1000])
def test_any_set_is_numpy_s_any(size):
    assert not any_set(np.zeros(size, np.bool_))
    for where in {0, size // 2, size - 1} if size else set():
        flags = np.zeros((3, size), np.bool_)
        flags[1, where] = True
        assert any_set(flags)
        assert any_set(flags[:, where])
        assert not any_set(flags[2])


@pytest.mark.parametrize("slots", [None, [1], [2, 0]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_events_are_ends_and_rows_that_are_no_transitions(mode, slots):
    steps = 3 if mode == "disabled" else 12
    env_fns = [Counter, partial(Counter, length=3), partial(Counter, length=None, limit=3)]
    seen = set()
    for batch in batches(env_fns, steps, mode, slots):
        happened = batch.terminated | batch.truncated | ~batch.valid
        assert batch.has_events == happened.any()
        assert isinstance(batch.has_events, bool)
        seen.add(batch.has_events)
    assert seen == {True, False}


def test_infos_are_put_together_once_and_only_when_asked_for(monkeypatch):
    asked = []

    def counted(*of):
        asked.append(of)
        return collate(*of)

    monkeypatch.setattr(module, "collate", counted)
    for env in (NoisyStream, MixedInfo):
        _, batch = batches([env] * 2, steps=1)
        assert not asked
        assert batch.infos is batch.infos
        assert len(asked) == 1
        assert batch.infos
        asked.clear()


def test_without_infos_there_is_nothing_to_put_together(monkeypatch):
    monkeypatch.setattr(module, "collate", None)
    for batch in batches([Counter] * 2, steps=2):
        assert batch.infos == {}
        assert batch.infos is batch.infos
        assert batch.each_info == [{}, {}]


@pytest.mark.parametrize(
    ("slots", "num_workers"),
    [([2, 0, 1], 3), ([1, 2], 1), ([2, 0, 1], 1)],
    ids=str,
)
def test_infos_among_all_slots_stand_at_their_own(slots, num_workers):
    """In whatever order they were named."""
    fleet = Fleet([NoisyStream] * 3, backend="serial", num_workers=num_workers)
    with closing(fleet):
        batch = fleet.reset([ResetPlan(slot) for slot in slots], slots)
        found = batch.infos_among(3)
        expected = {
            int(slot): info["length"]
            for slot, info in zip(batch.slots, batch.each_info, strict=True)
        }
    assert found["_length"].tolist() == [slot in slots for slot in range(3)]
    assert {slot: int(found["length"][slot]) for slot in slots} == expected


class CannotBeginAgain(Counter):
    """Ends after two steps with an info, and raises in the reset after its second episode."""

    says: Any = 0.5

    def __init__(self):
        super().__init__(length=2)
        self.num_resets = 0

    def reset(self, *, seed=None, options=None):
        self.num_resets += 1
        if self.num_resets == 3:
            raise ValueError("not again")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {"says": self.says, "of": self.num_resets} if terminated else {}
        return obs, reward, terminated, truncated, info


class CannotBeginAgainInWords(CannotBeginAgain):
    says = "words"


@pytest.mark.parametrize("env", [CannotBeginAgain, CannotBeginAgainInWords])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_what_an_episode_ended_with_outlives_a_reset_that_fails(backend, env):
    fleet = Fleet([env], backend=backend, autoreset="same_step", on_failure="restart")
    with closing(fleet):
        fleet.reset([ResetPlan(0)])
        seen = [fleet.step(np.zeros(1, np.int64)) for _ in range(6)]
    finals = [batch.each_info[0].get("final_info") for batch in seen]
    said = [None if info is None else info["of"] for info in finals]
    assert said == [None, 1, None, 2, None, 1]
    assert [bool(batch.terminated[0]) for batch in seen] == [False, True, False, False, False, True]
    assert finals[3] == {"says": env.says, "of": 2}
    assert seen[3].infos["final_info"]["of"].tolist() == [2]
