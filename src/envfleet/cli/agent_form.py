"""Whether what a name builds has several agents, found without importing PettingZoo."""

from __future__ import annotations

import sys
from typing import Any, Literal

from envfleet.adapters.names import find

Form = Literal["turns", "team"]
"""Whether agents act in turn (PettingZoo's AEC) or at the same time (Parallel)."""


def agent_form(name: str, kwargs: dict[str, Any]) -> Form | None:
    """How the agents of an environment act; None if it is none of PettingZoo's.

    Functions are called to find out; classes and ids tell without. What cannot be built is left
    to those who will say why.
    """
    source: Any = find(name).source
    if isinstance(source, str):
        return None
    kind = source
    if not isinstance(source, type):
        try:
            built = source(**kwargs)
        except Exception:
            return None
        kind = type(built)
        close = getattr(built, "close", None)
        if callable(close):
            close()
    package = sys.modules.get("pettingzoo")
    if package is None:  # then nothing of it was built
        return None
    if issubclass(kind, package.AECEnv):
        return "turns"
    return "team" if issubclass(kind, package.ParallelEnv) else None
