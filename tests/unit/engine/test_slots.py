"""Routes: who hosts which slots, recognised by identity where the arrays are the router's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.engine.slots import SlotSets, deal
from envfleet.errors import ConfigError

BOUNDS = [(0, 3), (3, 5), (5, 8)]
MORE_THAN_ARE_KEPT = 300


def assert_same_route(left, right):
    assert left.slots.tolist() == right.slots.tolist()
    assert as_list(left.rows) == as_list(right.rows)
    assert left.is_all == right.is_all
    assert len(left.parts) == len(right.parts)
    for one, two in zip(left.parts, right.parts, strict=True):
        assert one.slots.tolist() == two.slots.tolist()
        assert as_list(one.rows) == as_list(two.rows)
        assert (one.worker, one.is_whole, one.positions) == (
            two.worker,
            two.is_whole,
            two.positions,
        )


def as_list(rows):
    return rows if isinstance(rows, slice) else rows.tolist()


def other_slots(count):
    """Sets of slots that nobody else asks for, as arrays that nobody keeps."""
    generator = np.random.default_rng(0)
    seen: set[bytes] = set()
    while len(seen) < count:
        slots = generator.permutation(8)[:6]
        if slots.tobytes() not in seen:
            seen.add(slots.tobytes())
            yield slots


@given(st.integers(1, 8), st.permutations(range(8)), st.integers(1, 8))
def test_a_route_deals_its_slots_to_their_hosts(num_workers, order, count):
    bounds, slots = deal(8, num_workers), order[:count]
    slot_set = SlotSets(bounds).find(slots)
    assert slot_set.slots.tolist() == slots
    assert np.arange(8)[slot_set.rows].tolist() == slots
    assert slot_set.is_all == (slots == list(range(8)))
    dealt = [
        (position, slot)
        for part in slot_set.parts
        for position, slot in zip(part.positions, part.slots.tolist(), strict=True)
    ]
    assert sorted(dealt) == list(enumerate(slots))
    for part in slot_set.parts:
        low, high = bounds[part.worker]
        assert all(low <= slot < high for slot in part.slots.tolist())
        assert np.arange(8)[part.rows].tolist() == part.slots.tolist()
        assert part.is_whole == (part.slots.tolist() == list(range(low, high)))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("slots", [None, [2, 3, 4], [7, 0, 2], [6], list(range(8))])
def test_the_arrays_of_a_batch_are_recognised(slots, num_workers):
    """What `merge` gives of one worker's answer, or of all, is sent back as it is."""
    slot_sets = SlotSets(deal(8, num_workers))
    slot_set = slot_sets.find(slots)
    for parts in (slot_set.parts, *[(part,) for part in slot_set.parts]):
        handed, rows = slot_sets.merge(parts)
        found = slot_sets.find(handed)
        assert as_list(found.rows) == as_list(rows)
        assert_same_route(found, slot_sets.make(handed))
        if len(parts) == 1 or slots is None:
            assert found.slots is handed
    assert slot_sets.find(None) is slot_sets.find(slot_sets.everything.slots)


def test_what_is_handed_out_cannot_be_written_to():
    slot_sets = SlotSets(BOUNDS)
    slot_set = slot_sets.find([4, 0, 1])
    for slots in (
        slot_set.slots,
        *(part.slots for part in slot_set.parts),
        slot_sets.everything.slots,
    ):
        assert not slots.flags.writeable


def test_arrays_from_before_the_routes_were_forgotten_still_find_theirs():
    slot_sets = SlotSets(BOUNDS)
    slot_set = slot_sets.find([7, 0, 2])
    shares = [part.slots for part in slot_set.parts]
    for slots in other_slots(MORE_THAN_ARE_KEPT):
        slot_sets.find(slots)
    assert slot_sets.find(slot_sets.everything.slots) is slot_sets.everything
    for part in slot_sets.everything.parts:
        assert slot_sets.find(part.slots).slots is part.slots
    for handed in (slot_set.slots, *shares):
        assert_same_route(slot_sets.find(handed), slot_sets.make(handed))


@pytest.mark.parametrize("make", [np.array, list], ids=["array", "list"])
def test_an_array_at_the_place_of_one_that_is_gone_is_not_taken_for_it(make):
    """Objects are made where others have just been freed, before and after the forgetting."""
    slot_sets, places = SlotSets(BOUNDS), set()
    for expected in other_slots(2 * MORE_THAN_ARE_KEPT):
        slots = make(expected.tolist())
        places.add(id(slots))
        assert slot_sets.find(slots).slots.tolist() == expected.tolist()
        del slots
    assert len(places) < 2 * MORE_THAN_ARE_KEPT, "no two had the same place: nothing was tried"


def test_no_route_is_known_by_an_array_that_is_gone():
    """Whatever answers to an identity keeps alive the array that has it, and is forgotten too."""
    slot_sets = SlotSets(BOUNDS)
    for number, slots in enumerate(other_slots(4 * MORE_THAN_ARE_KEPT)):
        slot_sets.find(slots)
        if number % 100 == 0:
            assert all(key == id(slot_set.slots) for key, slot_set in slot_sets._own.items())
    assert len(slot_sets._own) < 4 * MORE_THAN_ARE_KEPT


def test_an_array_that_its_caller_has_changed_is_read_anew():
    slot_sets, slots = SlotSets(BOUNDS), np.array([1, 2, 3])
    assert slot_sets.find(slots).slots.tolist() == [1, 2, 3]
    slots[:] = [7, 6, 0]
    assert slot_sets.find(slots).slots.tolist() == [7, 6, 0]


@pytest.mark.parametrize(
    "slots",
    [[], [8], [-1], [1, 1], [[1, 2], [3, 4]], [0.5], [True, False], np.zeros(0, np.intp)],
    ids=repr,
)
def test_slots_that_do_not_exist_are_refused_every_time(slots):
    slot_sets = SlotSets(BOUNDS)
    for _ in range(2):
        with pytest.raises(ConfigError, match="slot"):
            slot_sets.find(slots)


def test_the_same_bytes_in_another_shape_are_not_the_same_slots():
    slot_sets = SlotSets(BOUNDS)
    slot_sets.find(np.array([1, 2, 3, 4]))
    with pytest.raises(ConfigError, match="non-empty list"):
        slot_sets.find(np.array([[1, 2], [3, 4]]))
