"""Routes: who hosts which slots, recognised by identity where the arrays are the router's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.engine.routes import Router
from envfleet.engine.schedule import deal
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
    route = Router(bounds).find(slots)
    assert route.slots.tolist() == slots
    assert np.arange(8)[route.rows].tolist() == slots
    assert route.is_all == (slots == list(range(8)))
    dealt = [
        (position, slot)
        for part in route.parts
        for position, slot in zip(part.positions, part.slots.tolist(), strict=True)
    ]
    assert sorted(dealt) == list(enumerate(slots))
    for part in route.parts:
        low, high = bounds[part.worker]
        assert all(low <= slot < high for slot in part.slots.tolist())
        assert np.arange(8)[part.rows].tolist() == part.slots.tolist()
        assert part.is_whole == (part.slots.tolist() == list(range(low, high)))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("slots", [None, [2, 3, 4], [7, 0, 2], [6], list(range(8))])
def test_the_arrays_of_a_batch_are_recognised(slots, num_workers):
    """What `merge` gives of one worker's answer, or of all, is sent back as it is."""
    router = Router(deal(8, num_workers))
    route = router.find(slots)
    for parts in (route.parts, *[(part,) for part in route.parts]):
        handed, rows = router.merge(parts)
        found = router.find(handed)
        assert as_list(found.rows) == as_list(rows)
        assert_same_route(found, router.make(handed))
        if len(parts) == 1 or slots is None:
            assert found.slots is handed
    assert router.find(None) is router.find(router.everything.slots)


def test_what_is_handed_out_cannot_be_written_to():
    router = Router(BOUNDS)
    route = router.find([4, 0, 1])
    for slots in (route.slots, *(part.slots for part in route.parts), router.everything.slots):
        assert not slots.flags.writeable


def test_arrays_from_before_the_routes_were_forgotten_still_find_theirs():
    router = Router(BOUNDS)
    route = router.find([7, 0, 2])
    shares = [part.slots for part in route.parts]
    for slots in other_slots(MORE_THAN_ARE_KEPT):
        router.find(slots)
    assert router.find(router.everything.slots) is router.everything
    for part in router.everything.parts:
        assert router.find(part.slots).slots is part.slots
    for handed in (route.slots, *shares):
        assert_same_route(router.find(handed), router.make(handed))


@pytest.mark.parametrize("make", [np.array, list], ids=["array", "list"])
def test_an_array_at_the_place_of_one_that_is_gone_is_not_taken_for_it(make):
    """Objects are made where others have just been freed, before and after the forgetting."""
    router, places = Router(BOUNDS), set()
    for expected in other_slots(2 * MORE_THAN_ARE_KEPT):
        slots = make(expected.tolist())
        places.add(id(slots))
        assert router.find(slots).slots.tolist() == expected.tolist()
        del slots
    assert len(places) < 2 * MORE_THAN_ARE_KEPT, "no two had the same place: nothing was tried"


def test_no_route_is_known_by_an_array_that_is_gone():
    """Whatever answers to an identity keeps alive the array that has it, and is forgotten too."""
    router = Router(BOUNDS)
    for number, slots in enumerate(other_slots(4 * MORE_THAN_ARE_KEPT)):
        router.find(slots)
        if number % 100 == 0:
            assert all(place == id(route.slots) for place, route in router._own.items())
    assert len(router._own) < 4 * MORE_THAN_ARE_KEPT


def test_an_array_that_its_caller_has_changed_is_read_anew():
    router, slots = Router(BOUNDS), np.array([1, 2, 3])
    assert router.find(slots).slots.tolist() == [1, 2, 3]
    slots[:] = [7, 6, 0]
    assert router.find(slots).slots.tolist() == [7, 6, 0]


@pytest.mark.parametrize(
    "slots",
    [[], [8], [-1], [1, 1], [[1, 2], [3, 4]], [0.5], [True, False], np.zeros(0, np.intp)],
    ids=repr,
)
def test_slots_that_do_not_exist_are_refused_every_time(slots):
    router = Router(BOUNDS)
    for _ in range(2):
        with pytest.raises(ConfigError, match="slot"):
            router.find(slots)


def test_the_same_bytes_in_another_shape_are_not_the_same_slots():
    router = Router(BOUNDS)
    router.find(np.array([1, 2, 3, 4]))
    with pytest.raises(ConfigError, match="non-empty list"):
        router.find(np.array([[1, 2], [3, 4]]))
