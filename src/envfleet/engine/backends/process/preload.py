"""What a fork server loads before it forks workers: importing it is the whole of its work.

Workers then begin with the engine in memory. The server is started with Ctrl-C blocked, because one
that came before the server ignores it would end the server. Its children unblock it again.
"""

from __future__ import annotations

import os
import signal

import numpy as np

from envfleet.engine.backends.process.launch import as_before
from envfleet.engine.backends.process.main import begin  # noqa: F401  it imports the engine
from envfleet.engine.rng import has_usual_stream

__all__: list[str] = []


_SERVER = os.getpid()


def _begin_child() -> None:
    if os.getppid() != _SERVER:  # a child of a child is as its parent made it
        return
    if has_usual_stream():
        np.random.seed()  # else every child would draw what the others draw
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


os.register_at_fork(after_in_child=_begin_child)
as_before()
