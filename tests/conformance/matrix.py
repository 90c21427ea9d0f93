"""The backends every law is tested on, as arguments of make_vec.

A worker under spawn or forkserver costs a new interpreter, so EVERY is for what each start method
could break on its own; what only the transport can break runs on QUICK.
"""

import os
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
RAY: dict[str, Any] = {"backend": "ray", "num_workers": 2}
"""Actors on two nodes of the cluster of `tests/ray_cluster.py`."""

_NAMES: dict[str, dict[str, Any]] = {
    "serial": SERIAL,
    "thread": THREAD,
    "fork": FORK,
    "spawn": SPAWN,
    "forkserver": FORKSERVER,
    "joint": JOINT,
    "pipes": PIPES,
    "ray": RAY,
}


def _params(*names):
    return [pytest.param(_NAMES[name], id=name) for name in names]


EVERYWHERE = ("ray",) if "ENVFLEET_TEST_ALL_ON_RAY" in os.environ else ()
"""An actor costs a second to start, so most laws are tested on Ray only if that is asked for."""

EVERY = _params("serial", "thread", "fork", "spawn", "forkserver", "joint", "pipes", *EVERYWHERE)
QUICK = _params("serial", "thread", "fork", "joint", "pipes", *EVERYWHERE)
APART = _params("fork", "pipes", *EVERYWHERE)
"""Worker processes, one way each to reach them."""
BY_RAY = [] if EVERYWHERE else _params("ray")
"""Added to the lists of those laws that a transport can break."""
PROCESSES = _params("fork", "spawn", "forkserver")


def opened(env, num_envs=None, **kwargs):
    """A fleet that is closed at the end of the `with` block."""
    return closing(envfleet.make_vec(env, num_envs, **kwargs))
