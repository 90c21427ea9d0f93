"""What is under way, against a plain set of slots."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.engine.inflight import Inflight
from envfleet.engine.messages import Command, Op
from envfleet.engine.slots import SlotSets

BOUNDS = [(0, 3), (3, 8)]
NUM_SLOTS = 8
SETS = [list(range(8)), [2, 3, 4], [3, 4, 5, 6, 7], [6], [0, 2, 7], [5, 4, 3], [7, 0]]


class Inbox:
    """A worker that never answers."""

    is_dead = False

    def __init__(self):
        self.commands: list[Command] = []

    def post(self, command):
        self.commands.append(command)


class Steps:
    """Plain steps that are never done."""

    def __init__(self):
        self.under_way = bytearray(len(BOUNDS))

    def post(self, workers, request, page):
        for worker in workers:
            self.under_way[worker] = 1

    def request_of(self, worker):
        return 10 + worker


def open_traffic() -> tuple[SlotSets, Inflight, list[Inbox]]:
    inboxes = [Inbox() for _ in BOUNDS]
    handles: Any = inboxes
    steps: Any = Steps()
    slot_sets = SlotSets(BOUNDS)
    return slot_sets, Inflight(slot_sets, handles, steps), inboxes


def under_way(inflight):
    return {slot for slot in range(NUM_SLOTS) if inflight.in_flight[slot]}


@pytest.mark.parametrize("slots", SETS, ids=str)
def test_what_was_sent_is_busy_until_it_lands_and_is_received(slots):
    slot_sets, inflight, _ = open_traffic()
    slot_set, everything = slot_sets.find(slots), slot_sets.everything
    group = inflight.post(slot_set, Op.STEP)
    assert inflight.busy(slot_set) == slots
    assert inflight.busy(everything) == sorted(slots)
    assert under_way(inflight) == set(slots)
    for pending in group:
        assert pending.part is not None
        inflight.land(pending.part)
        inflight.make_ready(pending)
    assert (under_way(inflight), inflight.num_in_flight) == (set(), 0)
    assert inflight.busy(slot_set) == slots
    inflight.take_ready()
    assert inflight.busy(slot_set) == inflight.busy(everything) == []


@pytest.mark.parametrize("slots", SETS, ids=str)
def test_neighbours_of_what_is_under_way_are_free(slots):
    slot_sets, inflight, _ = open_traffic()
    inflight.post(slot_sets.find(slots), Op.STEP)
    free = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    for slot in free:
        assert inflight.busy(slot_sets.find([slot])) == []
    if free:
        assert inflight.busy(slot_sets.find(free[::-1])) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "land", "lose"]),
            st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True),
        ),
        max_size=30,
    )
)
def test_slots_in_flight_are_those_sent_and_neither_landed_nor_lost(events):
    slot_sets, inflight, _ = open_traffic()
    expected: set[int] = set()
    for what, slots in events:
        if what == "lose":
            for slot in slots:
                inflight.lose(slot)
            expected -= set(slots)
            continue
        chosen = [slot for slot in slots if (slot in expected) == (what == "land")]
        if not chosen:
            continue
        slot_set = slot_sets.find(chosen)
        if what == "send":
            inflight.post(slot_set, Op.STEP)
            expected |= set(chosen)
        else:
            for part in slot_set.parts:
                inflight.land(part)
            expected -= set(chosen)
    assert under_way(inflight) == expected
    assert inflight.num_in_flight == len(expected)
    assert inflight.busy(slot_sets.everything) == sorted(expected)
    for slots in SETS:
        assert inflight.busy(slot_sets.find(slots)) == [slot for slot in slots if slot in expected]
        assert inflight.is_any_in_flight(slots) == bool(expected.intersection(slots))


def test_calls_hold_no_slot():
    slot_sets, inflight, _ = open_traffic()
    inflight.post(slot_sets.everything, Op.SNAPSHOT)
    assert inflight.busy(slot_sets.everything) == []
    assert inflight.num_in_flight == 0


def test_a_command_goes_to_whoever_takes_the_lost_worker_s_place():
    slot_sets, inflight, inboxes = open_traffic()
    inflight.post(slot_sets.find([1, 4]), Op.STEP)
    lost, inboxes[1] = inboxes[1], Inbox()
    inflight.again(inflight.outstanding[1].popleft())
    assert lost.commands == inboxes[1].commands
    assert len(inboxes[0].commands) == 1
    assert len(inflight.outstanding[1]) == 1


def test_what_is_dropped_of_one_command_stays_wanted_of_another():
    """Pending commands share nothing, though none has a set of its own to begin with."""
    slot_sets, inflight, _ = open_traffic()
    first = inflight.post(slot_sets.find([0, 1]), Op.STEP)
    second = inflight.post(slot_sets.find([3, 4]), Op.STEP)
    inflight.renounce({0, 3})
    assert [set(pending.unwanted) for pending in (*first, *second)] == [{0}, {3}]
    assert inflight.is_awaited([0, 1])
    assert not inflight.is_awaited([0])
    third = inflight.post(slot_sets.find([6]), Op.STEP)
    assert not third[0].unwanted


def test_a_plain_step_is_a_byte_until_something_else_is_done():
    slot_sets, inflight, inboxes = open_traffic()
    first, everything = slot_sets.of_workers((0,)), slot_sets.everything
    assert first.workers is not None
    assert everything.workers is not None
    inflight.steps.post(first.workers, 10, 0)
    assert inflight.is_posted(first)
    assert not inflight.is_posted(slot_sets.of_workers((1,)))
    assert inflight.is_free((1,))
    assert not inflight.is_free(everything.workers)
    assert inflight.is_empty
    assert inflight.busy(everything) == inflight.busy(first) == [0, 1, 2]
    assert inflight.busy(slot_sets.find([4, 1])) == [1]
    assert inflight.enter()
    assert inflight.busy(everything) == [0, 1, 2]
    assert not inflight.enter()
    assert not any(inflight.plain)
    assert under_way(inflight) == set(range(3))
    (pending,) = inflight.outstanding[0]
    assert (pending.command.request, pending.command.op) == (10, Op.STEP)
    assert not inboxes[0].commands, "its worker has it already"
    assert not inflight.is_free((0,))


def test_a_step_that_was_entered_halfway_is_entered_once():
    """A signal handler may raise anywhere in it."""
    slot_sets, inflight, _ = open_traffic()
    inflight.steps.post((0, 1), 10, 0)
    inflight.enter()
    inflight.plain[1] = 1
    inflight.enter()
    assert [len(queue) for queue in inflight.outstanding] == [1, 1]
    assert inflight.num_in_flight == NUM_SLOTS
    assert inflight.busy(slot_sets.everything) == list(range(NUM_SLOTS))


def test_workers_that_are_dead_or_being_replaced_are_not_free():
    _, inflight, inboxes = open_traffic()
    inboxes[1].is_dead = True
    assert inflight.is_free((0,))
    assert not inflight.is_free((0, 1))
    inboxes[1].is_dead = False
    inflight.hold(1)
    assert not inflight.is_free((0,))
    inflight.let_go(1)
    assert inflight.is_free((0, 1))
