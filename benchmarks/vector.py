"""The speed, memory and scale of envfleet against its peers, from one command.

    python benchmarks/vector.py                                  the whole table, some eight minutes
    python benchmarks/vector.py --quick                          two minutes: does everything run?
    python benchmarks/vector.py --rows cartpole,ant --rounds 30  some rows, more rounds
    python benchmarks/vector.py --json results.json --write README.md docs/performance.md

Every row runs in a fresh interpreter. In every round each contender of the row runs one slice, in
an order that rotates; ratios are taken within a round, and the median of the ratios is what counts.
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
        name="vector",
        about="Speed, memory and scale of envfleet against its peers, in interleaved rounds.",
        full=Pace(rounds=60, seconds=0.125),
        quick=Pace(rounds=2, seconds=0.15),
    )
    return command.main(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
