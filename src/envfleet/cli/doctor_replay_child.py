"""A replay in a process that may die or hang, run by ``doctor replay``: it ends with its parent.

``python -m envfleet.cli.doctor_replay_child PID FILE`` replays FILE as ``--in-process --json``
does. Law: this process never outlives PID, even if PID is killed while the replay hangs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from envfleet.cli import main

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5


def end_with(parent: int) -> None:
    """Let this process end no later than its parent; at once, if that is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:  # this thread cannot look while native code holds the interpreter lock
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.exit(main(["doctor", "replay", sys.argv[2], "--in-process", "--json"]))
