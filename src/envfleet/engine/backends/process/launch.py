"""The main script in a worker that begins with a new interpreter: imported there, or told why not.

multiprocessing imports it before a child runs anything of ours, and one that cannot be imported
shows a traceback for each child and no reason to the parent. So workers do it themselves, in the
same way, and send the reason.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any

from envfleet.engine.backends.process.channel import WorkerChannel
from envfleet.engine.backends.process.main import Descriptors, WorkerSpec, main
from envfleet.engine.messages import EnvFailure

_BEFORE = "ENVFLEET_VARIABLES_BEFORE"


@contextlib.contextmanager
def changed(changes: Mapping[str, str]) -> Iterator[None]:
    """These variables, while processes are started within."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        _restore(before)


@contextlib.contextmanager
def changed_at_start(changes: Mapping[str, str]) -> Iterator[None]:
    """The same for a process that goes back to the ones before by `as_before`, once it is up."""
    before = json.dumps({name: os.environ.get(name) for name in changes})
    with changed({**changes, _BEFORE: before}):
        yield


def as_before() -> None:
    """Undo what `changed_at_start` did to this process."""
    if _BEFORE in os.environ:
        _restore(json.loads(os.environ.pop(_BEFORE)))


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


GUARD_EXIT = 117
"""Exit code of a worker that could not import the main script, or found it opening a fleet."""
WORKER_NAME = "envfleet-worker-"
_KEYS = ("init_main_from_name", "init_main_from_path")

Script = dict[str, str]
"""What multiprocessing would tell a child of the main script."""


@dataclass(frozen=True, slots=True)
class ScriptFailed:
    """First and last message of a worker that could not import the main script."""

    failure: EnvFailure


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
            failed = ScriptFailed(EnvFailure.of(spec.first, "start-up", exc))
            WorkerChannel(descriptors.fds["channel"]).send(pickle.dumps(failed))
        os._exit(GUARD_EXIT)
    del process._inheriting
    main(spec, descriptors)
