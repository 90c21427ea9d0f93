"""Whether a pickled environment is one to go on with.

Pickle also takes environments whose state lies elsewhere: in a simulator that is known by a number,
or behind a connection. So a pickle is tried before it is trusted. The copy and the original take
the same steps, or begin the same episode first if theirs is over, in a child of this process. The
original in this process is not touched.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

from envfleet.engine.child_trial import Say, in_child
from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.snapshot import are_alike

NUM_STEPS = 8
"""More than one: what a copy has lost may be read some steps later only. And not many more: what an
environment does to the world outside it, it does here too."""
ENOUGH_S = 1.0
"""After so long no further step is begun."""

_SAME, _OTHER, _END = b"y", b"n", b"."


def survives_pickling(env: Any, blob: bytes, *, is_running: bool) -> bool | None:
    """Whether `blob`, the pickled `env`, goes on as `env` does; None if that cannot be told."""
    heard = in_child(lambda say: _compare(env, blob, is_running, say))
    if heard is None:
        return None
    if _OTHER in heard.said:
        return False
    if heard.has_ended and _END not in heard.said:
        return False  # the copy ended its process
    return True if _SAME in heard.said else None


def _compare(env: Any, blob: bytes, is_running: bool, say: Say) -> None:
    """In the child: let both go on side by side, and say of each step whether it was the same."""
    end_s = time.monotonic() + ENOUGH_S
    copy = _tried(lambda: pickle.loads(blob))
    env.action_space.seed(0)
    arguments: dict[str, Any] = {} if is_running else {"seed": 0}
    for _ in range(NUM_STEPS):
        if is_running:
            action = env.action_space.sample()
            copied, original = (_step(one, action) for one in (copy, env))
        else:
            copied, original = (_reset(one, arguments) for one in (copy, env))
            arguments = {}
        if copied is None and original is None:
            break
        is_same = are_alike(copied, original)
        say(_SAME if is_same else _OTHER)
        if not is_same or time.monotonic() > end_s:
            break
        is_running = not is_running or not (original[2] or original[3])
    say(_END)


def _step(env: Any, action: Any) -> Any:
    """What a step returns, without the info; None if it raises."""
    return _tried(lambda: detached_copy(tuple(env.step(detached_copy(action))[:4])))


def _reset(env: Any, arguments: dict[str, Any]) -> Any:
    """What a reset returns, without the info; None if it raises."""
    return _tried(lambda: detached_copy(tuple(env.reset(**arguments)[:1])))


def _tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except BaseException:
        return None
