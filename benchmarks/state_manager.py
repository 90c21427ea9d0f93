"""What playing many text environments takes, and what sharing the work gains, from one command.

    python benchmarks/state_manager.py                          the whole table, some ten minutes
    python benchmarks/state_manager.py --quick                  a minute: does everything run?
    python benchmarks/state_manager.py --rows mixed,cpu-bound   some rows
    python benchmarks/state_manager.py --json results.json --write docs/performance.md

Every row runs in a fresh interpreter. In every round each contender of the row runs one slice, in
an order that rotates; ratios are taken within a round, and the median of the ratios is what counts.
What is counted is what a row is about: levels, steps, or the beginnings and turns of environments.
Turns are replayed: what a random policy answered was written down once, before any clock started.

The rows of Sokoban are against gym-sokoban, which depends on gym, no longer maintained, and runs
without it: pip install --no-deps gym-sokoban==0.0.6 imageio. The first run of the row of WebShop
builds a catalogue of 100,000 products in the user's cache folder (or $ENVFLEET_CACHE).

The exit code is 1 if a floor is missed, unless --quick.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run as a script, Python looks in benchmarks/ only


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, and say whether every floor holds."""
    from benchmarks import command
    from benchmarks.outcome import Pace

    suite = command.Suite(
        name="state_manager",
        about="Speed, memory and scale of the environments for language models.",
        full=Pace(rounds=20, seconds=0.5),
        quick=Pace(rounds=2, seconds=0.02, part=0.02),
        rates="state_manager_rates",
    )
    return command.main(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
