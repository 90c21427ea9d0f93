"""The speed, memory and scale of envfleet against its peers, from one command.

    python benchmarks/vector.py                                  the whole table, some eight minutes
    python benchmarks/vector.py --quick                          two minutes: does everything run?
    python benchmarks/vector.py --rows cartpole,ant --rounds 30  some rows, more rounds
    python benchmarks/vector.py --json results.json --write README.md docs/performance.md

Every row runs in a fresh interpreter. In every round each contender of the row runs one slice, in
an order that rotates; ratios are taken within a round, and the median of the ratios is what counts.
The exit code is 1 if a floor is missed, unless --quick.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, SECONDS = 60, 0.125
QUICK_ROUNDS, QUICK_SECONDS = 2, 0.15
BUSY_LOAD = 0.3
"""Load per core at the start above which the figures say more about the neighbours."""

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run as a script, Python looks in benchmarks/ only


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, and say whether every floor holds."""
    from benchmarks import machine

    given = _arguments(arguments)
    if given.read is not None:
        result = json.loads(given.read.read_text())
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and with it the row under way
        found = machine.facts()
        busy = found["load_before"] / found["cores"]
        if busy > BUSY_LOAD:
            _say(f"the machine is busy (load {busy:.2f} per core): expect noise")
        result = {
            "command": shlex.join(["python", "benchmarks/vector.py", *_lasting(given)]),
            "machine": found,
            "rounds": given.rounds,
            "seconds": given.seconds,
            "rows": measure(given.rows, given.rounds, given.seconds),
        }
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return show(result, given)


def measure(names: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Each row's outcome, in order, by name."""
    outcomes: dict[str, Any] = {}
    for number, name in enumerate(names, 1):
        title = f"{name} ({number} of {len(names)})"
        start_s = time.monotonic()
        _say(f"{title} ...")
        outcomes[name] = measure_apart(name, rounds, seconds, title)
        _say(f"{title} took {time.monotonic() - start_s:.0f} s")
    return outcomes


def measure_apart(name: str, rounds: int, seconds: float, title: str) -> dict[str, Any]:
    """One row in an interpreter of its own."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcome.json"
        command = [
            *(sys.executable, "-m", "benchmarks.row", name, "--title", title, "--out", str(out)),
            *("--rounds", str(rounds), "--seconds", str(seconds)),
        ]
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        if code:
            raise SystemExit(f"row {name} ended with exit code {code}; its error stands above")
        outcome: dict[str, Any] = json.loads(out.read_text())
        return outcome


def show(result: dict[str, Any], given: argparse.Namespace) -> int:
    """Print the tables, fill them in where asked, and judge."""
    from benchmarks import machine, tables

    rows = result["rows"].values()
    lines = [tables.line_from(line) for row in rows for line in row["lines"]]
    entries = [tables.entry_from(entry) for row in rows for entry in row["entries"]]
    notes = [note for row in rows for note in row["notes"]]
    floors, rates = tables.floors_table(lines), tables.rates_table(entries)
    made = [
        f"{result['rounds']} interleaved rounds of {result['seconds']:g} s per contender, medians.",
        *(f"{line}." for line in machine.describe(result["machine"])),
    ]
    command = result["command"]
    in_markdown = {
        "vector": "\n\n".join([tables.markdown_table(floors), " ".join(made), f"`{command}`"]),
        "rates": "\n\n".join([tables.markdown_table(rates), "\n".join(f"- {n}" for n in notes)]),
    }
    if given.markdown:
        print("\n\n".join(in_markdown.values()))
    else:
        shown = [tables.text_table(table) for table in (floors, rates) if table.rows]
        print("\n\n".join([*shown, *filter(None, ["\n".join(notes)]), "\n".join([*made, command])]))
    for path in given.write:
        path.write_text(tables.fill_in(path.read_text(), in_markdown))
        _say(f"filled in {path}")
    missed = [line for line in lines if not line.is_kept]
    if missed:
        _say(f"{len(missed)} of {len(lines)} floors missed")
    return 1 if missed and not given.quick else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    from benchmarks.rows import ROWS

    parser = argparse.ArgumentParser(
        description="Speed, memory and scale of envfleet against its peers, in interleaved rounds."
    )
    parser.add_argument("--rows", help=f"which rows, by commas: {','.join(ROWS)} (default: all)")
    parser.add_argument(
        "--rounds", type=_positive(int), help=f"how many rounds (default: {ROUNDS})"
    )
    parser.add_argument(
        "--seconds", type=_positive(float), help=f"length of a slice (default: {SECONDS})"
    )
    parser.add_argument("--quick", action="store_true", help="few short rounds; floors not judged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="fill the tables in between their markers, <!-- table:vector --> and <!-- /table -->",
    )
    parser.add_argument(
        "--from",
        dest="read",
        type=Path,
        metavar="FILE",
        help="measure nothing: show what an earlier run wrote with --json",
    )
    given = parser.parse_args(arguments)
    if given.write and given.read is None and (given.rows or given.quick):
        parser.error("--write needs a full run: leave out --rows and --quick")
    names = given.rows.split(",") if given.rows else list(ROWS)
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    given.rows = names
    given.rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    given.seconds = given.seconds or (QUICK_SECONDS if given.quick else SECONDS)
    return given


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = kind(text)
        if number <= 0:
            raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
        return number

    parse.__name__ = kind.__name__  # argparse shows it for what is no number at all
    return parse


def _lasting(given: argparse.Namespace) -> list[str]:
    """The arguments that decide what was measured, for whoever wants to repeat it."""
    from benchmarks.rows import ROWS

    parts = []
    if given.rows != list(ROWS):
        parts += ["--rows", ",".join(given.rows)]
    if given.quick:
        parts.append("--quick")
    if given.rounds != (QUICK_ROUNDS if given.quick else ROUNDS):
        parts += ["--rounds", str(given.rounds)]
    if given.seconds != (QUICK_SECONDS if given.quick else SECONDS):
        parts += ["--seconds", str(given.seconds)]
    return parts


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
