"""Pure decisions about slots: which worker gets which, and which form the next batch."""

from __future__ import annotations


def deal(num_slots: int, num_workers: int, num_last: int | None = None) -> list[tuple[int, int]]:
    """Neighbouring slots for each worker; the first get one more where it is uneven.

    With `num_last` the last worker gets so many, and the others share the rest.
    """
    if num_last is not None:
        start = num_slots - num_last
        return [*deal(start, num_workers - 1), (start, num_slots)]
    size, rest = divmod(num_slots, num_workers)
    bounds, start = [], 0
    for worker in range(num_workers):
        end = start + size + (worker < rest)
        bounds.append((start, end))
        start = end
    return bounds


def is_enough(num_ready: int, num_in_flight: int, min_slots: int | None) -> bool:
    """Whether a batch can be given: all that was sent, or `min_slots` of it."""
    coming = num_ready + num_in_flight
    return num_ready >= (coming if min_slots is None else min(min_slots, coming))
