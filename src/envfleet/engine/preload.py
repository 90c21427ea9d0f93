"""What a fork server loads before it forks workers: importing it is the whole of its work.

Workers then begin with the engine in memory. The server was started with Ctrl-C held back, because
one that came before it ignores it would end it; its children, whoever asked for them, hear again.
"""

from __future__ import annotations

import os
import signal

import numpy as np

import envfleet.engine.worker  # noqa: F401  what workers would import one by one
from envfleet.engine.variables import as_before

__all__: list[str] = []


def _begin_child() -> None:
    np.random.seed()  # else every child would draw what the others draw
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


os.register_at_fork(after_in_child=_begin_child)
as_before()
