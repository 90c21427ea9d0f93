"""A run as lines of text: for pipes, files and terminals that cannot redraw."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Self, TextIO

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.cli.ctrl_c import StopRequests
from envfleet.cli.report import plural
from envfleet.cli.terminal import silenced_if_closed
from envfleet.learn.environments import longest_episode
from envfleet.learn.train_options import TrainOptions
from envfleet.observe.events import Event
from envfleet.runs.callbacks import Evaluation, Iteration, RunCallback

ANNOUNCE_EVERY = 10
"""Iterations between the lines that are printed."""
LOST = "these episodes are lost, the run goes on"
_KEPT_BY = {
    "own": "their own state methods",
    "mujoco": "MuJoCo's state",
    "pickle": "their pickles",
    "replay": "their seeds and actions, to be replayed",
}
FINISHING = "Finishing this iteration; press Ctrl-C again to end at once"


class PrintedRun(RunCallback):
    """Prints lines, and ends the run at Ctrl-C."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream
        self._stop_requests = StopRequests(self._finishing)

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

    def should_stop(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._stop_requests.is_asked

    def _finishing(self) -> None:
        # Ctrl-C may come while a line is being written, and a stream cannot be entered twice: then
        # the message is left out
        with suppress(RuntimeError):
            self.say(FINISHING)


class LineView(PrintedRun):
    """Prints what happens, a few lines at a time."""

    def __init__(
        self, stream: TextIO, options: TrainOptions, *, shows_verdict: bool = False
    ) -> None:
        """Write to `stream`; with `shows_verdict` also what takes the time so far."""
        super().__init__(stream)
        self._options, self._shows_verdict = options, shows_verdict
        self._begun_s, self._start_steps = time.monotonic(), 0
        self._is_first = True
        self._incidents = 0
        self._kept_by: tuple[str, ...] | None = None
        self._has_begun = False

    def kept_by(self, methods: tuple[str, ...]) -> None:
        """Remember how checkpoints keep the environments; say so if it changes later."""
        self._kept_by = methods
        if self._has_begun:
            self.say(kept_line(methods))

    def begun(self, envs: FleetVectorEnv, start_steps: int) -> None:
        """Say what runs where."""
        self._begun_s, self._start_steps = time.monotonic(), start_steps
        for line in begin_lines(self._options, envs.plan, start_steps, self._kept_by):
            self.say(line)
        self._has_begun = True

    def iterated(self, iteration: Iteration) -> None:
        """Show every tenth iteration, and the last."""
        if iteration.number % ANNOUNCE_EVERY and iteration.number != iteration.of:
            return
        if self._is_first:
            self.say(mode_line(self._options.n_envs))
            self._is_first = False
        elapsed_s = time.monotonic() - self._begun_s
        rate = (iteration.env_steps - self._start_steps) / max(elapsed_s, 1e-9)
        word = "Iteration" if self._options.num_episodes is None else "Episode"
        for line in iteration_lines(iteration, self._options.n_envs, rate, word):
            self.say(line)
        if self._shows_verdict and iteration.verdict:
            self.say(f"  so far {iteration.verdict}")
        if iteration.incidents != self._incidents:
            self._incidents = iteration.incidents
            self.say(f"  incidents: {iteration.incidents}  |  {LOST}")

    def decided(self, event: Event) -> None:
        """Say where work is done from now on."""
        self.say(f"  {event}")

    def evaluating(self, env_steps: int) -> None:
        """Say that an evaluation begins, which takes a while."""
        self.say(evaluating_line(self._options))

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """Show how good the policy is."""
        line = f"Evaluation at {env_steps:,}: {evaluation.mean:.2f} +- {evaluation.std:.2f}"
        if (won := evaluation.figures.get("win_rate_random")) is not None:  # a game of several
            line += f"  |  won against random: {won:.1%}"
        self.say(line)


def begin_lines(
    options: TrainOptions, plan: str, start_steps: int, kept_by: tuple[str, ...] | None = None
) -> list[str]:
    """What runs where, at the beginning."""
    many = options.n_envs
    using = "Using one environment" if many == 1 else f"Using {many} parallel environments"
    lines = [
        f"{using} for training",
        f"   Start method: {options.parallel_start_method or 'default'}",
        f"   {plan}",
    ]
    if kept_by is not None:
        lines.append(f"   {kept_line(kept_by)}")
    return [*lines, f"   Going on from {start_steps:,} steps"] if start_steps else lines


def kept_line(methods: tuple[str, ...]) -> str:
    """How checkpoints keep the environments."""
    if not methods:
        return "Environments cannot be kept in checkpoints: going on begins new episodes"
    how = " and ".join(_KEPT_BY[method] for method in methods)
    return f"Environments are kept in checkpoints by {how}"


def evaluating_line(options: TrainOptions) -> str:
    """How long an evaluation may take."""
    many = plural(options.eval_episodes, "episode")
    return f"Evaluating: {many} of up to {longest_episode(options):,} steps"


def mode_line(n_envs: int) -> str:
    """How experience is collected."""
    if n_envs == 1:
        return "Sequential mode: 1 environment"
    return f"Parallel mode: {n_envs} environments"


def iteration_lines(
    iteration: Iteration, n_envs: int, rate: float, word: str = "Iteration"
) -> list[str]:
    """One iteration, called by this word; `rate` is in environment steps per second."""
    value, length = (
        (f"{one[0]:.2f}", str(one[1]))
        if (one := iteration.episodes[-1] if iteration.episodes else None)
        else ("-", "-")
    )
    mean = "-" if iteration.mean_return is None else f"{iteration.mean_return:.2f}"
    left_s = (iteration.of / iteration.number - 1) * iteration.env_steps / max(rate, 1e-9)
    left = clock_text(left_s)
    return [
        f"{word} {iteration.number}/{iteration.of}",
        f"  Reward: {value:>8}  |  Length: {length:>4}  |  Mean(100): {mean:>8}",
        f"  n_completed_episodes: {len(iteration.episodes)}  |  n_envs: {n_envs}",
        f"  env_steps: {iteration.env_steps:,}  |  steps/s: {rate:,.0f}  |  left: {left}",
    ]


def clock_text(seconds: float) -> str:
    """A time as 1:02:03, or 2:03."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
