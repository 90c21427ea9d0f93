"""What a kind of job has to provide so that it can be run, stopped, resumed and reported on.

    JobKind      all runs of one kind: its options, its command, its report page
    RunSettings  one run: how long it is, what it saves and shows
    Job          the work itself: one iteration, one evaluation, its state

`envfleet.runs.run.run` does the rest. docs/runs.md has a complete example.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envfleet.engine.incident import Incident
from envfleet.errors import VideoError
from envfleet.observe.events import Event
from envfleet.observe.report import JobPage, RunRecord
from envfleet.observe.video import FilmedEpisode
from envfleet.runs.callbacks import Evaluation
from envfleet.runs.time_report import Remedies, Setup

__all__ = ["Iterated", "Job", "JobKind", "Options", "RunSettings", "flag_words"]

Options = Mapping[str, Any]
"""Instances of a kind's option classes, by the same names."""


def flag_words(owner: str, name: str, value: Any) -> Sequence[str]:
    """An option as a flag, whichever class it is of."""
    flag = name.replace("_", "-")
    match value:
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case list() | tuple():
            return [f"--{flag}", ",".join(map(str, value))]
        case dict():
            return [f"--{flag}", json.dumps(value)]
    return [f"--{flag}", str(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """What all runs of one kind have in common."""

    name: str
    """In run.json: a folder of another kind is recognised by it."""
    options: Mapping[str, type[Any]]
    """Dataclasses of options. In run.json each lies under its name, as plain data."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Headings of their tables on the report page, by the same names."""
    command: tuple[str, ...] = ("envfleet", "train")
    """What a user types to start such a run, before the flags."""
    flags: tuple[str, ...] = ()
    """Flags that the command of a repeated run always has."""
    free: frozenset[str] = frozenset()
    """Options that may change when a run goes on: no result depends on them."""
    lengths: tuple[str, ...] = ()
    """Options that say how long a run is: one at its end may be made longer."""
    words: Callable[[str, str, Any], Sequence[str]] = flag_words
    """How an option is typed after the command: from the name of its class, its name and value."""
    remedies: Remedies = field(default_factory=dict)
    """What to try where parts of its own take the time."""
    page: Callable[[RunRecord], JobPage] = JobPage.of
    """What it adds to the report page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the loop has to know about one run."""

    title: str
    """What the run is about: its environment, usually."""
    iterations: int
    iteration_steps: int
    """Environment steps of one iteration."""
    save_every: int = 25_000
    """Environment steps between checkpoints."""
    keep_checkpoints: int = 3
    eval_every: int = 0
    """Environment steps between evaluations; 0 evaluates at the end only."""
    counts_iterations: bool = False
    """Whether these two are numbers of iterations, which need not have as many steps."""
    tensorboard: bool = False
    wandb_project: str | None = None
    """Where Weights & Biases keeps the run; None does without."""
    video: bool = False
    """Whether each evaluation is filmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterated:
    """What one iteration brought."""

    episodes: list[tuple[float, int]] = field(default_factory=list)
    """Return and length of each episode that ended."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured besides, by name."""


class Job:
    """The work of a run. Override what has no default here, and what the job can do besides."""

    envs: Any = None
    """Its environments, as callbacks get them."""
    env_steps: int = 0
    """Environment steps made so far, also by earlier processes of the run."""
    can_evaluate = False
    begins_anew = False
    """Whether it began new episodes when it last went on from a state."""

    def iterate(self, progress: float) -> Iterated:
        """Do one iteration; `progress` is the share of the run that is done, from 0 to 1."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """All that the coming iterations depend on."""
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        """Continue exactly where this state was taken; raise if it does not fit."""
        raise NotImplementedError

    def kept_by(self, state: dict[str, Any]) -> tuple[str, ...] | None:
        """The methods by which this state keeps the environments; none if it could not.

        None itself: a run of this kind has none to keep.
        """
        return None

    @property
    def packages(self) -> Sequence[str]:
        """Packages that results depend on, beside envfleet, numpy, gymnasium and torch."""
        return ()

    @property
    def incidents(self) -> Sequence[Incident]:
        """Failures of its environments since this process began."""
        return ()

    @property
    def events(self) -> Sequence[Event]:
        """Decisions about where its work is done, since this process began."""
        return ()

    @property
    def seconds(self) -> Mapping[str, float]:
        """What its time went into so far, by part."""
        return {}

    @property
    def setup(self) -> Setup:
        """The setup facts that advice about the time depends on."""
        return Setup()

    def evaluate(self, *, is_wary: bool, should_stop: Callable[[], bool]) -> Evaluation:
        """Play episodes with what was learned so far, where training is not disturbed.

        Args:
            is_wary: Environments may end or block their process: not to be played in this one.
            should_stop: To be asked before every step; if True, raise `EvaluationStopped`.
        """
        raise NotImplementedError

    def film(self, path: Path) -> FilmedEpisode:
        """Record an episode."""
        raise VideoError(str(path), "this kind of job records none")
