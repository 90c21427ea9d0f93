"""Other libraries on the fleet: every program of docs/clients.md, run against the library itself.

    python benchmarks/clients.py --write docs/clients.md
    python benchmarks/clients.py --only skrl,TorchRL

A block of code that names its client (```python skrl) is run in a virtual environment of its own,
into which the client is installed; the others need nothing but the project's own `dev` extra. A
program holds if it ends by itself without an error: what it has to find is asserted in it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.own_interpreter import default_folder, interpreter, run, wheel  # noqa: E402
from benchmarks.tables import fill_in, markdown_table  # noqa: E402
from envfleet.cli.report import Table  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"
TORCH = "torch==2.13.0"
PACKAGES = {
    "skrl": ("skrl", TORCH),
    "torchrl": ("torchrl", TORCH),
    "rllib": ("ray[rllib]", TORCH),
    "tianshou": ("tianshou", TORCH),
    "minari": ("minari[all]", "pillow"),
    "envpool": ("envpool",),
    "mo-gymnasium": ("mo-gymnasium",),
}
"""What pip is asked for; the first is the client."""
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Program:
    """A block of code of the page."""

    heading: str
    client: str | None
    """None: it runs with what the project itself has."""
    code: str


def programs(page: str) -> list[Program]:
    """All blocks of Python, each under the heading that it stands below."""
    found = []
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading = part.partition("\n")[0]
        for client, code in re.findall(r"```python ?([\w-]*)\n(.*?)```", part, re.DOTALL):
            found.append(Program(heading, client or None, code))
    return found


def ran(program: Program, folder: Path, own: Path) -> tuple[str, str]:
    """The version of the client, and how its program ended."""
    python, version = Path(sys.executable), "-"
    if program.client is not None:
        packages = PACKAGES[program.client]
        python, reason = interpreter(folder / program.client, packages, own)
        if reason is not None:
            return "not installed", reason
        name = re.sub(r"[\[=].*", "", packages[0])
        asked = f"from importlib.metadata import version; print(version({name!r}))"
        version = run([str(python), "-c", asked], LIMIT_S).out.strip()
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "program.py"
        script.write_text(program.code)
        ended = run([str(python), str(script)], LIMIT_S, MINARI_DATASETS_PATH=place)
    if ended.code == 0:
        return version, "runs"
    last = [line for line in ended.err.splitlines() if line.strip()][-1:]
    return version, f"{ended.how}: {' '.join(last)[:200]}"


def main() -> None:
    """Run all programs, or some, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, default=default_folder("clients"))
    parser.add_argument("--only", metavar="HEADING,...", help="the headings of some programs")
    parser.add_argument("--write", type=Path, help="fill the table into this page")
    args = parser.parse_args()
    wanted = [name.lower() for name in (args.only or "").split(",") if name]
    own = wheel(args.folder / "wheels")
    rows = []
    for program in programs(PAGE.read_text()):
        if wanted and program.heading.lower() not in wanted:
            continue
        rows.append((program.heading, *ran(program, args.folder, own)))
        print(*rows[-1], sep=": ", file=sys.stderr, flush=True)
    text = markdown_table(Table(("client", "version", "its program"), tuple(rows)))
    print(text)
    if args.write is not None:
        args.write.write_text(fill_in(args.write.read_text(), {"clients": text}))
    sys.exit(any(row[2] != "runs" for row in rows))


if __name__ == "__main__":
    main()
