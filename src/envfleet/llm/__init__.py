"""Text environments for language models, and the managers that play many of them at once."""

from typing import TYPE_CHECKING

from envfleet.llm.config import load_config
from envfleet.llm.environments.base import TextEnv, TextEnvConfig
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.manager_types import EnvStatus
from envfleet.llm.registry import register_env

if TYPE_CHECKING:
    from envfleet.llm.inference.manager import SharedLLMInferenceManager
    from envfleet.llm.parallel_rollout import ParallelRolloutManager

__all__ = [
    "EnvStateManager",
    "EnvStatus",
    "ParallelRolloutManager",
    "SharedLLMInferenceManager",
    "TextEnv",
    "TextEnvConfig",
    "load_config",
    "register_env",
]
_LATER = {
    "ParallelRolloutManager": "envfleet.llm.parallel_rollout",
    "SharedLLMInferenceManager": "envfleet.llm.inference.manager",
}
"""Names that are imported when they are first asked for, and their modules."""

if not TYPE_CHECKING:  # to a type checker every name would be a good one

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = found = getattr(import_module(_LATER[name]), name)
        return found
