"""What every step does to every row and every worker: in C where the package could be compiled."""

from __future__ import annotations

from envfleet.engine.rows_python import (
    AUTORESETS,
    CollectSteps,
    EnvRow,
    HostState,
    KeepPcg64,
    PostSteps,
    WorkerPort,
)

__all__ = [
    "AUTORESETS",
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
]

post_steps: PostSteps | None
collect_steps: CollectSteps | None
keep_pcg64: KeepPcg64 | None
"""None without C: a fleet can do without these."""

try:
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
