"""A meta-RL run as lines of text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self, TextIO

from envfleet.cli.ctrl_c import StopRequests
from envfleet.cli.line_view import ANNOUNCE_EVERY, FINISHING, clock_text
from envfleet.cli.terminal import silenced_if_closed
from envfleet.meta.config import MetaConfig
from envfleet.runs.callbacks import Evaluation, Iteration, RunCallback

_NAMED = ("z/", "rl_loss/", "metrics/")
"""How the figures begin that users of such learners know."""


class MetaView(RunCallback):
    """Prints every tenth iteration and every evaluation."""

    def __init__(self, stream: TextIO, config: MetaConfig) -> None:
        """Write to `stream`."""
        self._stream, self._config = stream, config
        self._stop_requests = StopRequests(self._finishing)
        self._begun_s = time.monotonic()
        self._start_steps = self._incidents = 0

    def __enter__(self) -> Self:
        self._stop_requests.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop_requests.__exit__(*exc_info)

    def say(self, line: str) -> None:
        """Print a line, unless the reader is gone."""
        with silenced_if_closed(self._stream):
            self._stream.write(f"{line}\n")
            self._stream.flush()

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

    def should_stop(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._stop_requests.is_asked

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._begun_s, 1e-9)

    def _show(self, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            if name.startswith(_NAMED):
                self.say(f"  {name:<36} {value:,.4g}")

    def _finishing(self) -> None:
        # Ctrl-C may come while a line is being written, and a stream cannot be entered twice
        with suppress(RuntimeError):
            self.say(FINISHING)
