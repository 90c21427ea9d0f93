"""Meta-RL: tasks, trials of several episodes, environments, and their parallel collection.

Importing this package registers its environments with Gymnasium.
"""

from typing import Any

from envfleet.errors import MissingExtra
from envfleet.meta.agents.options import AGENT_ARCHS
from envfleet.meta.config import load_config
from envfleet.meta.parallel import ParallelEnvManager, ParallelEnvRemote, make_parallel_env
from envfleet.meta.registered import register_all
from envfleet.meta.tasks import TaskEnv, TaskList, TaskSampler, sample_uniformly
from envfleet.meta.trial import VariBadWrapper, make_env

register_all()

__all__ = [
    "AGENT_ARCHS",
    "Learner",
    "ParallelEnvManager",
    "ParallelEnvRemote",
    "TaskEnv",
    "TaskList",
    "TaskSampler",
    "VariBadWrapper",
    "load_config",
    "make_env",
    "make_parallel_env",
    "sample_uniformly",
    "train",
]


def __getattr__(name: str) -> Any:
    """What needs PyTorch is imported when it is used."""
    if name not in ("Learner", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from envfleet.meta import learner, training
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise MissingExtra(f"{name} needs PyTorch: pip install 'envfleet[train]'") from exc
    return learner.Learner if name == "Learner" else training.train
