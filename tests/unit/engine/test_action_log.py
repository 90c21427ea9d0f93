"""What was done to each slot since its episode began, against a plain list per slot."""

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.engine import episodes as module
from envfleet.engine.episodes import ActionLog
from envfleet.engine.options import ResetPlan

NUM_SLOTS = 4
some_slots = st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True)
events = st.lists(
    st.one_of(
        st.just(("send", None)),
        st.tuples(st.just("send"), some_slots),
        st.tuples(st.just("begin"), some_slots),
    ),
    max_size=60,
)


@given(events)
def test_a_log_is_what_was_sent_to_that_slot_since_it_began(events):
    action_log, numbers = ActionLog(NUM_SLOTS), itertools.count()
    plans = [ResetPlan()] * NUM_SLOTS
    expected: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    for what, slots in events:
        chosen = list(range(NUM_SLOTS)) if slots is None else slots
        if what == "send":
            actions = np.array([next(numbers) for _ in chosen])
            action_log.sent(None if slots is None else np.array(slots), actions)
            for slot, action in zip(chosen, actions.tolist(), strict=True):
                expected[slot].append(action)
        else:
            new = [ResetPlan(next(numbers)) for _ in chosen]
            action_log.began(chosen, new)
            for slot, plan in zip(chosen, new, strict=True):
                plans[slot], expected[slot] = plan, []
    for slot in range(NUM_SLOTS):
        log = action_log.log_of(slot)
        assert log.plan == plans[slot]
        assert [int(action) for action in log.actions] == expected[slot]
        assert log.is_complete


def test_finished_episodes_are_forgotten(monkeypatch):
    """All slots have begun anew again and again: nothing old is held."""
    monkeypatch.setattr(module, "_TRIM_EVERY", 16)
    action_log = ActionLog(2)
    for number in range(1000):
        action_log.sent(None, np.array([number, number]))
        action_log.began([0, 1], [ResetPlan(number)] * 2)
    assert len(action_log._entries) <= 32


def test_a_running_episode_is_not_forgotten_for_the_sake_of_others(monkeypatch):
    monkeypatch.setattr(module, "_TRIM_EVERY", 16)
    action_log = ActionLog(2)
    for number in range(500):
        action_log.sent(None, np.array([number, number]))
        action_log.began([1], [ResetPlan(number)])
    log = action_log.log_of(0)
    assert [int(action) for action in log.actions] == list(range(500))
    assert log.is_complete
    assert action_log.log_of(1).actions == ()


def test_an_endless_episode_loses_its_beginning_and_says_so(monkeypatch):
    monkeypatch.setattr(module, "LIMIT_BYTES", 64_000)
    action_log = ActionLog(1)
    for number in range(10_000):
        action_log.sent(None, np.full((1, 10), number))
    log = action_log.log_of(0)
    assert not log.is_complete
    kept = [int(action[0]) for action in log.actions]
    assert kept == list(range(10_000 - len(kept), 10_000))
    action_log.began([0], [ResetPlan(1)])
    assert action_log.log_of(0).is_complete
    action_log.sent(None, np.zeros((1, 10)))
    assert len(action_log.log_of(0).actions) == 1


@pytest.mark.parametrize(
    "make",
    [lambda number: np.array([number]), lambda number: ["x" * 10_000 + str(number)]],
    ids=["small arrays", "long texts"],
)
def test_the_limit_is_one_of_real_memory(make, monkeypatch):
    """An entry is more than its payload, and a text is more than a pointer to it."""
    limit = 4 << 20
    monkeypatch.setattr(module, "LIMIT_BYTES", limit)
    action_log = ActionLog(1)
    tracemalloc.start()
    try:
        for number in range(100_000 if make(0)[0] == 0 else 3_000):
            action_log.sent(None, make(number))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 * limit, f"{held / 1e6:.0f} MB held, {limit / 1e6:.0f} MB allowed"


def test_a_long_log_is_read_in_time_proportional_to_its_length():
    action_log = ActionLog(1)

    def seconds_for(count):
        for _ in range(count):
            action_log.sent(None, np.zeros(1))
        return min(read_s(count) for _ in range(5))

    def read_s(count):
        started_s = time.thread_time()
        assert len(action_log.log_of(0).actions) >= count
        return time.thread_time() - started_s

    seconds_for(1000)
    small_s = seconds_for(19_000)
    large_s = seconds_for(180_000)
    assert large_s < 25 * small_s + 0.05, f"20k: {small_s:.3f} s, 200k: {large_s:.3f} s"


def test_a_slot_that_was_restored_has_the_actions_that_lead_there():
    action_log = ActionLog(2)
    action_log.sent(None, np.array([1, 2]))
    action_log.take_back(1, ResetPlan(5), [7, 8, 9])
    action_log.sent(None, np.array([3, 4]))
    log = action_log.log_of(1)
    assert (log.plan, [int(action) for action in log.actions]) == (ResetPlan(5), [7, 8, 9, 4])
    assert [int(action) for action in action_log.log_of(0).actions] == [1, 3]
