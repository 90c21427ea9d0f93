"""Third-party environments on the fleet: what holds for each, found out anew.

    python benchmarks/third_party.py --json benchmarks/results/third_party.json
    python benchmarks/third_party.py --only LunarLander-v3,NetHackScore-v0

Every family of environments is installed into a virtual environment of its own, with pip, and every
check runs in a process of its own with a deadline: one that crashes or hangs is a cell of the
table. What cannot be installed is a row with pip's reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402
from benchmarks.own_interpreter import Ended, default_folder, interpreter, run, wheel  # noqa: E402
from benchmarks.tables import fill_in, markdown_table  # noqa: E402
from benchmarks.third_party_envs import SUBJECTS, Subject  # noqa: E402
from envfleet.cli.report import Table  # noqa: E402

CHECKS = (
    "by hand",
    *("serial", "thread", "fork", "spawn", "forkserver"),
    *("snapshot", "kill -9, restart", "kill -9, resume", "checkpoint"),
)
"""In this order; the first records what the next five are compared with."""
COMPARED = CHECKS[1:6]
LIMIT_S = 300.0
Cells = dict[str, dict[str, str]]


def checked(subject: Subject, python: Path, folder: Path, limit_s: float) -> Cells:
    """Run all checks of one environment, each in a process of its own."""
    cells: Cells = {}
    for check in CHECKS:
        by_hand = cells.get("by hand", {"cell": "yes"})["cell"]
        if check in COMPARED and not by_hand.startswith("yes"):
            cells[check] = {"cell": "-", "note": ""}
            continue
        command = [str(python), "-W", "ignore", "-m", "benchmarks.third_party_probe"]
        ended = run([*command, subject.name, check, str(folder)], limit_s, folder=folder)
        cells[check] = result(ended)
        say(f"  {check}: {cells[check]['cell']}  {cells[check]['note']}")
        if check == "by hand" and ended.code != 0:
            break
    return cells


def result(ended: Ended) -> dict[str, str]:
    """What a check printed, or how it ended where it printed nothing."""
    # environments print too, also while their process ends
    said = [line for line in ended.out.splitlines() if line.startswith('{"cell"')]
    if ended.code == 0 and said:
        return dict(json.loads(said[-1]))
    last = [line for line in ended.err.splitlines() if line.strip()][-1:]
    return {"cell": ended.how, "note": " ".join(last)[:300]}


def table(found: Mapping[str, Any]) -> Table:
    """One row for each environment; what could not be installed has one cell."""
    rows = []
    for subject in SUBJECTS:
        if subject.name not in found:
            continue
        row = found[subject.name]
        if row["reason"]:
            rows.append((subject.name, "not installed", *[""] * (len(CHECKS) - 1)))
            continue
        cells = row["cells"]
        rows.append((subject.name, *(cells.get(check, {"cell": ""})["cell"] for check in CHECKS)))
    return Table(("environment", "repeats itself", *CHECKS[1:]), tuple(rows))


def notes(found: Mapping[str, Any]) -> str:
    """What cells leave out, as a list."""
    lines = []
    for name, row in found.items():
        if row["reason"]:
            lines.append(f"- {name}: {row['reason']}")
            continue
        for check, one in row["cells"].items():
            is_plain = one["cell"] in ("yes", "exact") or one["cell"].endswith(", exact")
            if one["note"] and not is_plain:
                lines.append(f"- {name}, {check}: {one['note']}")
    return "\n".join(lines)


def say(line: str) -> None:
    """To the one who waits."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Install, check, print, and keep what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, default=default_folder("third_party"))
    parser.add_argument("--only", metavar="NAME;...", help="some environments, or families")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="deadline of each check")
    parser.add_argument("--json", type=Path, help="keep the results here; others there stay")
    parser.add_argument("--write", type=Path, help="fill the table into this page")
    args = parser.parse_args()
    wanted = [name for name in (args.only or "").split(";") if name]
    found: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        found = json.loads(args.json.read_text())
    own = wheel(args.folder / "wheels")
    pythons: dict[str, tuple[Path, str | None]] = {}
    for subject in SUBJECTS:
        if wanted and not {subject.name, subject.family} & set(wanted):
            continue
        say(f"{subject.name} ({', '.join(subject.packages)})")
        if subject.family not in pythons:
            place = args.folder / subject.family
            pythons[subject.family] = interpreter(place, subject.packages, own)
        python, reason = pythons[subject.family]
        row: dict[str, Any] = {"reason": reason or "", "cells": {}, "commit": machine.commit()}
        if reason is None:
            with tempfile.TemporaryDirectory() as folder:
                row["cells"] = checked(subject, python, Path(folder), args.limit_s)
        else:
            say(f"  {reason}")
        found[subject.name] = row
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    text = f"{markdown_table(table(found))}\n\n{notes(found)}"
    print(text)
    if args.write is not None:
        args.write.write_text(fill_in(args.write.read_text(), {"third_party": text}))


if __name__ == "__main__":
    main()
