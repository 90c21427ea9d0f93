"""Figures and events as lines of JSON; a kill or a full disk never leaves half a line behind."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envfleet.observe.append import append
from envfleet.observe.figures import Figures

__all__ = ["JsonLines", "add_line", "read_lines", "rewrite"]


class JsonLines:
    """A sink: one line for every note."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, env_steps: int, figures: Figures) -> None:
        """Add a line."""
        add_line(self._path, {"env_steps": env_steps, **figures})

    def close(self) -> None:
        """Nothing is held back."""


def add_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Add one entry; JSON has no NaN and no infinity, they become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in entry.items()
    }
    append(path, json.dumps(finite).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All entries that can be read; a kill may have left half of one at the end."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError is one of the former
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def rewrite(path: Path, text: str) -> None:
    """Replace a file: the old content or the new one is there, never a part of it.

    What no encoding has, as half a surrogate pair in an environment's error, is written as text.
    """
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text, errors="backslashreplace")
    unfinished.replace(path)
