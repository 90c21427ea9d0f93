"""Measure the speed, memory and scale of envfleet against other libraries.

    python benchmarks/vector.py                                  the whole table, about ten minutes
    python benchmarks/vector.py --quick                          two minutes: does everything run?
    python benchmarks/vector.py --rows cartpole,ant --rounds 30  some rows, more rounds
    python benchmarks/vector.py --json results.json --write README.md docs/performance.md

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
        name="vector",
        about="Speed, memory and scale of envfleet against other libraries, in interleaved rounds.",
        full=Pace(rounds=60, seconds=0.125),
        quick=Pace(rounds=2, seconds=0.15),
        summary=("cartpole", "ant", "images", "sleeping", "native"),
    )
    return run_suite(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
