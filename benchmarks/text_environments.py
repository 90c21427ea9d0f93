"""Text environments that no package ships: one whose steps wait, one whose steps compute.

They live in a module of their own because workers under spawn import them by name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from envfleet.llm.environments.base import Mode, Step, TextEnv, TextEnvConfig

_INFO = {"action_is_effective": True, "action_is_valid": True, "success": False}


@dataclass(slots=True, kw_only=True)
class WaitingConfig(TextEnvConfig):
    """How long."""

    wait_s: float = 0.02


class Waiting(TextEnv):
    """A step waits, as for somebody else's answer; an episode never ends."""

    config_class = WaitingConfig
    config: WaitingConfig

    def _begin(self, seed: int, mode: Mode) -> None:
        self._count = 0

    def _act(self, action: Any) -> Step:
        time.sleep(self.config.wait_s)
        self._count += 1
        return self._text(), 0.0, False, False, dict(_INFO)

    def _text(self) -> str:
        return f"{self._count} answers"


@dataclass(slots=True, kw_only=True)
class ComputingConfig(TextEnvConfig):
    """How much."""

    num_additions: int = 60_000
    """Work, not time: some 2 ms on a core of its own, and the same work on one that is shared."""


class Computing(TextEnv):
    """A step keeps a processor busy; an episode never ends."""

    config_class = ComputingConfig
    config: ComputingConfig

    def _begin(self, seed: int, mode: Mode) -> None:
        self._total = seed

    def _act(self, action: Any) -> Step:
        for number in range(self.config.num_additions):
            self._total += number & 1
        return self._text(), 0.0, False, False, dict(_INFO)

    def _text(self) -> str:
        return f"so far {self._total}"
