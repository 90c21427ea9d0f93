"""What an episode starts from, in a few bytes of shared memory, where it outlives a worker."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

UNKNOWN, SEEDED, STATE = 0, 1, 2
_CELL = struct.Struct("=B7x16s16sII")

Cell = npt.NDArray[np.uint8]


def note_seeded(cell: Cell) -> None:
    """The episode's seed says everything."""
    cell[0] = SEEDED


def note_state(cell: Cell, state: dict[str, Any] | None) -> None:
    """Keep a generator's state, as numpy gives it; of another kind than PCG64, or None: unknown."""
    cell[0] = UNKNOWN
    if state is None or state.get("bit_generator") != "PCG64":
        return
    inner = state["state"]
    _CELL.pack_into(
        cell.data,
        0,
        STATE,
        inner["state"].to_bytes(16, "little"),
        inner["inc"].to_bytes(16, "little"),
        state["has_uint32"],
        state["uinteger"],
    )


def read_state(cell: Cell) -> dict[str, Any] | None:
    """The generator's state, as numpy takes it, if one was kept."""
    flag, state, inc, has_uint32, uinteger = _CELL.unpack_from(cell.tobytes())
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
