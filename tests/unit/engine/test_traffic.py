"""What is under way, against a plain set of slots."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.engine.messages import Command, Op
from envfleet.engine.routes import Router
from envfleet.engine.traffic import Traffic

BOUNDS = [(0, 3), (3, 8)]
NUM_SLOTS = 8
SETS = [list(range(8)), [2, 3, 4], [3, 4, 5, 6, 7], [6], [0, 2, 7], [5, 4, 3], [7, 0]]


class Inbox:
    """A worker that never answers."""

    def __init__(self):
        self.commands: list[Command] = []

    def post(self, command):
        self.commands.append(command)


def open_traffic() -> tuple[Router, Traffic, list[Inbox]]:
    inboxes = [Inbox() for _ in BOUNDS]
    handles: Any = inboxes
    return Router(BOUNDS), Traffic(NUM_SLOTS, handles), inboxes


def under_way(traffic):
    return {slot for slot in range(NUM_SLOTS) if traffic.in_flight[slot]}


@pytest.mark.parametrize("slots", SETS, ids=str)
def test_what_was_sent_is_busy_until_it_lands_and_is_received(slots):
    router, traffic, _ = open_traffic()
    route, everything = router.find(slots), router.everything
    group = traffic.post(route, Op.STEP)
    assert traffic.busy(route) == slots
    assert traffic.busy(everything) == sorted(slots)
    assert under_way(traffic) == set(slots)
    for pending in group:
        assert pending.part is not None
        traffic.land(pending.part)
        traffic.make_ready(pending)
    assert (under_way(traffic), traffic.num_in_flight) == (set(), 0)
    assert traffic.busy(route) == slots
    traffic.take_ready()
    assert traffic.busy(route) == traffic.busy(everything) == []


@pytest.mark.parametrize("slots", SETS, ids=str)
def test_neighbours_of_what_is_under_way_are_free(slots):
    router, traffic, _ = open_traffic()
    traffic.post(router.find(slots), Op.STEP)
    free = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    for slot in free:
        assert traffic.busy(router.find([slot])) == []
    if free:
        assert traffic.busy(router.find(free[::-1])) == []


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
    router, traffic, _ = open_traffic()
    expected: set[int] = set()
    for what, slots in events:
        if what == "lose":
            for slot in slots:
                traffic.lose(slot)
            expected -= set(slots)
            continue
        chosen = [slot for slot in slots if (slot in expected) == (what == "land")]
        if not chosen:
            continue
        route = router.find(chosen)
        if what == "send":
            traffic.post(route, Op.STEP)
            expected |= set(chosen)
        else:
            for part in route.parts:
                traffic.land(part)
            expected -= set(chosen)
    assert under_way(traffic) == expected
    assert traffic.num_in_flight == len(expected)
    assert traffic.busy(router.everything) == sorted(expected)
    for slots in SETS:
        assert traffic.busy(router.find(slots)) == [slot for slot in slots if slot in expected]
        assert traffic.is_any_in_flight(slots) == bool(expected.intersection(slots))


def test_calls_hold_no_slot():
    router, traffic, _ = open_traffic()
    traffic.post(router.everything, Op.SNAPSHOT)
    assert traffic.busy(router.everything) == []
    assert traffic.num_in_flight == 0


def test_a_command_goes_to_whoever_takes_the_lost_worker_s_place():
    router, traffic, inboxes = open_traffic()
    traffic.post(router.find([1, 4]), Op.STEP)
    lost, inboxes[1] = inboxes[1], Inbox()
    traffic.again(traffic.outstanding[1].popleft())
    assert lost.commands == inboxes[1].commands
    assert len(inboxes[0].commands) == 1
    assert len(traffic.outstanding[1]) == 1


def test_what_is_dropped_of_one_command_stays_wanted_of_another():
    """Pending commands share nothing, though none has a set of its own to begin with."""
    router, traffic, _ = open_traffic()
    first = traffic.post(router.find([0, 1]), Op.STEP)
    second = traffic.post(router.find([3, 4]), Op.STEP)
    traffic.renounce({0, 3})
    assert [set(pending.unwanted) for pending in (*first, *second)] == [{0}, {3}]
    assert traffic.is_awaited([0, 1])
    assert not traffic.is_awaited([0])
    third = traffic.post(router.find([6]), Op.STEP)
    assert not third[0].unwanted
