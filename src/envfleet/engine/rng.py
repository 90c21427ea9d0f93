"""The generator state that an episode starts from, as bytes in shared memory.

There it outlives the worker, so that the episode of a lost environment can be replayed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine.rows import keep_pcg64

UNKNOWN, SEEDED, STATE = 0, 1, 2
_CELL = struct.Struct("=B7x16s16sII")

CELL_BYTES = _CELL.size
SEED_SAYS_ALL = bytes([SEEDED]).ljust(CELL_BYTES, b"\0")
NOT_KNOWN = bytes(CELL_BYTES)


def packed(state: Mapping[str, Any] | None) -> bytes:
    """The bytes of a PCG64's state as numpy gives it; `NOT_KNOWN` for another kind, or None."""
    if state is None or state.get("bit_generator") != "PCG64":
        return NOT_KNOWN
    inner = state["state"]
    return _CELL.pack(
        STATE,
        inner["state"].to_bytes(16, "little"),
        inner["inc"].to_bytes(16, "little"),
        state["has_uint32"],
        state["uinteger"],
    )


def state_of(env: Any) -> bytes:
    """The state of the environment's generator, packed."""
    cell = np.zeros(CELL_BYTES, np.uint8)
    keep(env, cell)
    return cell.tobytes()


def keep(env: Any, cell: npt.NDArray[np.uint8]) -> None:
    """Write the state of the environment's generator into a cell."""
    bits = getattr(getattr(env.unwrapped, "np_random", None), "bit_generator", None)
    if _READS_MEMORY and keep_pcg64 is not None and type(bits) is np.random.PCG64:
        keep_pcg64(bits.capsule, cell)
    else:
        state = packed(None if bits is None else bits.state)
        cell[:] = np.frombuffer(state, np.uint8)


def _reads_memory() -> bool:
    """Whether the state can be read from a generator's memory, tried on one.

    That takes a quarter of the time of asking for its state, but the layout of the memory depends
    on numpy's version and on the compiler.
    """
    if keep_pcg64 is None:
        return False
    bits, cell = np.random.PCG64(0), np.zeros(CELL_BYTES, np.uint8)
    np.random.Generator(bits).integers(9, dtype=np.uint32)  # so that half of a drawn number is left
    keep_pcg64(bits.capsule, cell)
    return cell.tobytes() == packed(bits.state)


_READS_MEMORY = _reads_memory()


def unpacked(cell: bytes) -> dict[str, Any] | None:
    """The generator's state in numpy's form, if one was kept."""
    flag, state, inc, has_uint32, uinteger = _CELL.unpack(cell)
    if flag != STATE:
        return None
    return {
        "bit_generator": "PCG64",
        "state": {
            "state": int.from_bytes(state, "little"),
            "inc": int.from_bytes(inc, "little"),
        },
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }


def has_usual_stream() -> bool:
    """Whether numpy's global generator is the original one; no other can be seeded."""
    return bool(np.random.get_state(legacy=False)["bit_generator"] == "MT19937")
