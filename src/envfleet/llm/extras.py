"""Optional packages, imported when a feature that needs one is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from envfleet.errors import MissingExtra


def import_extra(module: str, *, wanted_by: str, install: str) -> Any:
    """The module, or MissingExtra with the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != module.partition(".")[0]:
            raise  # it is installed, but something inside it is missing
        raise MissingExtra(f"{wanted_by} needs {exc.name}: {install}") from exc
