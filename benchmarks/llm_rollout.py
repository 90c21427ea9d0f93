"""Measure shared inference and rollouts with language models.

    python benchmarks/llm_rollout.py                        the whole table
    python benchmarks/llm_rollout.py --quick                does everything run?
    python benchmarks/llm_rollout.py --rows broker          some rows
    python benchmarks/llm_rollout.py --json results.json --write docs/llm-rollouts.md
    python benchmarks/llm_rollout.py --from results.json --write docs/llm-rollouts.md

Every row runs in a fresh interpreter. Models are a script, asked in this process or over HTTP, and
the small embedded model. The row against RAGEN needs its repository: `peer_ragen.py` says how. The
whole table takes about eight minutes. The exit code is 1 if a target is missed, unless --quick was
given.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, its parent is not


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the tables, and return 1 if a target is missed."""
    from benchmarks.rounds import Pace
    from benchmarks.suite import Suite, run_suite

    suite = Suite(
        name="llm_rollout",
        about="Shared inference and rollouts with language models, in interleaved rounds.",
        full=Pace(rounds=10, seconds=1.0),
        quick=Pace(rounds=1, seconds=0.2, part=0.1),
        rates="llm_rollout_rates",
    )
    return run_suite(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
