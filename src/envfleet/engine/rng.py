"""What an episode starts from, in a few bytes of shared memory, where it outlives a worker."""

from __future__ import annotations

import struct
from typing import Any

UNKNOWN, SEEDED, STATE = 0, 1, 2
_CELL = struct.Struct("=B7x16s16sII")

CELL_BYTES = _CELL.size
SEED_SAYS_ALL = bytes([SEEDED]).ljust(CELL_BYTES, b"\0")
NOT_KNOWN = bytes(CELL_BYTES)


def packed(state: dict[str, Any] | None) -> bytes:
    """A generator's state, as numpy gives it; of another kind than PCG64, or None: not known."""
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
    """What the environment's generator would start an episode from, packed."""
    generator = getattr(env.unwrapped, "np_random", None)
    bits = getattr(generator, "bit_generator", None)
    return packed(None if bits is None else bits.state)


def unpacked(cell: bytes) -> dict[str, Any] | None:
    """The generator's state, as numpy takes it, if one was kept."""
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
