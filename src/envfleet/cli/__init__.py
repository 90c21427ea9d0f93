"""The command line: ``envfleet train | eval | rollout | bench | tune | verify | doctor``.

A command is one module (see ``command.py``) and one line in ``app.COMMANDS``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from envfleet.cli.ctrl_c import exit_on_ctrl_c

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 fine, 1 the thing checked failed, 2 bad usage, 130 interrupted.

    Args:
        argv: The arguments without the program's name; ``sys.argv[1:]`` when left out.
    """
    try:
        with exit_on_ctrl_c():
            from envfleet.cli.app import run

        return run(argv)
    except KeyboardInterrupt:  # before the command began, or after it
        sys.stderr.write("envfleet: stopped\n")
        return 130
