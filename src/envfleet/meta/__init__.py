"""Meta-RL: tasks, trials of several episodes, environments, and their parallel collection.

Importing this package registers its environments with Gymnasium.
"""

from envfleet.meta.registered import register_all
from envfleet.meta.tasks import TaskEnv, TaskList, TaskSampler, sample_uniformly

register_all()

__all__ = ["TaskEnv", "TaskList", "TaskSampler", "sample_uniformly"]
