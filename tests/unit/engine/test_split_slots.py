"""Pure decisions about slots: how they are dealt, and when a batch can be given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.engine.slots import deal, is_enough


@given(st.integers(1, 300), st.data())
def test_slots_are_dealt_whole_evenly_and_in_order(num_slots, data):
    num_workers = data.draw(st.integers(1, num_slots))
    bounds = deal(num_slots, num_workers)
    assert len(bounds) == num_workers
    assert [slot for low, high in bounds for slot in range(low, high)] == list(range(num_slots))
    sizes = [high - low for low, high in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_an_uneven_deal_gives_the_first_ones_more():
    assert deal(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert deal(3, 3) == [(0, 1), (1, 2), (2, 3)]
    assert deal(10, 3, 5) == [(0, 3), (3, 5), (5, 10)]


@pytest.mark.parametrize(
    ("ready", "in_flight", "min_slots", "expected"),
    [
        (0, 4, None, False),
        (3, 1, None, False),
        (4, 0, None, True),
        (0, 4, 1, False),
        (1, 3, 1, True),
        (2, 2, 3, False),
        (3, 1, 3, True),
    ],
)
def test_enough_is_all_or_as_many_as_were_asked_for(ready, in_flight, min_slots, expected):
    assert is_enough(ready, in_flight, min_slots) == expected


@given(st.integers(0, 50), st.integers(0, 50), st.none() | st.integers(1, 100))
def test_enough_never_waits_for_what_cannot_come(ready, in_flight, min_slots):
    if in_flight == 0:
        assert is_enough(ready, in_flight, min_slots)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 100))
def test_more_that_is_ready_is_never_less_enough(ready, in_flight, min_slots):
    if is_enough(ready, in_flight, min_slots):
        assert is_enough(ready + 1, max(0, in_flight - 1), min_slots)
