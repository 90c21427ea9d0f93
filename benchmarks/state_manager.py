"""Measure how fast many text environments run, and what parallel workers gain.

    python benchmarks/state_manager.py                          the whole table, about ten minutes
    python benchmarks/state_manager.py --quick                  a minute: does everything run?
    python benchmarks/state_manager.py --rows mixed,cpu-bound   some rows
    python benchmarks/state_manager.py --json results.json --write docs/performance.md

Every row runs in a fresh interpreter. In every round, each contender of the row runs for one slice,
in an order that rotates. A ratio compares two contenders within one round; the table shows the
median of the ratios. A row counts levels, steps, or resets and turns of environments. Turns are
replayed: the answers of a random policy are recorded once, before any clock starts.

The Sokoban rows compare with gym-sokoban, which depends on gym. gym is no longer maintained, and
gym-sokoban runs without it: pip install --no-deps gym-sokoban==0.0.6 imageio. The first run of the
WebShop row builds a catalogue of 100,000 products in the user's cache folder (or $ENVFLEET_CACHE).

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
        name="state_manager",
        about="Speed, memory and scale of text environments for language models.",
        full=Pace(rounds=20, seconds=0.5),
        quick=Pace(rounds=2, seconds=0.02, part=0.02),
        rates="state_manager_rates",
    )
    return run_suite(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
