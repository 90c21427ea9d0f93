"""The functions of `_rows.c` in Python, for places without a compiler.

Where C does the common case itself, here everything is left to the functions that are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Line: TypeAlias = tuple[int, int, Callable[[Any], Any], npt.NDArray[Any] | None]
"""(row, the word that says where the worker stands, step, where a plain observation goes)."""
Port: TypeAlias = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], int, int, int]
"""(ring, post, descriptors of the bells for commands and for what is done, commands so far)."""
Copied: TypeAlias = tuple[Any, Any, Any, Any, Any, bool]


def step_rows(
    lines: Sequence[Line],
    actions: Sequence[Any],
    states: bytearray,
    has_info: bytearray,
    post: npt.NDArray[np.uint64],
    rewards: npt.NDArray[np.float64],
    take: Callable[[int, Any], None],
    unusual: Callable[[int], None],
    fail: Callable[[int, BaseException], None],
) -> None:
    """Step the environments of these lines, one after another.

    Args:
        lines: What to step.
        actions: One for each line.
        states: By row; anything but 0 is `unusual`.
        has_info: By row; whether there is one to be replaced.
        post: Where the worker says where it stands.
        rewards: By row.
        take: Given a row and what its step returned.
        unusual: Given a row that is not simply running.
        fail: Given a row and what its step, or `take`, raised.
    """
    for (row, where, step, _), action in zip(lines, actions, strict=True):
        post[1] = where
        if states[row]:
            unusual(row)
            continue
        try:
            take(row, step(action))
        except BaseException as exc:
            fail(row, exc)


def copy_rows(
    obs: npt.NDArray[Any] | None,
    rewards: npt.NDArray[np.float64],
    flags: npt.NDArray[np.bool_],
    first: int,
    end: int,
) -> Copied:
    """Copies of obs, rewards, terminated, truncated and valid, and whether a row is special."""
    terminated, truncated, invalid = copied = flags[:, first:end].copy()
    return (
        None if obs is None else obs[first:end].copy(),
        rewards[first:end].copy(),
        terminated,
        truncated,
        ~invalid,
        1 in copied.tobytes(),
    )


def note_ends(
    terminated: npt.NDArray[np.bool_],
    truncated: npt.NDArray[np.bool_],
    valid: npt.NDArray[np.bool_],
    ended: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.int64],
    first: int,
    now: int,
) -> bool:
    """Keep which rows from `first` on are ends in `ended`, and which began `now` in `starts`.

    Returns whether `ended` has any.
    """
    rows = slice(first, first + len(terminated))
    ended[rows] = terminated | truncated
    starts[rows][~(valid | ended[rows])] = now
    return 1 in ended.tobytes()


def common_number(numbers: npt.NDArray[np.uint16], first: int, end: int) -> int | None:
    """The number that all rows from `first` on have, if it is one."""
    found = numbers[first:end]
    return int(found[0]) if np.count_nonzero(found == found[0]) == len(found) else None


def lock_step(
    ports: Sequence[Port], news: bytearray, request: int, op: int, urgent_fd: int, limit_s: float
) -> None:
    """Post one command to all workers and wait until all are done, or for other news.

    Args:
        ports: The workers.
        news: Filled in, also if a signal's handler raises: 0 not done, 1 done, 2 with a reply.
        request: The command's identity.
        op: The command.
        urgent_fd: Becomes readable when a worker sends something or ends.
        limit_s: Wait no longer.
    """
    raise NotImplementedError("it exists in C only")
