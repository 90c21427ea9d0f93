"""What every step does to every row and every worker: in C where the package could be compiled."""

from __future__ import annotations

from envfleet.engine.plain_rows import Desk, Line, Port

__all__ = [
    "IS_COMPILED",
    "Desk",
    "Line",
    "Port",
    "common_number",
    "copy_rows",
    "lock_step",
    "note_ends",
    "step_rows",
]

try:
    from envfleet.engine._rows import common_number, copy_rows, lock_step, note_ends, step_rows

    IS_COMPILED = True
except ImportError:
    from envfleet.engine.plain_rows import (
        common_number,
        copy_rows,
        lock_step,
        note_ends,
        step_rows,
    )

    IS_COMPILED = False
