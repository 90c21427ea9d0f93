"""Two text environments for the benchmarks: one whose steps wait, one whose steps compute.

They have their own module because workers under spawn import them by name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from envfleet.llm.environments.base import Mode, Step, TextEnv, TextEnvConfig

_INFO = {"action_is_effective": True, "action_is_valid": True, "success": False}


@dataclass(slots=True, kw_only=True)
class WaitingConfig(TextEnvConfig):
    """How long a step waits."""

    wait_s: float = 0.02


class Waiting(TextEnv):
    """Every step sleeps, like a call to a remote service; an episode never ends."""

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
    """How much a step computes."""

    num_additions: int = 60_000
    """A fixed amount of work, about 2 ms on an idle core, also if the core is shared."""


class Computing(TextEnv):
    """Every step computes; an episode never ends."""

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
