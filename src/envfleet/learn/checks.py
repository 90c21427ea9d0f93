"""Numbers that would ruin a policy silently, found before anything is learned from them.

One reward that is not a number makes every parameter one that is not, and the run would go on and
save that. Law: nothing is changed here, and nothing was learned from the numbers yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.errors import NotFinite

__all__ = ["MEND", "check_estimates", "check_finals", "check_obs", "check_rewards"]

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

MEND = "correct the environment, or wrap it so that its numbers are finite"
_CALM = "try a smaller learning_rate, or normalise_obs and normalise_rewards"


def check_rewards(rewards: Array, valid: Flags) -> None:
    """Refuse rewards, [time, slot], as the environments gave them; those of lost rows may be any.

    Raises:
        NotFinite: Some are not finite; the first of them is named.
    """
    if not np.isfinite(rewards).all():
        _raise_first("a reward", rewards, ~np.isfinite(rewards) & valid, MEND)


def check_obs(obs: tuple[Array, ...], valid: Flags) -> None:
    """Refuse observations, which have one time more than `valid`, as the networks get them.

    One in front of a lost row counts too: the row before led to it. Infinite ones must be found
    here: behind a saturated unit values are finite again, gradients are not.

    Raises:
        NotFinite: Some are not finite; the first of them is named.
    """
    for leaf in obs:
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            wrong = ~np.isfinite(leaf).reshape(*leaf.shape[:2], -1).all(-1)
            none = np.zeros_like(valid[:1])
            wrong &= np.concatenate((valid, none)) | np.concatenate((none, valid))
            _raise_first("an observation", leaf, wrong, MEND, is_before=True)


def check_finals(places: list[tuple[int, int]], finals: tuple[Array, ...], valid: Flags) -> None:
    """Refuse last observations of episodes that were cut off, given with their times and slots.

    Raises:
        NotFinite: Some are not finite; the first of them is named.
    """
    for leaf in finals:
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            for place, row in zip(places, leaf, strict=True):
                wrong = np.zeros_like(valid)
                wrong[place] = valid[place] and not np.isfinite(row).all()
                numbers = np.broadcast_to(row, (*valid.shape, *row.shape))
                _raise_first("the last observation of an episode", numbers, wrong, MEND)


def check_estimates(estimates: Array, rewards: Array, values: Array) -> None:
    """Refuse advantages that are not finite, by what they were made from.

    Raises:
        NotFinite: The first reward or value that is not finite is named.
    """
    if np.isfinite(estimates).all():
        return
    # too large for 32 bits: those that were not finite from the beginning have been refused
    _raise_first("a reward", rewards, ~np.isfinite(rewards), MEND)
    _raise_first("a value estimate", values, ~np.isfinite(values), _CALM)
    _raise_first("an advantage", estimates, ~np.isfinite(estimates), _CALM)


def _raise_first(
    what: str, numbers: Array, wrong: Flags, remedy: str, *, is_before: bool = False
) -> None:
    """Name the first step at which some are wrong, if there is one.

    `is_before` says that each row was there before its step: the step before brought it.
    """
    steps = np.flatnonzero(wrong.any(1))
    if not len(steps):
        return
    step = int(steps[0])
    slots = np.flatnonzero(wrong[step]).tolist()
    # central statistics spread what one slot gave to all of them
    whose = f"slot {slots[0]}" if len(slots) == 1 else f"one of the slots {slots}"
    row = np.asarray(numbers[step, slots[0]])
    number = row[~np.isfinite(row)].reshape(-1)[0]
    when = f"at step {step + 1}"
    if is_before:
        when = f"after step {step}" if step else "before step 1"
    raise NotFinite(f"{what} of {whose}", f"is {number} {when} of the rollout", remedy)
