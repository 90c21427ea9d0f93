"""Stretches of a rollout for recurrent networks: whole episodes side by side, as pure arithmetic.

slot 0   a a a | b b          a b c       columns are stretches: each begins with a
slot 1   c c c c c     ─►     a b c       fresh state, or with the one that was kept
a . c       from before the rollout; dots are padding
. . c
. . c
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Stretches:
    """Where the rows of some slots stand when cut at the ends of episodes."""

    rows: npt.NDArray[np.intp]
    """[time, stretch]: rows of the flattened rollout; 0 where nothing is."""
    is_there: npt.NDArray[np.bool_]
    """[time, stretch]: False where it is padding."""
    slots: npt.NDArray[np.intp]
    """[stretch]: whose it is."""
    goes_on: npt.NDArray[np.bool_]
    """[stretch]: True if the episode began before the rollout."""

    @property
    def order(self) -> npt.NDArray[np.intp]:
        """All rows that are there, once each."""
        return self.rows[self.is_there]


def stretches(ended: npt.NDArray[np.bool_], slots: npt.NDArray[np.intp] | None = None) -> Stretches:
    """Cut the columns `slots` (None: all) of `ended` [time, slot] after every end."""
    times, num_slots = ended.shape
    cuts: list[tuple[int, int, int]] = []
    for slot in range(num_slots) if slots is None else slots.tolist():
        ends = np.flatnonzero(ended[:, slot]) + 1
        edges = sorted({0, times, *ends.tolist()})
        cuts += [(slot, start, end) for start, end in pairwise(edges)]
    longest = max(end - start for _, start, end in cuts)
    rows = np.zeros((longest, len(cuts)), np.intp)
    is_there = np.zeros(rows.shape, np.bool_)
    for column, (slot, start, end) in enumerate(cuts):
        rows[: end - start, column] = np.arange(start, end) * num_slots + slot
        is_there[: end - start, column] = True
    return Stretches(
        rows,
        is_there,
        np.array([slot for slot, _, _ in cuts], np.intp),
        np.array([start == 0 for _, start, _ in cuts], np.bool_),
    )
