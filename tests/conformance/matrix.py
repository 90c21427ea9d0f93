"""The backends every law is tested on, as arguments of make_vec.

A worker under spawn or forkserver costs a new interpreter, so EVERY is for what each start method
could break on its own; what only the transport can break runs on QUICK.
"""

from contextlib import closing
from typing import Any

import pytest

import envfleet
from tests.pipe_backend import PipeBackend

MODES = ("next_step", "same_step", "disabled")

SERIAL: dict[str, Any] = {"backend": "serial"}
THREAD: dict[str, Any] = {"backend": "thread", "num_workers": 2}
FORK: dict[str, Any] = {"backend": "process", "start_method": "fork", "num_workers": 2}
SPAWN: dict[str, Any] = {"backend": "process", "start_method": "spawn", "num_workers": 2}
FORKSERVER: dict[str, Any] = {"backend": "process", "start_method": "forkserver", "num_workers": 2}
JOINT: dict[str, Any] = {**FORK, "num_here": 1}
"""One of the two workers is this process."""
PIPES: dict[str, Any] = {"backend": PipeBackend.NAME, "num_workers": 2}
"""Its workers share no memory with this process."""

_NAMES: dict[str, dict[str, Any]] = {
    "serial": SERIAL,
    "thread": THREAD,
    "fork": FORK,
    "spawn": SPAWN,
    "forkserver": FORKSERVER,
    "joint": JOINT,
    "pipes": PIPES,
}


def _params(*names):
    return [pytest.param(_NAMES[name], id=name) for name in names]


EVERY = _params("serial", "thread", "fork", "spawn", "forkserver", "joint", "pipes")
QUICK = _params("serial", "thread", "fork", "joint", "pipes")
APART = _params("fork", "pipes")
"""Worker processes, one way each to reach them."""
PROCESSES = _params("fork", "spawn", "forkserver")


def opened(env, num_envs=None, **kwargs):
    """A fleet that is closed at the end of the `with` block."""
    return closing(envfleet.make_vec(env, num_envs, **kwargs))
