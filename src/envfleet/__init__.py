"""envfleet runs reinforcement-learning environments in parallel: fast, correct, hard to kill."""

from importlib.metadata import PackageNotFoundError, version

from envfleet import errors
from envfleet.adapters.gymnasium import FleetVectorEnv, ParallelEnv, make_vec, native
from envfleet.engine import Batch, Incident, Snapshot

try:
    __version__ = version("envfleet")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"

__all__ = [
    "Batch",
    "FleetVectorEnv",
    "Incident",
    "ParallelEnv",
    "Snapshot",
    "__version__",
    "errors",
    "make_vec",
    "native",
]
