"""Packages that only some environments need, imported when one of those is made."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from envfleet.errors import MissingExtra


def need(module: str, *, wanted_by: str, install: str) -> Any:
    """The module, or MissingExtra with the line that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != module.partition(".")[0]:
            raise  # installed, but broken inside: not to be disguised as missing
        raise MissingExtra(f"{wanted_by} needs {exc.name}: {install}") from exc
