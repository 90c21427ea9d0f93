"""What authors of environments test with: a conformance kit, and environments that misbehave.

    from envfleet.testing import FleetConformance

    class TestMyEnv(FleetConformance):
        def make_env(self):
            return MyEnv()

Importing this needs no test framework.
"""

from envfleet.testing.conformance import (
    CheckResult,
    ConformanceReport,
    FleetConformance,
    Subject,
    check_env,
)
from envfleet.testing.faulty_envs import (
    Crashing,
    FailingConstructor,
    Faulty,
    GlobalRandom,
    Hanging,
    HugeObservation,
    IgnoresSeed,
    Leaking,
    ReusingItsArray,
    SharesState,
    Slow,
    TwoArgumentError,
    TwoArgumentException,
    UnpicklableException,
    UnpicklableInfo,
)
from envfleet.testing.global_random import uses_global_random
from envfleet.testing.simple_envs import (
    AnySpace,
    Counter,
    MixedInfo,
    NoisyStream,
    TaskCounter,
    VectorCounter,
)
from envfleet.testing.streams import (
    Difference,
    EnvLike,
    StreamEvent,
    Streams,
    count_episodes,
    first_difference,
    fleet_driven,
    hand_driven,
    vector_driven,
)

__all__ = [
    "AnySpace",
    "CheckResult",
    "ConformanceReport",
    "Counter",
    "Crashing",
    "Difference",
    "EnvLike",
    "FailingConstructor",
    "Faulty",
    "FleetConformance",
    "GlobalRandom",
    "Hanging",
    "HugeObservation",
    "IgnoresSeed",
    "Leaking",
    "MixedInfo",
    "NoisyStream",
    "ReusingItsArray",
    "SharesState",
    "Slow",
    "StreamEvent",
    "Streams",
    "Subject",
    "TaskCounter",
    "TwoArgumentError",
    "TwoArgumentException",
    "UnpicklableException",
    "UnpicklableInfo",
    "VectorCounter",
    "check_env",
    "count_episodes",
    "first_difference",
    "fleet_driven",
    "hand_driven",
    "uses_global_random",
    "vector_driven",
]
