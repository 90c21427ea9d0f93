"""Text environments over OpenEnv's WebSocket protocol, in both directions.

    our environment ◄── OpenEnvServer ◄── ws://.../ws ◄── any OpenEnv client
    any OpenEnv server ◄── ws://.../ws ◄── OpenEnvTextEnv, a `TextEnv` of ours

Messages are `{"type": "reset" | "step" | "state" | "close", "data": {...}}`; each connection has an
environment of its own.
"""

from envfleet.llm.openenv.client import OpenEnvConfig, OpenEnvTextEnv
from envfleet.llm.openenv.server import OpenEnvServer

__all__ = ["OpenEnvConfig", "OpenEnvServer", "OpenEnvTextEnv"]
