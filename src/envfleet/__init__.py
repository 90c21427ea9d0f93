"""envfleet runs reinforcement-learning environments in parallel: fast, correct, hard to kill.

A name is imported when it is first asked for, so that the command line, which asks for none, has
the word from its first moment on.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envfleet import errors
    from envfleet.adapters.gymnasium import FleetVectorEnv, ParallelEnv, make_vec
    from envfleet.adapters.opening import native
    from envfleet.adapters.registration import register
    from envfleet.engine import Batch, Incident, Snapshot
    from envfleet.engine.options import RayOptions

    __version__: str

__all__ = [
    "Batch",
    "FleetVectorEnv",
    "Incident",
    "ParallelEnv",
    "RayOptions",
    "Snapshot",
    "__version__",
    "errors",
    "make_vec",
    "native",
    "register",
]
_ROOMS = ("adapters", "engine", "errors", "layout", "observe")
"""Can be named without being imported."""


def _named(name: str) -> object:
    from importlib import import_module, metadata

    match name:
        case "__version__":
            try:
                return metadata.version("envfleet")
            except metadata.PackageNotFoundError:  # from a source tree that was never installed
                return "0.0.0"
        case _ if name in _ROOMS:
            return import_module(f"envfleet.{name}")
        case "Batch" | "Incident" | "Snapshot":
            return getattr(import_module("envfleet.engine"), name)
        case "RayOptions":
            return getattr(import_module("envfleet.engine.options"), name)
        case "native":
            return getattr(import_module("envfleet.adapters.opening"), name)
        case "register":
            return getattr(import_module("envfleet.adapters.registration"), name)
        case _:
            return getattr(import_module("envfleet.adapters.gymnasium"), name)


if not TYPE_CHECKING:  # to a type checker every name would be a good one

    def __getattr__(name: str) -> object:
        if name not in __all__ and name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = _named(name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
