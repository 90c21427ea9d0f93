"""What every step does to every row and every worker: in C where the package could be compiled.

ENVFLEET_NO_C=1 in the environment selects the Python version. It is read once, at import.
"""

from __future__ import annotations

import os

from envfleet.engine.rows_python import (
    CollectSteps,
    EnvRow,
    HostState,
    KeepPcg64,
    PostSteps,
    WorkerPort,
)

__all__ = [
    "IS_COMPILED",
    "CollectSteps",
    "EnvRow",
    "HostState",
    "KeepPcg64",
    "PostSteps",
    "WorkerPort",
    "collect_steps",
    "common_number",
    "copy_rows",
    "keep_pcg64",
    "note_ends",
    "post_steps",
    "put_rows",
    "step_rows",
    "take_rewards",
    "wait_for_count",
]

post_steps: PostSteps | None
collect_steps: CollectSteps | None
keep_pcg64: KeepPcg64 | None
"""None without C: a fleet can do without these."""

try:
    if os.environ.get("ENVFLEET_NO_C") == "1":
        raise ImportError("ENVFLEET_NO_C=1 selects the Python version")
    from envfleet.engine import _rows
    from envfleet.engine._rows import (
        common_number,
        copy_rows,
        note_ends,
        put_rows,
        step_rows,
        take_rewards,
    )

    post_steps, collect_steps = _rows.post_steps, _rows.collect_steps
    keep_pcg64 = _rows.keep_pcg64
except ImportError:
    from envfleet.engine.rows_python import (
        common_number,
        copy_rows,
        note_ends,
        put_rows,
        step_rows,
        take_rewards,
    )

    post_steps = collect_steps = keep_pcg64 = None

IS_COMPILED = post_steps is not None
