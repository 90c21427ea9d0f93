"""The functions of `_rows.c` in Python, for places without a compiler, and what both are given.

Where C does the common case itself, here everything is left to the functions that are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

ENDED = 1
"""In next_step the state of a row whose next step resets it."""
AUTORESETS = ("next_step", "same_step", "disabled")
"""The C functions know these by their numbers."""


class EnvRow(NamedTuple):
    """All that is needed to step one row."""

    row: int
    stepping: int
    """The status word of a worker that is in this row's step."""
    layer: Any
    """Its `step` is called, looked up each time, because an environment may replace its own."""
    limit: Any
    """The `TimeLimit` around `layer` whose steps are counted here, or None."""
    resetting: int
    """The status word of a worker that is in this row's reset."""
    env: Any
    """Its `reset` is called, looked up each time."""
    obs: npt.NDArray[Any] | None
    """The row of an observation that is one array, else None."""
    final_obs: npt.NDArray[Any] | None
    """The row of the last observation of an episode, in `same_step`."""
    start: npt.NDArray[np.uint8]
    """The cell for the generator state that an episode starts from."""


Form: TypeAlias = tuple[tuple[str, ...], tuple[type, ...], bytes, int]
"""Keys, types, codes of a struct's format and number of infos that are all numbers."""


class HostState(NamedTuple):
    """What the rows of one host have in common; arrays and bytearrays have an item for each row."""

    autoreset: int
    """Its place in `AUTORESETS`."""
    states: bytearray
    """0 is running, 1 has ended, anything else is `unusual`."""
    has_info: bytearray
    """Whether the row's cell holds an info."""
    ready: bytearray
    """next_step: whether an ended row can be reset plainly, with its generator in `starts`."""
    has_plan: bytearray
    """Whether the row's next autoreset has a seed or options, which Python gives to it."""
    starts: npt.NDArray[np.uint8]
    """next_step: generator states of ended rows, looked up in idle time."""
    status: npt.NDArray[np.uint64]
    """The status words of the worker; the second says what it is doing."""
    rewards: npt.NDArray[np.float64]
    invalid: list[int]
    """Receives the rows that are not transitions."""
    ends: list[tuple[int, bool, bool]]
    """Receives the rows whose episodes ended: row, terminated, truncated."""
    form: list[Form | None]
    """One item: the keys and types of most infos."""
    cells: npt.NDArray[np.uint8]
    """Infos that have this form, as bytes."""
    schemas: npt.NDArray[np.uint16]
    """The number of the schema of each cell; 0 without an info."""
    final_cells: npt.NDArray[np.uint8]
    """same_step: the same of the last infos of episodes."""
    final_schemas: npt.NDArray[np.uint16]


WorkerPort: TypeAlias = tuple[
    npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64], int, int, int
]
"""A worker's ring, its status words, how many commands were posted, done and taken, the descriptors
of its bells for commands and for what is done, and how many slots it has."""
Copied: TypeAlias = tuple[Any, Any, Any, Any, Any, bool]


class PostSteps(Protocol):
    """Posts a plain step of all their slots to workers that have nothing else to do."""

    def __call__(
        self,
        ports: list[WorkerPort],
        states: bytearray,
        workers: tuple[int, ...],
        request: int,
        op: int,
        flags: int,
    ) -> None:
        """Write it into their rings and counts, say so in `states`, and ring."""


class CollectSteps(Protocol):
    """Waits for steps that were posted so."""

    def __call__(
        self,
        ports: list[WorkerPort],
        states: bytearray,
        workers: tuple[int, ...],
        wanted: int,
        urgent_fd: int,
        limit_s: float,
        spin_s: float,
    ) -> tuple[int, ...] | None:
        """Wait for the steps of at least `wanted` slots, or of all that are under way.

        Args:
            ports: All there are.
            states: What is under way; always says what is, also if a signal's handler raises.
            workers: For whom to wait.
            wanted: A number of slots.
            urgent_fd: Becomes readable when a worker sends something or ends.
            limit_s: Wait no longer.
            spin_s: Sleep no sooner.

        Returns:
            The workers that are done, or None, and nothing is collected, if time is up, something
            is urgent or one of them has a reply.
        """


