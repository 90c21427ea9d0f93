"""What every step does to every row and every worker: in C, or in Python where that is missing.

`ENVFLEET_NO_C` in the environment makes this process, and the workers it starts, use Python.
"""

from __future__ import annotations

import os

from envfleet.engine.rows_python import AUTORESETS, EnvRow, HostState, KeepPcg64, WorkerPort

__all__ = [
    "AUTORESETS",
    "IS_COMPILED",
    "NO_C_VARIABLE",
    "EnvRow",
    "HostState",
    "WorkerPort",
    "collect_steps",
    "common_number",
    "copy_rows",
    "keep_pcg64",
    "note_ends",
    "post_steps",
    "put_rows",
    "step_rows",
    "wait_for_count",
]

NO_C_VARIABLE = "ENVFLEET_NO_C"
keep_pcg64: KeepPcg64 | None
"""None without C: Python cannot read a generator's memory."""

try:
    if os.environ.get(NO_C_VARIABLE):
        raise ImportError(f"{NO_C_VARIABLE} is set")
    from envfleet.engine._rows import (
        collect_steps,
        common_number,
        copy_rows,
        keep_pcg64,
        note_ends,
        post_steps,
        put_rows,
        step_rows,
        wait_for_count,
    )
except ImportError:
    from envfleet.engine.rows_python import (
        collect_steps,
        common_number,
        copy_rows,
        note_ends,
        post_steps,
        put_rows,
        step_rows,
        wait_for_count,
    )

    keep_pcg64 = None

IS_COMPILED = keep_pcg64 is not None
