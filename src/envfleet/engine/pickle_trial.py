"""Whether a pickled environment is one to go on with.

Pickle also takes environments whose state lies elsewhere: in a simulator that is known by a number,
or behind a connection. So a pickle is tried before it is trusted. The copy and the original take
the same action, or begin the same episode if theirs is over, in a child of this process, which has
no connections and ends then. The original in this process is not touched.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import warnings
from functools import partial
from typing import Any, NoReturn

from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.snapshot import are_alike

_LIMIT_S = 5


def survives_pickling(env: Any, blob: bytes, *, is_running: bool) -> bool | None:
    """Whether `blob`, the pickled `env`, goes on as `env` does; None if that cannot be told."""
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
        _judge(env, blob, is_running, write_end)
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


def _judge(env: Any, blob: bytes, is_running: bool, answer_to: int) -> NoReturn:
    """In the child: compare one step or reset, answer and end."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2 * _LIMIT_S)  # if its parent has ended meanwhile
        faulthandler.disable()
        os.closerange(3, answer_to)
        os.closerange(answer_to + 1, os.sysconf("SC_OPEN_MAX"))
        env.action_space.seed(0)
        action = env.action_space.sample()
        go_on = partial(_step, action) if is_running else _reset
        copied = go_on(lambda: pickle.loads(blob))
        original = go_on(lambda: env)
        if copied is None and original is None:
            answer = b"?"
        else:
            answer = b"y" if are_alike(copied, original) else b"n"
        os.write(answer_to, answer)
    finally:
        os._exit(0)


def _step(action: Any, get_env: Any) -> Any:
    """What a step returns, without the info; None if it raises."""
    try:
        return tuple(get_env().step(detached_copy(action))[:4])
    except BaseException:
        return None


def _reset(get_env: Any) -> Any:
    """What a reset with a seed returns, without the info; None if it raises."""
    try:
        return tuple(get_env().reset(seed=0)[:1])
    except BaseException:
        return None
