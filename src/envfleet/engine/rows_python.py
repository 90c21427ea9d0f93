"""The functions of `_rows.c` in Python, for machines without a compiler, and their arguments.

Each does the same as its twin in C. Where C stores a common result by itself, `step_rows` here
leaves all of them to the functions that it is given.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from envfleet.engine.interrupts import uninterrupted

ENDED = 1
"""In next_step the state of a row whose next step resets it."""
AUTORESETS = ("next_step", "same_step", "disabled")
"""The C functions know these by their numbers."""
NOTHING, POSTED, DONE, DONE_WITH_REPLY = range(4)
"""The state of a worker in `post_steps` and `collect_steps`."""
HAS_REPLY = 2
"""The flag of a ring entry whose worker has sent a reply."""
HAS_EVENTFD = hasattr(os, "eventfd")
_RING = (1).to_bytes(8, sys.byteorder) if HAS_EVENTFD else b"\0"
"""What is written to a descriptor to ring its bell once."""


class EnvRow(NamedTuple):
    """All that is needed to step one row."""

    row: int
    stepping: int
    """The status word of a worker that is in this row's step."""
    resetting: int
    """The status word of a worker that is in this row's reset."""
    env: Any
    """Its `step` and `reset` are looked up each time, because it may replace them."""
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
that ring its bell for commands and tell of its bell for answers, and how many slots it has. Without
a descriptor for commands it sleeps on the first of its status words."""
EndedRows: TypeAlias = tuple[npt.NDArray[np.bool_], list[int], npt.NDArray[Any]]
"""Which rows of a batch are ends, their positions, and an array of objects with what each of these
rows ended with, and None for the others."""
Copied: TypeAlias = tuple[Any, Any, Any, Any, Any, bool, EndedRows | None]


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
    states, ready, starts = host_state.states, host_state.ready, host_state.starts
    status = host_state.status.data  # an item of it is written in half an array's time
    for (row, stepping, resetting, env, _, _, start), action in zip(env_rows, actions, strict=True):
        if not states[row]:
            status[1] = stepping
            try:
                take(row, env.step(action))
            except BaseException as exc:
                fail(row, "step", exc)
        elif states[row] == ENDED and ready[row]:
            status[1] = resetting
            ready[row], host_state.rewards[row] = 0, 0.0
            host_state.invalid.append(row)
            try:
                start[:] = starts[row]
                take_reset(row, env.reset())
            except BaseException as exc:
                fail(row, "reset", exc)
        else:
            status[1] = stepping
            unusual(row)


def copy_rows(
    obs: npt.NDArray[Any] | None,
    finals: npt.NDArray[Any] | None,
    rewards: npt.NDArray[np.float64],
    flags: npt.NDArray[np.bool_],
    first: int,
    end: int,
) -> Copied:
    """Copies of obs, rewards, terminated, truncated and valid, and whether a row is special.

    With `finals`, the last observations of slots, there are also copies of those of the rows that
    are ends, if any is.
    """
    terminated, truncated, invalid = copied = flags[:, first:end].copy()
    ended = None
    if finals is not None and 1 in copied[:2].tobytes():
        ended = ended_rows(terminated, truncated, lambda at: finals[first + at].copy())
    return (
        None if obs is None else obs[first:end].copy(),
        rewards[first:end].copy(),
        terminated,
        truncated,
        ~invalid,
        1 in copied.tobytes(),
        ended,
    )


def ended_rows(
    terminated: npt.NDArray[np.bool_],
    truncated: npt.NDArray[np.bool_],
    last_of: Callable[[int], Any],
) -> EndedRows:
    """Which rows are ends, at which positions, and what `last_of` says of each of these."""
    ended = terminated | truncated
    positions = ended.nonzero()[0].tolist()
    lasts = np.empty(len(ended), object)
    for at in positions:
        lasts[at] = last_of(at)
    return ended, positions, lasts


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


def note_ends(
    flags: npt.NDArray[np.bool_],
    ended: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.int64],
    first: int,
    end: int,
    now: int,
    is_same_step: bool,
) -> bool:
    """Note which rows from `first` on are ends in `ended`, and in `starts` which began `now`.

    Those that began are the ended ones in `same_step`, and the reset rows in `next_step`. In
    `same_step` the flags are cleared: from now on one that is set tells of an end that no caller
    knows of.

    Returns whether any item of `ended` is set.
    """
    terminated, truncated, invalid = flags[:, first:end]
    ended[first:end] = ends = terminated | truncated
    starts[first:end][ends if is_same_step else invalid & ~ends] = now
    if is_same_step:
        flags[:2, first:end] = False
    return 1 in ended.tobytes()


def common_number(numbers: npt.NDArray[np.uint16], first: int, end: int) -> int | None:
    """The number that all rows from `first` on have, if it is one."""
    found = numbers[first:end]
    return int(found[0]) if np.count_nonzero(found == found[0]) == len(found) else None


def post_steps(
    ports: list[WorkerPort],
    states: bytearray,
    workers: tuple[int, ...],
    request: int,
    op: int,
    flags: int,
) -> None:
    """Post a step of all their slots to workers that have nothing else to do.

    All of it is posted or nothing, also if a signal handler raises.

    Args:
        ports: The ports of all workers.
        states: What each worker has under way, one of the four states above.
        workers: Which workers to post to.
        request: The identity of the step.
        op: The operation, and
        flags: its flags, as they are written into the rings.
    """
    if len(states) != len(ports):
        raise ValueError("there must be one state for each port")
    # a memoryview's items are read and written in half an array's time
    chosen = [[words.data for words in ports[worker][:3]] for worker in workers]
    for worker, (_, _, counts) in zip(workers, chosen, strict=True):
        if states[worker] != NOTHING or counts[0] != counts[2]:
            raise ValueError(f"worker {worker} has something else to do")
    with uninterrupted:
        for worker, (ring, words, counts) in zip(workers, chosen, strict=True):
            posted = counts[0]
            entry = posted * 3 % (len(ring) // 3 * 3)
            ring[entry], ring[entry + 1], ring[entry + 2] = request, op, flags
            words[0] = counts[0] = posted + 1
            states[worker] = POSTED
        for worker in workers:
            commands_fd = ports[worker][3]
            if commands_fd < 0:
                wake(ports[worker][1])
                continue
            # a worker that is gone is reported by the wait
            with contextlib.suppress(OSError):
                os.write(commands_fd, _RING)


def collect_steps(
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
        ports: The ports of all workers.
        states: What is under way. It is right at any time, also if a signal handler raises.
        workers: Which workers to wait for.
        wanted: A number of slots.
        urgent_fd: Becomes readable when a worker sends a message or ends.
        limit_s: The longest time to wait.
        spin_s: How long to look again and again before sleeping.

    Returns:
        The workers that are done. None if time is up, if something is urgent or if one of them has
        a reply: then nothing is collected.
    """
    if len(states) != len(ports):
        raise ValueError("there must be one state for each port")
    now_s = time.monotonic()
    give_up_s, spin_until_s = now_s + limit_s, now_s + spin_s
    while True:
        with uninterrupted:
            for worker in workers:
                if states[worker] == POSTED:
                    _take_bell(ports[worker], states, worker)
                if states[worker] == DONE_WITH_REPLY:
                    return None
            under_way = [worker for worker in workers if states[worker] == POSTED]
            if not under_way:
                return _collected(ports, states, workers)
        done = sum([ports[worker][5] for worker in workers if states[worker] == DONE])
        if done >= wanted:
            # the workers that are done must not hide one that has ended
            return None if _readable([urgent_fd], 0) else _collected(ports, states, workers)
        now_s = time.monotonic()
        if now_s >= give_up_s:
            return None
        if now_s < spin_until_s:
            continue
        coming = sum([ports[worker][5] for worker in under_way])
        if done + coming - ports[under_way[-1]][5] < wanted:
            under_way = under_way[-1:]  # all are needed: sleep until the last is done
        fds = [urgent_fd, *(ports[worker][4] for worker in under_way)]
        if urgent_fd in _readable(fds, int((give_up_s - now_s) * 1e3) + 1):
            return None


