"""Configurations and engines for tests of rollouts with a model."""

from collections.abc import Sequence
from typing import Any

from envfleet.llm.config import load_config
from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.inference.options import InferenceOptions
from envfleet.llm.inference.scripted import ScriptedEngine
from envfleet.llm.parallel_rollout import ParallelRolloutManager, ParallelRolloutResult

TAGS = ("SimpleSokoban", "FrozenLake", "Bandit", "Countdown")


def config_with(
    *changes: str,
    tags: Sequence[str] = TAGS,
    group_size: int = 2,
    backend: str | None = None,
    workers: int = 2,
) -> Any:
    """One group of each tag, played by a script."""
    names, ones = ", ".join(tags), ", ".join("1" for _ in tags)
    parallel = []
    if backend is not None:
        parallel = [
            "agent_proxy.use_parallel_rollout=true",
            f"agent_proxy.parallel_backend={backend}",
            f"agent_proxy.parallel_n_jobs={workers}",
        ]
    return load_config(
        "base",
        [
            f"es_manager.train.env_groups={len(tags)}",
            f"es_manager.train.group_size={group_size}",
            f"es_manager.train.env_configs.tags=[{names}]",
            f"es_manager.train.env_configs.n_groups=[{ones}]",
            "llm.engine=scripted",
            *parallel,
            *changes,
        ],
    )


def play(config: Any, engine: Any = None, **how: Any) -> ParallelRolloutResult:
    """One rollout with an engine, by default the script's."""
    options = InferenceOptions(engine="scripted", max_retries=0)
    with (
        SharedLLMInferenceManager(engine or ScriptedEngine(), options=options) as llm,
        ParallelRolloutManager(config, llm, **how.pop("of_manager", {})) as manager,
    ):
        result = manager.rollout(**{"seed": 7, **how})
        if how.get("folder") is None:
            return result
        # the folder may be gone when the test looks at them
        object.__setattr__(result, "trajectories", list(result.trajectories))
        return result
