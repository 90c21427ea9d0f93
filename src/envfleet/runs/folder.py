"""A run's folder, written while the run works.

    run.json             options, versions, machine, git state, the command that makes it again
    metrics.jsonl        one line per iteration and per evaluation, and one per end
    events.out.tfevents* the same as curves for TensorBoard
    wandb/               the same for Weights & Biases, on request
    incidents.jsonl      one line per failure of an environment
    incidents/           what `envfleet doctor replay` needs to show them again
    events.jsonl         decisions about the nodes of a cluster, with reasons
    videos/              an episode of each evaluation, on request
    report.html          all of it on one page
    .lock                keeps a second process out (lock.py)
    *.pt                 checkpoints (checkpoint.py)

Law: run.json and metrics.jsonl are the truth; the page can be made again from them alone. What
fails here while a run works costs a warning, never the run.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envfleet.engine.incident import Incident
from envfleet.observe import facts, tensorboard
from envfleet.observe.events import Event
from envfleet.observe.figures import Figures
from envfleet.observe.jsonl import JsonLines, add_line, read_lines, rewrite
from envfleet.observe.sinks import Sink, Sinks
from envfleet.observe.tensorboard import TensorBoard
from envfleet.observe.weights_and_biases import WeightsAndBiases
from envfleet.runs import run_file as keys
from envfleet.runs.job import JobKind, Options, RunSettings
from envfleet.runs.record import (
    EVENTS_FILE,
    INCIDENTS,
    INCIDENTS_FILE,
    METRICS_FILE,
    REPORT_FILE,
    VIDEOS,
    read_metrics,
    write_report,
)
from envfleet.runs.run_file import RunFile, as_json, command, defaults_of, lengthened
from envfleet.runs.time_report import Setup

__all__ = ["RunFolder"]

KEPT_REPLAYS = 100
"""Failures that are kept as files: an environment that always fails must not fill the disk."""

_FACTS_OF = ("envfleet", "numpy", "gymnasium", "torch")
"""Packages that every result depends on."""

_OF_EVALUATIONS = {"evaluation_mean", "evaluation_failed"}


class RunFolder:
    """The files of one run, except its checkpoints."""

    def __init__(self, folder: Path, kind: JobKind) -> None:
        self.folder, self._kind = folder, kind
        self.run_file = RunFile(folder, kind)
        self._sinks = Sinks()
        self._seen_incidents = self._kept_incidents = self._seen_events = 0
        self._is_save_noted = False
        self.is_noted_finished = False
        """Whether the last note says that the run is finished."""

    @property
    def report(self) -> Path:
        """Where the page is once the run has ended."""
        return self.folder / REPORT_FILE

    @property
    def incidents(self) -> Path:
        """Where failures are listed."""
        return self.folder / INCIDENTS_FILE

    def video(self, env_steps: int) -> Path:
        """Where the episode of an evaluation is recorded."""
        return self.folder / VIDEOS / f"step_{env_steps:012d}.mp4"

    # ---- what earlier processes left -----------------------------------------------------------

    @property
    def was_cut_off(self) -> bool:
        """Whether an earlier process could not note how it ended, as after a kill."""
        return self._says(keys.UNDER_WAY)

    @property
    def has_saved(self) -> bool:
        """Whether the run ever had a checkpoint, be it still there or not."""
        return self._says(keys.HAS_SAVED)

    @property
    def was_filming(self) -> bool:
        """Whether the last process ended in the middle of a video."""
        return self._says(keys.FILMING)

    @property
    def has_deaths(self) -> bool:
        """Whether an environment died or hung in it."""
        return any(line.get("kind") != "exception" for line in read_lines(self.incidents))

    def _says(self, key: str) -> bool:
        return self.run_file.exists and bool(self.run_file.read().get(key))

    # ---- begin and end -------------------------------------------------------------------------

    def begin(
        self,
        options: Options,
        settings: RunSettings,
        setup: Setup,
        *,
        identity: str,
        packages: Sequence[str] = (),
        kept_by: Sequence[str] | None = None,
    ) -> None:
        """Start a new run: write down what was asked for, delete what an unsaved start left."""
        about: dict[str, Any] = {
            keys.JOB: self._kind.name,
            keys.IDENTITY: identity,
            "title": settings.title,
            **{name: as_json(one) for name, one in options.items()},
            # those of today: a later version may have others
            "defaults": {name: defaults_of(one) for name, one in options.items()},
            "iterations": settings.iterations,
            "iteration_steps": settings.iteration_steps,
            "setup": asdict(setup),
            keys.BEGUN_IN: os.getcwd(),
            keys.KEPT_BY: None if kept_by is None else list(kept_by),
            keys.UNDER_WAY: True,
            **facts.collect((*_FACTS_OF, *packages)),
        }
        self._write(about, settings)
        (self.folder / METRICS_FILE).unlink(missing_ok=True)
        self._open(about, settings, start_steps=0, noted_steps=-1)

    def go_on(
        self,
        options: Options,
        settings: RunSettings,
        setup: Setup,
        *,
        env_steps: int,
        iteration: int,
        owes_evaluation: bool = False,
        packages: Sequence[str] = (),
        kept_by: Sequence[str] | None = None,
        begins_anew: bool = False,
    ) -> None:
        """Continue from a checkpoint: what was noted after it will be noted again."""
        about = self.run_file.read() | {keys.UNDER_WAY: True, "setup": asdict(setup)}
        if kept_by is not None:
            about[keys.KEPT_BY] = list(kept_by)
        now = {name: as_json(one) for name, one in options.items()}
        changed = {
            name: [about[owner].get(name), value]
            for owner, values in now.items()
            for name, value in values.items()
            if about[owner].get(name) != value
        }
        part = {"env_steps": env_steps, keys.BEGINS_ANEW: begins_anew}
        part |= facts.collect((*_FACTS_OF, *packages))
        about.setdefault("resumed", []).append(part | {"changed": changed})
        earlier = lengthened(self._kind, about, settings.iterations, iteration)
        about |= {**now, "iterations": settings.iterations}
        about |= {keys.EARLIER: earlier} if earlier or keys.EARLIER in about else {}
        self._write(about, settings)
        noted_steps = self._take_back(env_steps, owes_evaluation)
        self._open(about, settings, start_steps=env_steps, noted_steps=noted_steps)

    def close(self) -> Path:
        """Close all files, and write the page."""
        self._sinks.close()
        self._sinks = Sinks()
        try:
            self.run_file.update(**{keys.UNDER_WAY: False})
            return write_report(self.folder, self._kind)
        except Exception as exc:  # a page must not turn a finished run into a failed one
            _warn(f"{self.report} could not be written ({exc}); the run itself is complete")
            return self.report

    def let_go(self) -> None:
        """Note that this process was asked to end, and was not cut off."""
        self._update(**{keys.UNDER_WAY: False})

    # ---- while it works ------------------------------------------------------------------------

    def note(self, env_steps: int, figures: Figures) -> None:
        """Give figures to all sinks."""
        self.is_noted_finished = figures.get("ended") == "finished"
        self._sinks.note(env_steps, figures)

    def note_saved(self) -> None:
        """Note that there is a checkpoint."""
        if not self._is_save_noted:
            self._is_save_noted = self._update(**{keys.HAS_SAVED: True})

    def note_kept_by(self, kept_by: Sequence[str]) -> None:
        """Note how checkpoints keep the environments from now on."""
        self._update(**{keys.KEPT_BY: list(kept_by)})

    def note_filming(self, is_filming: bool) -> None:
        """Note whether a video is being made: a renderer may end this process."""
        self._update(**{keys.FILMING: is_filming})

    def note_incidents(self, env_steps: int, incidents: Sequence[Incident]) -> None:
        """Keep those of all failures so far that are new."""
        for incident in incidents[self._seen_incidents :]:
            self._kept_incidents += 1
            try:
                replay = self._keep_replay(self._kept_incidents, incident)
                add_line(self.incidents, _incident_line(env_steps, incident, replay))
            except OSError as exc:
                _warn(f"an incident could not be kept ({exc}): {incident}")
        self._seen_incidents = len(incidents)

    def note_events(self, env_steps: int, events: Sequence[Event]) -> Sequence[Event]:
        """Keep those of all decisions so far that are new; returns them."""
        new = events[self._seen_events :]
        self._seen_events = len(events)
        for event in new:
            try:
                add_line(self.folder / EVENTS_FILE, {"env_steps": env_steps, **asdict(event)})
            except OSError as exc:
                _warn(f"an event could not be kept ({exc}): {event}")
        return new

    def _update(self, **told: Any) -> bool:
        with suppress(OSError):  # the disk is full, and others warn of that
            self.run_file.update(**told)
            return True
        return False

    def _write(self, about: dict[str, Any], settings: RunSettings) -> None:
        about["command"] = command(self._kind, about)
        if settings.wandb_project is not None:
            about.setdefault("wandb_id", secrets.token_hex(4))
        self.run_file.write(about)

    def _take_back(self, env_steps: int, owes_evaluation: bool) -> int:
        """Remove the lines that will be written again; up to which step there were any."""
        lines = read_metrics(self.folder)
        kept = [line for line in lines if line["env_steps"] <= env_steps]
        if owes_evaluation:
            kept = [
                line
                for line in kept
                if line["env_steps"] < env_steps or not line.keys() & _OF_EVALUATIONS
            ]
        rewrite(self.folder / METRICS_FILE, "".join(f"{json.dumps(line)}\n" for line in kept))
        self.is_noted_finished = bool(kept) and kept[-1].get("ended") == "finished"
        return max((line["env_steps"] for line in lines), default=-1)

    def _open(
        self,
        about: Mapping[str, Any],
        settings: RunSettings,
        *,
        start_steps: int,
        noted_steps: int,
    ) -> None:
        self._kept_incidents = len(read_lines(self.incidents))
        wanted: list[Callable[[], Sink]] = [lambda: JsonLines(self.folder / METRICS_FILE)]
        if settings.tensorboard:
            if tensorboard.is_installed():
                wanted.append(lambda: TensorBoard(self.folder, start_steps))
            else:
                _warn(
                    "tensorboard is not installed, so there are no curves for it: "
                    "pip install 'envfleet[train]' brings it, --no-tensorboard goes without"
                )
        if (project := settings.wandb_project) is not None:
            wanted.append(
                lambda: WeightsAndBiases(
                    self.folder,
                    project=project,
                    run_id=about["wandb_id"],
                    config={name: about[name] for name in self._kind.options},
                    noted_steps=noted_steps,
                )
            )
        self._sinks = Sinks(wanted)

    def _keep_replay(self, number: int, incident: Incident) -> str | None:
        """Write the file that shows it again; None if there is none."""
        if number > KEPT_REPLAYS:
            return None
        path = self.folder / INCIDENTS / f"{number:04d}-slot{incident.slot}.incident"
        try:
            path.parent.mkdir(exist_ok=True)
            incident.save(path)
        except Exception as exc:  # a full disk, or something in it that cannot be pickled
            _warn(f"an incident cannot be replayed, it could not be written ({exc}): {incident}")
            return None
        return str(path.relative_to(self.folder))


def _incident_line(env_steps: int, incident: Incident, replay: str | None) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "env_steps": env_steps,
        "slot": incident.slot,
        "slots": incident.slots,
        "worker": incident.worker,
        "kind": incident.kind,
        "doing": incident.doing,
        "seed": incident.seed,
        "reason": incident.reason,
        "replay": replay,
    }


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def free_folder(place: Path, name: str) -> Path:
    """A folder with nothing in it, of this name or with a number behind it."""
    first = place / re.sub(r"[^\w.-]", "_", name)
    number, folder = 2, first
    while folder.exists() and any(folder.iterdir()):
        folder = first.with_name(f"{first.name}-{number}")
        number += 1
    return folder
