"""The main script in a worker that begins with a new interpreter: imported there, or told why not.

multiprocessing imports it before a child runs anything of ours, and one that cannot be imported
shows a traceback for each child and no reason to the parent. So workers do it themselves, in the
same way, and send the reason.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import sys
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any

from envfleet.engine.channel import WorkerChannel
from envfleet.engine.messages import Failure
from envfleet.engine.worker import Descriptors, WorkerSpec, main

GUARD_EXIT = 117
"""Exit code of a worker that could not import the main script, or found it opening a fleet."""
WORKER_NAME = "envfleet-worker-"
_KEYS = ("init_main_from_name", "init_main_from_path")

Script = dict[str, str]
"""What multiprocessing would tell a child of the main script."""


@dataclass(frozen=True, slots=True)
class ScriptFailed:
    """First and last message of a worker that could not import the main script."""

    failure: Failure


def main_script() -> Script:
    """The script of this process, and from now on multiprocessing leaves it to our workers."""
    if not hasattr(spawn.get_preparation_data, "leaves_script_to"):
        spawn.get_preparation_data = _leaving_script(spawn.get_preparation_data)
    data = spawn.get_preparation_data("")
    return {key: data[key] for key in _KEYS if key in data}


def _leaving_script(ordinary: Any) -> Any:
    # by name, and for good: whoever else starts processes, in whatever thread, must not notice
    @functools.wraps(ordinary)
    def get_preparation_data(name: str) -> Any:
        data = ordinary(name)
        if name.startswith(WORKER_NAME):
            for key in _KEYS:
                data.pop(key, None)
        return data

    get_preparation_data.leaves_script_to = WORKER_NAME  # type: ignore[attr-defined]
    return get_preparation_data


def begin(script: Script, spec: WorkerSpec, descriptors: Descriptors) -> None:
    """Import the main script, then run the worker."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # what the script starts is refused for a better reason
    process._inheriting = True
    try:
        spawn.prepare(script)
    except BaseException as exc:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # a parent that has gone does not ask
            failed = ScriptFailed(Failure.of(spec.first, "start-up", exc))
            WorkerChannel(descriptors.fds["channel"]).send(pickle.dumps(failed))
        os._exit(GUARD_EXIT)
    del process._inheriting
    main(spec, descriptors)
