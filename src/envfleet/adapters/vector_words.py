"""What `gymnasium.make_vec` and its vector environments take, in the words of our `make_vec`."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from gymnasium import VectorizeMode

from envfleet.errors import ConfigError

__all__ = ["check_names", "translated"]

_BACKENDS = {VectorizeMode.ASYNC: "process", VectorizeMode.SYNC: "serial"}
_OURS = {"context": "start_method", "autoreset_mode": "autoreset", "copy": "copy"}
"""Arguments of AsyncVectorEnv and SyncVectorEnv that have a counterpart."""
_DEFAULTS = {"backend": "auto", "start_method": None, "autoreset": "next_step", "copy": True}
_HELD = {"shared_memory": True, "daemon": True, "observation_mode": "same"}
"""Those that can only be what they are here: the values that change nothing."""
_REFUSED = {
    "shared_memory": "observations always travel in shared memory",
    "daemon": "workers always end with the process that opened them",
    "observation_mode": "slots have equal spaces; wrap the environments to give them one",
    "worker": "workers run the fleet's own loop; change an environment by wrappers=[...]",
    "max_concurrency": "write num_workers, the number of processes",
}


def translated(
    mode: VectorizeMode | str | None,
    vector_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> tuple[bool, dict[str, Any]]:
    """Whether the native environment is meant, and our options that the words stand for.

    Args:
        mode: Gymnasium's `vectorization_mode`.
        vector_kwargs: What Gymnasium passes on to its vector environment.
        options: Those of `make_vec`, as they were given.

    Raises:
        ConfigError: They have no counterpart, or say something else than an option of ours.
    """
    found: dict[str, tuple[str, Any]] = {}
    values = [one.value for one in VectorizeMode]
    if mode is not None and mode not in values and not isinstance(mode, VectorizeMode):
        raise ConfigError(f"vectorization_mode must be one of {values} or None, got {mode!r}")
    meant = None if mode is None else VectorizeMode(mode)
    if meant in _BACKENDS:
        found["backend"] = f"vectorization_mode={meant.value!r}", _BACKENDS[meant]
    for name, value in (vector_kwargs or {}).items():
        if name in _OURS:
            found[_OURS[name]] = f"vector_kwargs {name}={value!r}", value
        elif name not in _HELD or value != _HELD[name]:
            why = _REFUSED.get(name, "give an environment's arguments to make_vec itself")
            raise ConfigError(f"vector_kwargs {name}={value!r} has no counterpart here: {why}")
    for name, (said, value) in found.items():
        if options[name] not in (_DEFAULTS[name], value):
            raise ConfigError(
                f"{said} means {name}={value!r} here, and {name}={options[name]!r} was given too; "
                "leave one of them out"
            )
    return meant is VectorizeMode.VECTOR_ENTRY_POINT, {
        name: value for name, (_, value) in found.items()
    }


def check_names(kwargs: Collection[str], ours: Collection[str]) -> None:
    """Refuse an environment's keyword that is most likely one of our options, written wrongly.

    Raises:
        ConfigError: It names both.
    """
    for name in kwargs:
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.8)
        if close:
            raise ConfigError(
                f"make_vec has no option {name!r}; did you mean {close[0]!r}? An environment's own "
                f"argument of that name goes into env_kwargs={{{name!r}: ...}}"
            )