class KeepPcg64(Protocol):
    """Reads the state of numpy's PCG64 from memory."""

    def __call__(self, capsule: Any, cell: npt.NDArray[np.uint8], /) -> None:
        """Put it into a cell, as `rng.packed` does."""


def step_rows(
    host_state: HostState,
    env_rows: Sequence[EnvRow],
    actions: Sequence[Any],
    take: Callable[[int, Any], None],
    take_reset: Callable[[int, Any], None],
    unusual: Callable[[int], None],
    fail: Callable[[int, str, BaseException], None],
    keep_start: Callable[[int], None],
) -> None:
    """Step the environments of these rows, one after another.

    Args:
        host_state: What the rows have in common.
        env_rows: What to step.
        actions: One for each row.
        take: Stores what the step of a row returned, and in `same_step` resets after an end.
        take_reset: Stores what the reset of a row returned.
        unusual: Steps a row that is neither running nor ready to be reset.
        fail: Reports what the "step" or "reset" of a row raised, or what storing its result raised.
        keep_start: Writes the generator state of a row into its cell, before a reset. Only C calls
            it: here `take` does all of it.
    """
    for env_row, action in zip(env_rows, actions, strict=True):
        row, is_running = env_row.row, not host_state.states[env_row.row]
        if not is_running and not (host_state.states[row] == ENDED and host_state.ready[row]):
            host_state.status[1] = env_row.stepping
            unusual(row)
            continue
        try:
            if is_running:
                host_state.status[1] = env_row.stepping
                result = env_row.layer.step(action)
                take(row, result if env_row.limit is None else _counted(env_row.limit, result))
                continue
            host_state.status[1] = env_row.resetting
            host_state.ready[row], host_state.rewards[row] = 0, 0.0
            host_state.invalid.append(row)
            env_row.start[:] = host_state.starts[row]
            take_reset(row, env_row.env.reset())
        except BaseException as exc:
            fail(row, "step" if is_running else "reset", exc)


def _counted(limit: Any, result: Any) -> Any:
    obs, reward, terminated, truncated, info = result
    limit._elapsed_steps += 1
    is_over = limit._elapsed_steps >= limit._max_episode_steps
    return obs, reward, terminated, is_over or truncated, info


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


def put_rows(column: npt.NDArray[Any], first: int, end: int, values: Any) -> bool:
    """Put a batch into these rows if it is an array like them; whether it was.

    It lies as they do, or in two dimensions column by column.
    """
    rows = column[first:end]
    if (
        type(values) is not np.ndarray
        or values.shape != rows.shape
        or values.dtype != rows.dtype
        or not (values.flags.c_contiguous or _is_turned(values))
    ):
        return False
    rows[...] = values
    return True


def _is_turned(values: npt.NDArray[Any]) -> bool:
    return values.ndim == 2 and values.flags.f_contiguous and values.itemsize in (4, 8)


def take_rewards(
    rewards: npt.NDArray[np.float64],
    flags: npt.NDArray[np.bool_],
    out: npt.NDArray[np.float64],
) -> bool:
    """Copy the rewards of all slots, unless a row is special; whether that was so."""
    if 1 in flags.tobytes():
        return False
    out[:] = rewards
    return True


def note_ends(
    terminated: npt.NDArray[np.bool_],
    truncated: npt.NDArray[np.bool_],
    valid: npt.NDArray[np.bool_],
    ended: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.int64],
    first: int,
    now: int,
    is_same_step: bool,
) -> bool:
    """Note which rows from `first` on are ends in `ended`, and in `starts` which began `now`.

    Those that began are the ended ones in `same_step`, and the reset rows in `next_step`.

    Returns whether any item of `ended` is set.
    """
    rows = slice(first, first + len(terminated))
    ended[rows] = terminated | truncated
    starts[rows][ended[rows] if is_same_step else ~(valid | ended[rows])] = now
    return 1 in ended.tobytes()


def common_number(numbers: npt.NDArray[np.uint16], first: int, end: int) -> int | None:
    """The number that all rows from `first` on have, if it is one."""
    found = numbers[first:end]
    return int(found[0]) if np.count_nonzero(found == found[0]) == len(found) else None
