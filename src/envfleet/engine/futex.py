"""Sleeping on a word in shared memory, and waking those that do: the kernel's futex.

The first of some words of 64 bits is a count. The kernel compares its lower half with what the
caller has seen before it lets the caller sleep, so a count that changes meanwhile is not missed.
"""

from __future__ import annotations

import ctypes
import platform
import sys

import numpy as np
import numpy.typing as npt

_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_CALL = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
HAS_FUTEX = _CALL is not None and sys.maxsize > 2**32
_WAIT, _WAKE = 0, 1

Words = npt.NDArray[np.uint64]


def wake(words: Words) -> None:
    """Wake the process that sleeps on these words, if one does."""
    _syscall(_CALL, _address(words), _WAKE, 1, None, None, 0)


def wait_for_count(words: Words, before: int) -> int:
    """Sleep until the first of these words is not what it was; returns what it is then."""
    while (now := int(words[0])) == before:
        # it returns at once if the word has changed, and early if a signal comes
        _syscall(_CALL, _address(words), _WAIT, before & 0xFFFFFFFF, None, None, 0)
    return now


def _address(words: Words) -> int:
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
