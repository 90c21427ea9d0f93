"""What every step does to every row and every worker: in C where the package could be compiled."""

from __future__ import annotations

from envfleet.engine.plain_rows import Desk, Line, LockStep, Port

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

lock_step: LockStep | None
"""None without C: a fleet can do without it."""

try:
    from envfleet.engine._rows import common_number, copy_rows, note_ends, step_rows
    from envfleet.engine._rows import lock_step as _lock_step

    lock_step = _lock_step
except ImportError:
    from envfleet.engine.plain_rows import common_number, copy_rows, note_ends, step_rows

    lock_step = None

IS_COMPILED = lock_step is not None
