"""Stretches of a rollout for recurrent networks: whole episodes side by side, as pure arithmetic.

    slot 0   a a a | b b          a b c       columns are stretches: each begins with a
    slot 1   c c c c c     ─►     a b c       fresh state, or with the one that was kept
                                  a . c       from before the rollout; dots are padding
                                  . . c
                                  . . c

Law: at most half of all cells are padding. Where one long stretch would make it more for many
short ones, stretches form several groups, those of like lengths side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StretchGroup:
    """Stretches that are gone through side by side."""

    rows: Numbers
    """[time, stretch]: rows of the flattened rollout; 0 where nothing is."""
    is_there: Flags
    """[time, stretch]: False where it is padding."""
    slots: Numbers
    """[stretch]: whose it is."""
    goes_on: Flags
    """[stretch]: True if the episode began before the rollout."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Where the rows of some slots stand when cut at the ends of episodes."""

    groups: tuple[StretchGroup, ...]

    @property
    def order(self) -> Numbers:
        """All rows that are there, once each, group by group."""
        return np.concatenate([group.rows[group.is_there] for group in self.groups])

    @property
    def sizes(self) -> list[int]:
        """How many rows each group has."""
        return [int(group.is_there.sum()) for group in self.groups]


def stretches(ended: Flags, slots: Numbers | None = None) -> Stretches:
    """Cut the columns `slots` (None: all) of `ended` [time, slot] after every end."""
    times, num_slots = ended.shape
    chosen = np.arange(num_slots) if slots is None else slots
    is_last = ended.T[chosen]
    is_last[:, -1] = True
    ends = np.flatnonzero(is_last) + 1  # of the chosen slots, one behind the other
    starts = np.concatenate(([0], ends[:-1]))
    lengths, (columns, begins) = ends - starts, np.divmod(starts, times)
    firsts = begins * num_slots + chosen[columns]
    groups = []
    for some in _alike(lengths):
        steps = np.arange(lengths[some].max())[:, None]
        is_there = steps < lengths[some]
        rows = np.where(is_there, steps * num_slots + firsts[some], 0)
        groups.append(StretchGroup(rows, is_there, chosen[columns[some]], begins[some] == 0))
    return Stretches(tuple(groups))


def _alike(lengths: Numbers) -> Iterator[Numbers]:
    """Which stretches form a group: as many as can be, the longest first.

    All that are left, if no more than half of their cells would be padding; else those that are
    longer than half of the longest. So the groups together are no more than twice as long as the
    longest stretch: a memory takes its time by steps, too.
    """
    left = np.arange(len(lengths))
    while len(left):
        mine = lengths[left]
        is_in = (2 * mine > mine.max()) | (mine.max() * len(mine) <= 2 * mine.sum())
        yield left[is_in]
        left = left[~is_in]
