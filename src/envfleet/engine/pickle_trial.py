"""Whether a pickled environment is one to go on with.

Pickle also takes environments whose state lies elsewhere: in a simulator that is known by a number,
or behind a connection. So a pickle is tried before it is trusted. The copy and the original take
the same action in a child of this process, which has no connections and ends then. The original in
this process is not touched.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import warnings
from typing import Any, NoReturn

from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.snapshot import are_alike

_LIMIT_S = 5


def survives_pickling(env: Any, blob: bytes) -> bool | None:
    """Whether `blob`, the pickled `env`, steps as `env` does; None if that cannot be told."""
    read_end, write_end = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other threads: the child needs none of them
            child = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        return None
    if child == 0:
        _judge(env, blob, write_end)
    os.close(write_end)
    try:
        waiting = select.poll()
        waiting.register(read_end, select.POLLIN)
        if not waiting.poll(_LIMIT_S * 1000):
            return None
        answer = os.read(read_end, 1)
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None if answer == b"?" else answer == b"y"  # none at all: the copy ended its process


def _judge(env: Any, blob: bytes, answer_to: int) -> NoReturn:
    """In the child: compare one step, answer and end."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2 * _LIMIT_S)  # if its parent has ended meanwhile
        faulthandler.disable()
        os.closerange(3, answer_to)
        os.closerange(answer_to + 1, os.sysconf("SC_OPEN_MAX"))
        env.action_space.seed(0)
        action = env.action_space.sample()
        copied = _step(lambda: pickle.loads(blob), action)
        original = _step(lambda: env, action)
        if copied is None and original is None:
            answer = b"?"
        else:
            answer = b"y" if are_alike(copied, original) else b"n"
        os.write(answer_to, answer)
    finally:
        os._exit(0)


def _step(get_env: Any, action: Any) -> Any:
    """What a step returns, without the info; None if it raises."""
    try:
        return tuple(get_env().step(detached_copy(action))[:4])
    except BaseException:
        return None
