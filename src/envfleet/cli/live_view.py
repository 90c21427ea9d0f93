"""A run as a view that is redrawn on a terminal.

    training ──► facts ──► rows ──► a thread draws them, a few times a second
                 (set)     (pure)

Law: the training thread only sets facts; one other thread draws, within a small share of the time.
However the run ends, the terminal is restored and the last view stays. Other output to the same
streams appears above the view.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.adapters.names import label
from envfleet.cli.ctrl_c import StopRequests
from envfleet.cli.line_view import (
    FINISHING,
    LOST,
    begin_lines,
    clock_text,
    evaluating_line,
    kept_line,
)
from envfleet.cli.report import Text, plural
from envfleet.cli.screen import RichScreen
from envfleet.cli.terminal import silenced_if_closed
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train_options import TrainOptions
from envfleet.observe.events import Event
from envfleet.runs.callbacks import Evaluation, Iteration, RunCallback

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live


REDRAW_S = 0.25
JOIN_S = 2.0
"""How long the end of a run waits for a last drawing."""
MOST_SHARE = 0.005
"""The share of the time that drawing may take: half a percent."""
RATE_OVER_S = 15.0
"""Steps per second are counted over this many seconds."""
LOOKS = tuple(zip("█▓▒░▪·", ("cyan", "magenta", "yellow", "blue", "red", "white"), strict=True))
"""How the parts of the time look: distinct without colours too."""
BAR = 36
"""Columns of a bar, where there is room."""
SPARKS = "▁▂▃▄▅▆▇█"
LABEL = 11
"""Columns of the names on the left."""

Part = tuple[str, str]
"""Text and its style."""
Row = tuple[str, Sequence[Part]]
"""A name and what is shown beside it."""


@dataclass(slots=True)
class Facts:
    """What is known of a run."""

    title: str
    run_dir: Path
    iterations: int
    total_steps: int
    first_evaluation: int
    """Environment steps until then."""
    note: str = "starting the environments"
    begun_s: float | None = None
    start_steps: int = 0
    env_steps: int = 0
    iteration: int = 0
    paces: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and steps made by then, over the last seconds."""
    mean_returns: list[float] = field(default_factory=list)
    """One for each iteration since the first episode ended."""
    evaluation: tuple[int, float, float] | None = None
    """Steps, mean and deviation of the last one."""
    best: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    verdict: str = ""
    """What takes most of the time, and what to do about it."""
    incidents: int = 0

    def pace(self, now_s: float, env_steps: int) -> None:
        """Note that so many steps have been made."""
        self.env_steps = env_steps
        self.paces.append((now_s, env_steps))
        while len(self.paces) > 2 and now_s - self.paces[0][0] > RATE_OVER_S:
            self.paces.popleft()


