"""What a command module offers, and what it gets from the application.

A command is a module with an ``add_arguments`` and a ``run`` function, named in ``app.COMMANDS``.
It parses nothing itself, prints nothing itself and never exits: it returns a ``Report`` or raises.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from envfleet.cli.report import Block, Report
from envfleet.observe.progress import Progress

__all__ = ["CommandModule", "Context", "UsageError"]


class UsageError(Exception):
    """The user asked for something that cannot be: one sentence, exit code 2."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the application lends a command while it runs."""

    progress: Progress
    say: Callable[[Block], None]
    """Show something at once, on stderr: a warning that has to come before the work, say."""


class CommandModule(Protocol):
    """The shape of a command module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments; ``--json`` and friends are already there."""

    def run(self, args: argparse.Namespace, context: Context) -> Report:
        """Do the work."""
