"""Several agents in one environment: environments, and ways to hand them to learners of one."""

from envfleet.errors import MissingExtra

try:
    from envfleet.multiagent.aec_vec import AECVecEnv, TurnBatch
    from envfleet.multiagent.flatten import FlattenMultiAgentWrapper
    from envfleet.multiagent.grid_policy import GridWorldPolicy
    from envfleet.multiagent.grid_world import GridWorldEnvMultiAgent, GridWorldEnvParallel
    from envfleet.multiagent.parallel_vec import AsyncPettingZooVecEnv, ParallelBatch
except ModuleNotFoundError as exc:
    if exc.name != "pettingzoo":
        raise  # installed but broken inside: that must not look like a missing package
    raise MissingExtra("pettingzoo is not installed: pip install 'envfleet[multiagent]'") from exc

__all__ = [
    "AECVecEnv",
    "AsyncPettingZooVecEnv",
    "FlattenMultiAgentWrapper",
    "GridWorldEnvMultiAgent",
    "GridWorldEnvParallel",
    "GridWorldPolicy",
    "ParallelBatch",
    "TurnBatch",
]
