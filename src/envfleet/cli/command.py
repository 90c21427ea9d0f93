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


class UsageError(Exception):
    """A command line that cannot work: one sentence, exit code 2."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a command gets from the application."""

    progress: Progress
    say: Callable[[Block], None]
    """Show a block on stderr at once, such as a warning before the work begins."""


class CommandModule(Protocol):
    """The shape of a command module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments; ``--json`` and friends are already there."""

    def run(self, args: argparse.Namespace, context: Context) -> Report:
        """Do the work."""
