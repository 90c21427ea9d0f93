"""How a report looks: drawn by rich on a terminal, plain text elsewhere.

Law: both show the same words in the same order, tables line up, and a pipe or a file gets no
control characters.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from envfleet.cli.report import (
    BarChart,
    BarRow,
    Block,
    Code,
    Finding,
    Findings,
    Heading,
    Level,
    Table,
    Text,
)

if TYPE_CHECKING:
    from rich.console import Console


_COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "bad": "bold red", "info": ""}


class Screen(Protocol):
    """Shows blocks."""

    def show(self, blocks: Iterable[Block]) -> None:
        """Show the blocks, one below the other."""


def screen_on(stream: TextIO, *, plain: bool) -> Screen:
    """The best screen for ``stream``: rich on a terminal, plain text elsewhere."""
    return PlainScreen(stream) if plain or not stream.isatty() else RichScreen(stream)


class PlainScreen:
    """Ordinary characters, aligned with spaces."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        """Write to ``stream``, in ``width`` columns (the terminal's, or 100, when left out)."""
        self._stream = stream
        self._width = width or shutil.get_terminal_size((100, 24)).columns

    def show(self, blocks: Iterable[Block]) -> None:
        """Show the blocks with one empty line between them."""
        texts = ["\n".join(self._lines(block)) for block in blocks]
        if texts:
            self._stream.write("\n\n".join(texts) + "\n")
            self._stream.flush()

    def _lines(self, block: Block) -> list[str]:
        match block:
            case Heading(text):
                return wrapped(text, self._width)
            case Text(text):
                return wrapped(text, self._width)
            case Code(lines):
                return ["    " + line for line in lines]
            case Table():
                return [*table_lines(block), *self._notes(block.notes)]
            case Findings(items):
                return finding_lines(items, self._width)
            case BarChart(items):
                return ["".join(parts) for parts in bar_parts(items, self._width, "#", "|")]

    def _notes(self, notes: Sequence[str]) -> list[str]:
        return [line for note in notes for line in wrapped(note, self._width)]


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Break ``text`` into lines of ``width`` columns; further lines start with ``indent``."""
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines or [""]


def table_lines(table: Table) -> list[str]:
    """A table as lines: names, a rule, rows; two spaces between columns."""
    widths = [
        max(len(cell) for cell in column) for column in zip(table.columns, *table.rows, strict=True)
    ]
    is_right = [name in table.right for name in table.columns]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return [line(table.columns), "  ".join("-" * width for width in widths), *map(line, table.rows)]


def finding_lines(items: Sequence[Finding], width: int) -> list[str]:
    """Findings as lines: level, name, text; the remedy below its finding."""
    name_width = max((len(item.name) for item in items), default=0)
    indent = " " * (6 + name_width + 2)
    lines: list[str] = []
    for item in items:
        lines += wrapped(f"{item.level:<4}  {item.name:<{name_width}}  {item.text}", width, indent)
        if item.remedy:
            lines += wrapped(f"{indent}-> {item.remedy}", width, indent + "   ")
    return lines


def bar_parts(
    items: Sequence[BarRow], width: int, fill: str, mark: str
) -> list[tuple[str, str, str, str]]:
    """Each bar as its name, what lies before the mark, the mark with what lies beyond, its text."""
    name_width = max((len(item.name) for item in items), default=0)
    text_width = max((len(item.text) for item in items), default=0)
    room = max(0, min(60, width - name_width - text_width - 4))
    longest = max((max(item.value, item.mark or 0.0) for item in items), default=0.0)
    found = []
    for item in items:
        cells = [" "] * (room + 1)
        for cell in range(_cells(item.value, longest, room)):
            cells[cell] = fill
        at = room + 1
        if item.mark is not None:
            at = _cells(item.mark, longest, room)
            cells[at] = mark
        drawn = "".join(cells)
        found.append(
            (f"{item.name:>{name_width}}  ", drawn[:at], drawn[at:], f" {item.text:>{text_width}}")
        )
    return found


def _cells(value: float, longest: float, room: int) -> int:
    return round(room * value / longest) if longest > 0 else 0


class RichScreen:
    """Colours and rules, drawn by rich."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        """Write to ``stream``, in ``width`` columns (the terminal's when left out)."""
        from rich.console import Console

        self._console: Console = Console(file=stream, width=width, highlight=False, markup=False)

    def show(self, blocks: Iterable[Block]) -> None:
        """Show the blocks with one empty line between them."""
        for index, block in enumerate(blocks):
            if index:
                self._console.print()
            self._show(block)

    def _show(self, block: Block) -> None:
        console = self._console
        match block:
            case Heading(text):
                console.print(text, style="bold cyan")
            case Text(text, level):
                console.print(text, style=_COLOURS[level] or None)
            case Code(lines):
                for line in lines:
                    # soft_wrap: a pasted line must come out of the terminal as one line
                    console.print("    " + line, style="bold", soft_wrap=True)
            case Table():
                self._show_table(block)
            case Findings(items):
                self._show_findings(items)
            case BarChart(items):
                self._show_bars(items)

    def _show_table(self, block: Table) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as Drawn

        drawn = Drawn(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
        for name in block.columns:
            right = name in block.right
            drawn.add_column(name, justify="right" if right else "left", no_wrap=True)
        levels: Sequence[Level] = block.levels or ["info"] * len(block.rows)
        for row, level in zip(block.rows, levels, strict=True):
            drawn.add_row(*row, style=_COLOURS[level] or None)
        self._console.print(drawn)
        for note in block.notes:
            self._console.print(note, style="dim")

    def _show_findings(self, items: Sequence[Finding]) -> None:
        from rich.table import Table as Drawn
        from rich.text import Text as Styled

        drawn = Drawn.grid(padding=(0, 2))
        drawn.add_column(no_wrap=True)
        drawn.add_column(no_wrap=True)
        drawn.add_column()
        for item in items:
            text = Styled(item.text)
            if item.remedy:
                text.append(f"\n-> {item.remedy}", style="bold")
            drawn.add_row(Styled(item.level, style=_COLOURS[item.level]), item.name, text)
        self._console.print(drawn)

    def _show_bars(self, items: Sequence[BarRow]) -> None:
        from rich.text import Text as Styled

        for name, before, beyond, text in bar_parts(items, self._console.width, "━", "│"):
            line = Styled(no_wrap=True)
            line.append(name)
            line.append(before, "green")
            line.append(beyond[:1], "yellow" if beyond[:1] == "│" else "green")
            line.append(beyond[1:], "green")
            line.append(text)
            self._console.print(line)
