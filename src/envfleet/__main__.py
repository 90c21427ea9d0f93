"""``python -m envfleet``: the same as the ``envfleet`` command."""

from __future__ import annotations

import sys

from envfleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
