"""A meta-RL run as lines of text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TextIO

from envfleet.cli.line_view import ANNOUNCE_EVERY, PrintedRun, clock_text
from envfleet.meta.config import MetaConfig
from envfleet.runs.callbacks import Evaluation, Iteration

_NAMED = ("z/", "rl_loss/", "metrics/")
"""How the figures begin that users of such learners know."""


class MetaView(PrintedRun):
    """Prints every tenth iteration and every evaluation."""

    def __init__(self, stream: TextIO, config: MetaConfig) -> None:
        """Write to `stream`."""
        super().__init__(stream)
        self._config = config
        self._begun_s = time.monotonic()
        self._start_steps = self._incidents = 0

    def begun(self, envs: Any, start_steps: int) -> None:
        """Say what runs where."""
        self._begun_s, self._start_steps = time.monotonic(), start_steps
        env = self._config.env
        self.say(f"{env.env_name}, {env.max_rollouts_per_task} episodes per task")
        self.say(f"   {getattr(envs, 'plan', 'one environment in this process')}")
        if start_steps:
            self.say(f"   Going on from {start_steps:,} steps")

    def iterated(self, iteration: Iteration) -> None:
        """Show every tenth iteration, and the last."""
        if iteration.incidents != self._incidents:
            self._incidents = iteration.incidents
            self.say(f"  incidents: {iteration.incidents}  |  the run goes on")
        if iteration.number % ANNOUNCE_EVERY and iteration.number != iteration.of:
            return
        rate = (iteration.env_steps - self._start_steps) / self._elapsed_s
        left_s = (iteration.of / iteration.number - 1) * iteration.env_steps / max(rate, 1e-9)
        mean = "-" if iteration.mean_return is None else f"{iteration.mean_return:.2f}"
        self.say(
            f"Iteration {iteration.number}/{iteration.of}  |  return of a trial: {mean}  |  "
            f"steps/s: {rate:,.0f}  |  left: {clock_text(left_s)}"
        )
        self._show(iteration.figures)

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """Show how good the policy is, episode by episode."""
        self.say(f"Evaluation at {env_steps:,} steps")
        self._show(evaluation.figures)

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._begun_s, 1e-9)

    def _show(self, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            if name.startswith(_NAMED):
                self.say(f"  {name:<36} {value:,.4g}")
