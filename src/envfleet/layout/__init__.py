"""Spaces to bytes: where each part of an observation or action lies in shared memory.

`plan_layout` turns a Gymnasium space into a `Layout`; `Layout.bind` lays it over a buffer and gives
`Columns`, through which rows are written and read. What has no place in the row is returned as a
`Spill`, which the caller carries by other means and hands back when reading. Who may write which
row, and when, is the engine's business; so is who owns the buffer.
"""

from envfleet.layout.columns import Columns
from envfleet.layout.fields import Codec, Field, Spill, Tree, array, cell, spill
from envfleet.layout.record import RecordSpace
from envfleet.layout.spaces import (
    SEQUENCE_CELL_BYTES,
    TEXT_CELL_MAX_BYTES,
    Layout,
    are_equal,
    are_same,
    plan_layout,
    register,
)

__all__ = [
    "SEQUENCE_CELL_BYTES",
    "TEXT_CELL_MAX_BYTES",
    "Codec",
    "Columns",
    "Field",
    "Layout",
    "RecordSpace",
    "Spill",
    "Tree",
    "are_equal",
    "are_same",
    "array",
    "cell",
    "plan_layout",
    "register",
    "spill",
]