def _readable(fds: Sequence[int], timeout_ms: int) -> list[int]:
    """Those of these descriptors that are readable, or have an error, within a time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_ms)]


def _take_bell(port: WorkerPort, states: bytearray, worker: int) -> None:
    """Note that a worker is done, if it is."""
    ring, _, counts, _, done_fd, _ = port
    try:
        rung = os.read(done_fd, 8)
    except OSError:
        return
    number = int(counts[1])
    has_reply = int(ring[number * 3 % (len(ring) // 3 * 3) + 2]) & HAS_REPLY
    counts[1] = number + (int.from_bytes(rung, sys.byteorder) if HAS_EVENTFD else len(rung))
    states[worker] = DONE_WITH_REPLY if has_reply else DONE


def _collected(
    ports: list[WorkerPort], states: bytearray, workers: tuple[int, ...]
) -> tuple[int, ...]:
    done = tuple([worker for worker in workers if states[worker] == DONE])
    with uninterrupted:
        for worker in done:
            ports[worker][2][2] += np.uint64(1)
            states[worker] = NOTHING
    return done


# ---- sleeping on a word in shared memory: the kernel's futex ------------------------------------
#
# The first of some words of 64 bits is a count. The kernel compares its lower half with what the
# caller has seen before it lets the caller sleep, so a count that changes meanwhile is not missed.

_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_CALL = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
HAS_FUTEX = _CALL is not None and sys.maxsize > 2**32
_WAIT, _WAKE = 0, 1


def wake(words: npt.NDArray[np.uint64]) -> None:
    """Wake the process that sleeps on these words, if one does."""
    _syscall(_CALL, _address(words), _WAKE, 1, None, None, 0)


def wait_for_count(words: npt.NDArray[np.uint64], before: int) -> int:
    """Sleep until the first of these words is not what it was; returns what it is then."""
    while (now := int(words[0])) == before:
        # it returns at once if the word has changed, and early if a signal comes
        _syscall(_CALL, _address(words), _WAIT, before & 0xFFFFFFFF, None, None, 0)
    return now


def _address(words: npt.NDArray[np.uint64]) -> int:
    # a third of the time of `words.ctypes.data`
    return ctypes.addressof(ctypes.c_uint64.from_buffer(words.data)) + 4 * (sys.byteorder == "big")


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)
