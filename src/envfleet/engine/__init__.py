"""The machine room: environments in slots, slots in workers, batches out."""

from envfleet.engine.batch import Batch
from envfleet.engine.fleet import Fleet
from envfleet.engine.incident import Incident, ReplayResult
from envfleet.engine.options import Deadlines, ResetPlan, RestartPolicy
from envfleet.engine.snapshot import Snapshot
from envfleet.engine.worker import NativeFn

__all__ = [
    "Batch",
    "Deadlines",
    "Fleet",
    "Incident",
    "NativeFn",
    "ReplayResult",
    "ResetPlan",
    "RestartPolicy",
    "Snapshot",
]
