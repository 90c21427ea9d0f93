"""The command line shared by vector.py, ppo.py and state_manager.py.

    arguments ─► rows, each in a fresh interpreter ─► result ─► tables, --json, --write, exit code

A suite called NAME has the script benchmarks/NAME.py, its rows in benchmarks/NAME_rows.py, and the
marker <!-- table:NAME --> in documents. A result is plain data: the pace, whether the run was a
quick one, the machine, and the outcome of each row with the commit of the measured code. Rows of an
earlier result are kept only if it has the same pace and machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import machine, tables
from benchmarks.rounds import Pace, Row

ROOT = Path(__file__).resolve().parents[1]
BUSY_LOAD = 0.3
"""Load per core at the start above which a warning says that the figures will be noisy."""


@dataclass(frozen=True, slots=True)
class Suite:
    """What one benchmark script measures, and how long."""

    name: str
    about: str
    full: Pace
    quick: Pace
    learns: bool = False
    """Some rows train with several seeds, and the table shows the command of each row."""
    rates: str = "rates"
    """The marker of the table of rates, for a document that has several."""
    summary: tuple[str, ...] = ()
    """Rows whose first lines form a short table, at the marker <!-- table:NAME_summary -->."""


def rows_of(suite: str) -> dict[str, Row]:
    """The rows of a suite, by name."""
    rows: dict[str, Row] = importlib.import_module(f"benchmarks.{suite}_rows").ROWS
    return rows


def run_suite(suite: Suite, arguments: Sequence[str] | None = None) -> int:
    """Measure, show the tables, and return 1 if a target is missed."""
    given = _arguments(suite, arguments)
    if given.read is None or given.rows:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            result = _measured(suite, given)  # SIGTERM ends the running row too
        finally:
            signal.signal(signal.SIGTERM, before)
    else:
        result = _combined(suite, given.read)
        _keep(result, given)
    return show(suite, result, given)


def _measured(suite: Suite, given: argparse.Namespace) -> dict[str, Any]:
    """The outcome of each row, in the suite's order; saved after every row."""
    if given.json is not None:  # fail now, not after the first row
        given.json.parent.mkdir(parents=True, exist_ok=True)
    found = machine.facts()
    busy = found["load_before"] / found["cores"]
    if busy > BUSY_LOAD:
        _say(f"the machine is busy (load {busy:.2f} per core): expect noise")
    pace, names = given.pace, given.rows or list(rows_of(suite.name))
    outcomes: dict[str, Any] = {}
    if given.read is not None:
        earlier = _combined(suite, given.read)
        _check_alike(given.read[0], earlier, {"pace": _lasting(pace), "machine": found})
        outcomes = earlier["rows"]
    result: dict[str, Any] = {
        "pace": _lasting(pace),
        "quick": given.quick,
        "machine": found,
        "rows": {},
    }
    for number, name in enumerate(names, 1):
        title = f"{name} ({number} of {len(names)})"
        start_s = time.monotonic()
        _say(f"{title} ...")
        before = machine.commit()
        if before is None:
            _say(f"{title}: the commit of the code in {machine.CODE.parent} is not known")
        outcomes[name] = measure_in_fresh_process(suite.name, name, pace, title)
        if before is not None:
            outcomes[name]["commit"] = _commit(before, machine.commit())
        result["rows"] = {one: outcomes[one] for one in rows_of(suite.name) if one in outcomes}
        _keep(result, given)
        _say(f"{title} took {time.monotonic() - start_s:.0f} s")
    return result


def _commit(before: str, after: str | None) -> str:
    """The commit to record for a row; marked with + if it changed while the row ran."""
    # processes import when they start, so some may have loaded the newer code
    return before if after == before else f"{before.removesuffix('+')}+"


def _combined(suite: Suite, paths: Sequence[Path]) -> dict[str, Any]:
    """The rows of all these results as one; of a row that is in several, the last counts."""
    result: dict[str, Any] = json.loads(paths[0].read_text())
    rows = dict(result["rows"])
    for path in paths[1:]:
        other = json.loads(path.read_text())
        _check_alike(path, other, result)
        rows |= other["rows"]
    order = [*rows_of(suite.name), *rows]  # a row that was renamed comes last
    return result | {"rows": {name: rows[name] for name in dict.fromkeys(order) if name in rows}}


def _check_alike(path: Path, result: dict[str, Any], other: dict[str, Any]) -> None:
    """Refuse to combine rows that were not measured in the same way."""
    differing = [
        *(["another pace"] if result["pace"] != other["pace"] else []),
        *(
            ["another machine or other versions"]
            if machine.kind(result["machine"]) != machine.kind(other["machine"])
            else []
        ),
    ]
    if differing:
        raise SystemExit(
            f"{path} was measured at {' and on '.join(differing)}, so its rows cannot be combined "
            "with the others; measure them again"
        )


def _lasting(pace: Pace) -> dict[str, Any]:
    """The parts of a pace that affect the figures: all except the number of parallel jobs."""
    return {name: value for name, value in asdict(pace).items() if name != "jobs"}


