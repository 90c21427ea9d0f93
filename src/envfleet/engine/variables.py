"""Environment variables for processes that are being started, and only for them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping

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
