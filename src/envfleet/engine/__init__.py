"""The machine room: environments in slots, slots in workers, batches out."""

from envfleet.engine.batch import Batch
from envfleet.engine.fleet import Fleet
from envfleet.engine.incident import Incident, ReplayResult
from envfleet.engine.options import Deadlines, ResetPlan, RestartPolicy
from envfleet.engine.servant import NativeFn
from envfleet.engine.snapshot import Snapshot

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