class LiveView(RunCallback):
    """Shows a run on a terminal."""

    def __init__(
        self,
        stream: TextIO,
        options: TrainOptions,
        ppo: PPOOptions,
        run_dir: Path,
        *,
        shows_verdict: bool = False,
    ) -> None:
        """Draw on `stream`, which should be a terminal, with rich.

        `shows_verdict` says below what takes the time so far.
        """
        self._shows_verdict = shows_verdict
        iterations = options.iterations(ppo)
        many = plural(options.n_envs, "environment")
        total = iterations * ppo.n_steps * options.n_envs
        self.facts = Facts(
            title=f"{label(options.env)} · {many} · seed {options.seed}",
            run_dir=run_dir,
            iterations=iterations,
            total_steps=total,
            first_evaluation=min(options.eval_every or total, total),
        )
        self._stream, self._options = stream, options
        self._stop_requests = StopRequests(self._finishing)
        self._undo = ExitStack()
        self._is_over = threading.Event()
        self._live: Live | None = None
        self._kept_by: tuple[str, ...] | None = None

    # ---- what the run tells -----------------------------------------------------------------

    def resumed(self, best: float | None) -> None:
        """Remember the best return so far."""
        self.facts.best = best

    def kept_by(self, methods: tuple[str, ...]) -> None:
        """Remember how checkpoints keep the environments; say so if it changes later."""
        self._kept_by = methods
        if self.facts.begun_s is not None:
            self._note(kept_line(methods))

    def begun(self, envs: FleetVectorEnv, start_steps: int) -> None:
        """Say above the view what runs where, and start to draw."""
        facts, now_s = self.facts, time.monotonic()
        facts.start_steps, facts.begun_s = start_steps, now_s
        self._note("")
        facts.pace(now_s, start_steps)
        if self._live is not None:
            with silenced_if_closed(self._stream):
                lines = begin_lines(self._options, envs.plan, start_steps, self._kept_by)
                for line in lines:
                    self._live.console.print(line, markup=False)
        thread = threading.Thread(target=self._keep_drawing, name="envfleet-live", daemon=True)
        thread.start()
        self._undo.callback(thread.join, JOIN_S)  # it may block on a stopped terminal
        self._undo.callback(self._is_over.set)

    def iterated(self, iteration: Iteration) -> None:
        """Record an iteration."""
        self._note("")  # a failed evaluation does not report its end
        facts = self.facts
        facts.iteration, facts.seconds = iteration.number, iteration.seconds
        facts.verdict = iteration.verdict
        facts.pace(time.monotonic(), iteration.env_steps)
        if iteration.mean_return is not None:
            facts.mean_returns.append(iteration.mean_return)
        facts.incidents = iteration.incidents

    def decided(self, event: Event) -> None:
        """Say where work is done from now on."""
        self._note(str(event))

    def evaluating(self, env_steps: int) -> None:
        """Say that an evaluation begins, which takes a while."""
        self._note(evaluating_line(self._options))

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """Record an evaluation."""
        facts = self.facts
        self._note("")
        facts.evaluation = (env_steps, evaluation.mean, evaluation.std)
        facts.best = evaluation.mean if facts.best is None else max(facts.best, evaluation.mean)

    def should_stop(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._stop_requests.is_asked

    def _note(self, text: str) -> None:
        """Say what is going on, unless the user has asked for the end."""
        if not self._stop_requests.is_asked:
            self.facts.note = text

    def _finishing(self) -> None:
        self.facts.note = FINISHING

    def say(self, text: str) -> None:
        """Show a text above the view."""
        with silenced_if_closed(self._stream):
            RichScreen(self._stream).show([Text(text)])

    # ---- drawing ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.live import Live

        with ExitStack() as undo:
            undo.enter_context(self._stop_requests)
            self._live = Live(
                console=Console(file=self._stream, highlight=False),
                auto_refresh=False,
                # else the view would overwrite what this process prints to the same terminal
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            undo.enter_context(self._live)
            undo.callback(self._draw_once_more)
            self._draw()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._note("")
        with silenced_if_closed(self._stream):
            self._undo.close()

    def _keep_drawing(self) -> None:
        """In a thread: between two iterations, when the run reports nothing, the clock goes on."""
        spent_s = 0.0
        with silenced_if_closed(self._stream):
            while not self._is_over.wait(pause_s(spent_s)):
                begun_s = time.thread_time()
                self._draw()
                spent_s = time.thread_time() - begun_s

    def _draw_once_more(self) -> None:
        with silenced_if_closed(self._stream):
            self._draw()

    def _draw(self) -> None:
        assert self._live is not None
        width = self._live.console.width
        found = view_rows(self.facts, time.monotonic(), width)
        said = self.facts.verdict if self._shows_verdict else ""
        self._live.update(draw_rows(found, self.facts.note, said), refresh=True)


def pause_s(spent_s: float) -> float:
    """How long to wait before the next drawing."""
    return max(REDRAW_S, spent_s / MOST_SHARE)


def view_rows(facts: Facts, now_s: float, width: int) -> list[Row]:
    """The lines of the view, of `width` columns; longer ones are cut off."""
    elapsed_s = 0.0 if facts.begun_s is None else now_s - facts.begun_s
    room = width - LABEL
    bar, legend = split_bar(facts.seconds, room)
    found: list[Row] = [
        ("", [(facts.title, "bold cyan")]),
        ("steps", _progress(facts, elapsed_s, room)),
        ("pace", _pace(facts, elapsed_s)),
        ("return", _returns(facts, room)),
        ("evaluation", _evaluation_row(facts)),
        ("time", bar),
        *(("", [(" " * LABEL, ""), *parts]) for parts in legend),
        ("incidents", _incident_row(facts.incidents)),
        ("run", [(str(facts.run_dir), "")]),
    ]
    return found


def _progress(facts: Facts, elapsed_s: float, room: int) -> list[Part]:
    share = min(1.0, facts.env_steps / max(facts.total_steps, 1))
    made = facts.env_steps - facts.start_steps
    left_s = elapsed_s * (facts.total_steps - facts.env_steps) / made if made else None
    text = f" {share:4.0%}  {facts.env_steps:,}/{facts.total_steps:,}"
    text += f"  {clock_text(left_s)} left" if left_s else ""
    size = max(0, min(BAR, room - len(text)))
    done = round(size * share)
    return [("━" * done, "green"), ("─" * (size - done), "dim"), (text, "")]


def _pace(facts: Facts, elapsed_s: float) -> list[Part]:
    text = f"iteration {facts.iteration:,}/{facts.iterations:,}  {clock_text(elapsed_s)} so far"
    if len(facts.paces) < 2:
        return [(text, "dim")]
    (first_s, first), (last_s, last) = facts.paces[0], facts.paces[-1]
    rate = (last - first) / max(last_s - first_s, 1e-9)
    return [(f"{rate:,.0f} steps/s", "bold"), (f"  {text}", "dim")]


def _returns(facts: Facts, room: int) -> list[Part]:
    if not facts.mean_returns:
        return [("no episode has ended yet", "dim")]
    text = f" {facts.mean_returns[-1]:,.2f}"
    what = "  mean of the last 100 episodes" if room >= 50 else "  mean(100)"
    size = max(0, min(BAR, room - len(text) - len(what)))
    return [(sparkline(facts.mean_returns, size), "green"), (text, "bold"), (what, "dim")]


def _evaluation_row(facts: Facts) -> list[Part]:
    if facts.evaluation is None and facts.best is not None:
        return [(f"best {facts.best:,.2f}", ""), ("  so far", "dim")]
    if facts.evaluation is None:
        return [(f"the first at {facts.first_evaluation:,} steps", "dim")]
    steps, mean, std = facts.evaluation
    text = [(f"{mean:,.2f} ± {std:,.2f}", "bold"), (f"  at {steps:,} steps", "dim")]
    return text if facts.best is None else [*text, (f"  best {facts.best:,.2f}", "")]


def _incident_row(number: int) -> list[Part]:
    if not number:
        return [("none", "dim")]
    return [(f"{number}", "bold yellow"), (f"  {LOST}", "")]


def sparkline(values: Sequence[float], width: int) -> str:
    """All values in `width` characters or fewer, low to high; each is the mean of its share."""
    size = min(width, len(values))
    edges = [len(values) * cell // size for cell in range(size + 1)] if size else []
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def split_bar(seconds: Mapping[str, float], room: int) -> tuple[list[Part], list[list[Part]]]:
    """Where the time went: a bar, and lines that name its parts, the largest first."""
    total = sum(seconds.values())
    if total <= 0:
        return [("-", "dim")], []
    size = min(BAR, room)
    bar: list[Part] = []
    legend: list[list[Part]] = []
    begin, left = 0.0, 0
    for number, (name, spent_s) in enumerate(sorted(seconds.items(), key=lambda item: -item[1])):
        shade, colour = LOOKS[min(number, len(LOOKS) - 1)]
        share = spent_s / total
        # rounded edges, not rounded lengths: together they fill the bar exactly
        bar.append((shade * (round((begin + share) * size) - round(begin * size)), colour))
        begin += share
        text = f" {name} {share:.0%}  "
        if share < 0.005:
            continue
        left -= len(text) + 1
        if left < -2 or not legend:  # the two spaces at a line's end need no room
            left = room - len(text) - 1
            legend.append([])
        legend[-1] += [(shade, colour), (text, "")]
    return bar, legend


def draw_rows(found: Iterable[Row], note: str, said: str = "") -> Group:
    """Rows as rich draws them, cut off where the window ends; whole sentences below."""
    from rich.console import Group
    from rich.text import Text as Styled

    text = Styled(no_wrap=True, overflow="ellipsis")
    for number, (name, parts) in enumerate(found):
        text.append("\n" if number else "")
        text.append(f"{name:<{LABEL}}" if name else "", "dim")
        for part, style in parts:
            text.append(part, style or None)
    below = [Styled(f"So far {said}")] if said else []
    if note:
        below.append(Styled(note, "bold yellow" if note == FINISHING else "dim"))
    return Group(text, *below)
