"""Measure what several agents and Stable-Baselines3 cost on the fleet, against other libraries.

    python benchmarks/multiagent.py                             the whole table
    python benchmarks/multiagent.py --quick                     does everything run?
    python benchmarks/multiagent.py --rows sb3-64 --rounds 30   some rows, more rounds
    python benchmarks/multiagent.py --json results.json --write docs/multi-agent.md

Every row runs in a fresh interpreter. In every round, each contender of the row runs for one slice,
in an order that rotates. A ratio compares two contenders within one round; the table shows the
median of the ratios. The exit code is 1 if a target is missed, unless --quick was given.
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
        name="multiagent",
        about="Several agents and Stable-Baselines3 on the fleet, in interleaved rounds.",
        full=Pace(rounds=30, seconds=0.25),
        quick=Pace(rounds=2, seconds=0.15, part=0.01),
        rates="multiagent_rates",
    )
    return run_suite(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