def measure_in_fresh_process(suite: str, name: str, pace: Pace, title: str) -> dict[str, Any]:
    """Measure one row in a fresh interpreter."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcome.json"
        command = [
            *(sys.executable, "-m", "benchmarks.run_row", suite, name),
            *("--title", title, "--out", str(out), "--pace", json.dumps(asdict(pace))),
        ]
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        if code:
            raise SystemExit(f"row {name} ended with exit code {code}; its error is printed above")
        outcome: dict[str, Any] = json.loads(out.read_text())
        return outcome


def _keep(result: dict[str, Any], given: argparse.Namespace) -> None:
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


# ---- what is shown ------------------------------------------------------------------------------


def show(suite: Suite, result: dict[str, Any], given: argparse.Namespace) -> int:
    """Print the tables, fill them into documents, and return the exit code."""
    rows = result["rows"]
    named = [(name, tables.line_from(line)) for name in rows for line in rows[name]["lines"]]
    lines = [line for _, line in named]
    names = [name for name, _ in named] if suite.learns else []
    targets = tables.targets_table(lines, names)
    first = {name: tables.line_from(rows[name]["lines"][0]) for name in rows if rows[name]["lines"]}
    summary = tables.summary_table([first[name] for name in suite.summary if name in first])
    with_commands = tables.targets_table(
        lines, commands=[f"`{_command(suite, result, name)}`" for name in names]
    )
    rates = tables.rates_table(
        [tables.entry_from(entry) for row in rows.values() for entry in row["entries"]]
    )
    curves = tables.curves_table(
        [tables.curves_from(curves) for row in rows.values() for curves in row["curves"]]
    )
    notes = [note for row in rows.values() for note in row["notes"]]
    pace, command = Pace(**result["pace"]), _command(suite, result)
    made = [
        f"{pace.rounds} interleaved rounds of {pace.seconds:g} s per contender, medians.",
        *(f"{line}." for line in machine.describe(result["machine"])),
    ]
    if on := tables.provenance({name: row.get("commit") for name, row in rows.items()}):
        made.append(f"{on}.")
    in_markdown = {
        suite.name: "\n\n".join(
            [tables.markdown_table(with_commands), " ".join(made), f"`{command}`"]
        ),
        suite.rates: "\n\n".join(
            [tables.markdown_table(rates), "\n".join(f"- {n}" for n in notes)]
        ),
    }
    if summary.rows:
        in_markdown[f"{suite.name}_summary"] = "\n\n".join(
            [tables.markdown_table(summary), " ".join(made), f"`{command}`"]
        )
    if curves.rows:
        in_markdown["curves"] = tables.markdown_table(curves)
    if given.markdown:
        print("\n\n".join(in_markdown.values()))
    else:
        shown = [tables.text_table(table) for table in (targets, rates, curves) if table.rows]
        print("\n\n".join([*shown, *filter(None, ["\n".join(notes)]), "\n".join([*made, command])]))
    for path in given.write:
        path.write_text(tables.fill_in(path.read_text(), in_markdown))
        _say(f"filled in {path}")
    missed = [line for line in lines if not line.is_met]
    if missed:
        _say(f"{len(missed)} of {len(lines)} targets missed")
    return 1 if missed and not given.quick else 0


def _command(suite: Suite, result: dict[str, Any], row: str | None = None) -> str:
    """The command that repeats a result, or one row of it."""
    pace, names = Pace(**result["pace"]), list(result["rows"]) if row is None else [row]
    usual, options = suite.quick if result["quick"] else suite.full, ["rounds", "seconds"]
    if row is None or _may_learn(result["rows"][row]):
        options.append("seeds")
    parts = ["python", f"benchmarks/{suite.name}.py"]
    if names != list(rows_of(suite.name)):
        parts += ["--rows", ",".join(names)]
    if result["quick"]:
        parts.append("--quick")
    for option in options:
        if getattr(pace, option) != getattr(usual, option):
            parts += [f"--{option}", f"{getattr(pace, option):g}"]
    return shlex.join(parts)


def _may_learn(row: dict[str, Any]) -> bool:
    """Whether a row trains with several seeds. A failed one has no curves, so it may."""
    return bool(row["curves"]) or any(line["failure"] is not None for line in row["lines"])


# ---- what can be asked for ----------------------------------------------------------------------


def _arguments(suite: Suite, arguments: Sequence[str] | None) -> argparse.Namespace:
    known = list(rows_of(suite.name))
    full = suite.full
    parser = argparse.ArgumentParser(description=suite.about)
    parser.add_argument("--rows", help=f"rows, by commas: {','.join(known)} (default: all)")
    parser.add_argument(
        "--rounds", type=_positive(int), help=f"number of rounds (default: {full.rounds})"
    )
    parser.add_argument(
        "--seconds", type=_positive(float), help=f"seconds per slice (default: {full.seconds})"
    )
    if suite.learns:
        parser.add_argument(
            "--seeds", type=_positive(int), help=f"runs per row that learns (default: {full.seeds})"
        )
        parser.add_argument(
            "--jobs", type=_positive(int), default=1, help="number of parallel runs (default: 1)"
        )
    parser.add_argument(
        "--quick", action="store_true", help="a little of every row; ignores targets"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure to FILE, row by row"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="fill the tables in between their markers, "
        f"<!-- table:{suite.name} --> and <!-- /table -->",
    )
    parser.add_argument(
        "--from",
        dest="read",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="show the result that an earlier run wrote with --json, without measuring; several "
        "are shown as one; with --rows, measure those rows again and keep the others",
    )
    given = parser.parse_args(arguments)
    if given.write and given.read is None and (given.rows or given.quick):
        parser.error("--write needs a full run: leave out --rows and --quick")
    given.rows = given.rows.split(",") if given.rows else []
    unknown = [name for name in given.rows if name not in known]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(known)}")
    usual = suite.quick if given.quick else full
    chosen = {name: getattr(given, name, None) for name in ("rounds", "seconds", "seeds", "jobs")}
    given.pace = replace(usual, **{name: value for name, value in chosen.items() if value})
    return given


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = kind(text)
        if number <= 0:
            raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
        return number

    parse.__name__ = kind.__name__  # argparse shows this name if the text is not a number
    return parse


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
