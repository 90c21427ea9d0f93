"""Measure envfleet on real Ray clusters of several nodes on this machine.

    python benchmarks/cluster.py                        the whole table, minutes
    python benchmarks/cluster.py --rows ant --rounds 4
    python benchmarks/cluster.py --json results.json --write docs/scaling.md

Nodes are processes of Ray on this machine, each with one core of its own by Ray's count, so there
must be as many cores as nodes that compute; those that wait need none. Segments are collected and
not learned from: learning is the same work with and without nodes. Rates of different numbers of
nodes are taken one after another from one run, which grows.

The exit code is 1 if a target is missed, unless --quick was given.
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
        name="cluster",
        about="envfleet on several nodes of Ray: efficiency, cost, and a node that is killed.",
        full=Pace(rounds=8, seconds=4.0),
        quick=Pace(rounds=1, seconds=0.5),
        rates="cluster_rates",
    )
    return run_suite(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
