"""Text environments for language models, and the manager that plays many of them at once."""

from envfleet.llm.config import load_config
from envfleet.llm.environments.base import TextEnv, TextEnvConfig
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.manager_types import EnvStatus
from envfleet.llm.registry import register_env

__all__ = [
    "EnvStateManager",
    "EnvStatus",
    "TextEnv",
    "TextEnvConfig",
    "load_config",
    "register_env",
]
