"""Measure one row in a fresh interpreter: `python -m benchmarks.run_row SUITE ROW ...`.

A fresh interpreter keeps one row (loaded PyTorch, another library's threads, garbage) from slowing
down the next. The top of this module imports very little, because under spawn every process of
every contender runs it.
"""

import argparse
import json
import signal
import sys
from pathlib import Path


def main() -> None:
    """Measure the row and write its outcome as JSON."""
    from benchmarks.rounds import Pace
    from benchmarks.suite import rows_of
    from envfleet.observe.progress import progress_on

    parser = argparse.ArgumentParser(prog="benchmarks.run_row")
    parser.add_argument("suite")
    parser.add_argument("row")
    parser.add_argument("--pace", type=json.loads, required=True)
    parser.add_argument("--title", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    # SIGTERM ends it like Ctrl-C: everything open is closed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # rich would leave threads and modules in a process that is about to fork
    progress = progress_on(sys.stderr)
    outcome = rows_of(given.suite)[given.row](Pace(**given.pace), progress, given.title)
    given.out.write_text(json.dumps(outcome.as_json()))


if __name__ == "__main__":
    main()
