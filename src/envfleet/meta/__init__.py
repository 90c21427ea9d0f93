"""Meta-RL: tasks, trials of several episodes, environments, and their parallel collection.

Importing this package registers its environments with Gymnasium.
"""

from envfleet.meta.parallel import ParallelEnvManager, Remote, make_parallel_env
from envfleet.meta.registered import register_all
from envfleet.meta.tasks import TaskEnv, TaskList, TaskSampler, sample_uniformly
from envfleet.meta.trial import VariBadWrapper, make_env

register_all()

__all__ = [
    "ParallelEnvManager",
    "Remote",
    "TaskEnv",
    "TaskList",
    "TaskSampler",
    "VariBadWrapper",
    "make_env",
    "make_parallel_env",
    "sample_uniformly",
]
