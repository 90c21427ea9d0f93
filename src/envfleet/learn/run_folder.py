"""A run's folder: what was asked for, what was measured, what failed, and the page that shows it.

    run.json             options, versions, machine, git state, the command that makes it again
    metrics.jsonl        one line per iteration and per evaluation, and one per end
    events.out.tfevents* the same as curves for TensorBoard
    wandb/               the same for Weights & Biases, on request
    incidents.jsonl      one line per failure of the fleet
    incidents/           what `envfleet doctor replay` needs to show them again
    videos/              an episode of each evaluation, on request
    report.html          all of it on one page
    .lock                keeps a second process out, which is alone.py's business
    *.pt                 checkpoints, which are checkpoint.py's business

Law: run.json and metrics.jsonl are the truth; the page can be made again from them alone. Whatever
fails here while a run is going on costs a warning, never the run.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envfleet.adapters.names import label
from envfleet.engine.incident import Incident
from envfleet.errors import CheckpointError, ConfigError
from envfleet.learn.accounting import Setup, advice, shares
from envfleet.learn.train_options import FREE, LENGTHS
from envfleet.observe import facts, tensorboard
from envfleet.observe.figures import SECONDS, Figures
from envfleet.observe.jsonl import JsonLines, add_line, read_lines, rewrite
from envfleet.observe.report import RunRecord, Setting, State, Video, render
from envfleet.observe.sinks import Sink, Sinks
from envfleet.observe.tensorboard import TensorBoard
from envfleet.observe.weights_and_biases import WeightsAndBiases

RUN_FILE, METRICS_FILE, INCIDENTS_FILE = "run.json", "metrics.jsonl", "incidents.jsonl"
REPORT_FILE, INCIDENTS, VIDEOS = "report.html", "incidents", "videos"

KEPT_REPLAYS = 100
"""Failures that are kept as files; an environment that fails all the time must not fill the disk"""

_EMBEDDED_BYTES = 4_000_000
"""A video up to this size becomes part of the page."""

WORTH_SAYING = 0.1
"""Share of the time from which on a part is worth a remedy on the page."""

IDENTITY = "identity"
"""In run.json and in every checkpoint: which run it is."""

BEGUN_IN = "begun_in"
"""In run.json: where the command was typed, which is where a module of the user's may lie."""

KEPT_BY = "environments_kept_by"
"""In run.json: the ways in which checkpoints keep the environments, none if they cannot be."""

_UNDER_WAY = "is_under_way"
"""In run.json: whether a process trains, or was ended before it could say that it does no more."""

_HAS_KEPT = "has_kept_checkpoints"
"""In run.json: if none is there any more, somebody took them away."""

_EARLIER = "earlier_lengths"
"""In run.json: how long it was to be before it was made longer, each time."""

_FILMING = "is_filming"
"""In run.json: whether a video is being made, or was when the process ended."""

_AGAIN = "runs/again"
"""Where a run that was made longer is made again, if somebody does."""

FACTS_OF = ("envfleet", "numpy", "gymnasium", "torch")
"""Packages that every result depends on."""


class RunFolder:
    """Writes what a run tells of itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sinks = Sinks()
        self._seen_incidents = 0
        self._kept_incidents = 0
        self._is_kept_noted = False
        self.is_told_finished = False
        """Whether the last thing that was noted is that the run is at its end."""

    @property
    def report(self) -> Path:
        """Where the page is once the run has ended."""
        return self.folder / REPORT_FILE

    @property
    def incidents(self) -> Path:
        """Where failures are told."""
        return self.folder / INCIDENTS_FILE

    def video(self, env_steps: int) -> Path:
        """Where the episode of an evaluation is recorded."""
        return self.folder / VIDEOS / f"step_{env_steps:012d}.mp4"

    @property
    def holds_a_run(self) -> bool:
        """Whether somebody trained in it before."""
        return (self.folder / RUN_FILE).exists()

    @property
    def was_cut_off(self) -> bool:
        """Whether somebody trained in it and could not note how that ended, as after a kill."""
        return self.holds_a_run and bool(self._about().get(_UNDER_WAY))

    @property
    def has_kept(self) -> bool:
        """Whether the run has ever kept a checkpoint, be it still there or not."""
        return self.holds_a_run and bool(self._about().get(_HAS_KEPT))

    def kept(self) -> None:
        """Note that a checkpoint was kept."""
        if self._is_kept_noted:
            return
        try:
            self._tell(self._about() | {_HAS_KEPT: True})
        except OSError:  # the disk is full; there will be another one
            return
        self._is_kept_noted = True

    @property
    def iterations(self) -> int:
        """How many the run has."""
        return int(self._about()["iterations"])

    @property
    def earlier_iterations(self) -> list[int]:
        """How many it had before it was made longer, each time."""
        return [one["iterations"] for one in self._about().get(_EARLIER, [])]

    @property
    def has_deaths(self) -> bool:
        """Whether an environment died or hung in it."""
        return any(line["kind"] != "exception" for line in read_lines(self.folder / INCIDENTS_FILE))

    @property
    def was_filming(self) -> bool:
        """Whether its last process was ended in the middle of a video."""
        return bool(self._about().get(_FILMING))

    def begin_filming(self) -> None:
        """What draws may take this process along: say that it is at it."""
        self._note_about({_FILMING: True})

    def end_filming(self) -> None:
        """It has come through."""
        self._note_about({_FILMING: False})

    def let_go(self) -> None:
        """Note that this process was asked to end, and was not cut off."""
        self._note_about({_UNDER_WAY: False})

    def _note_about(self, told: dict[str, Any]) -> None:
        with suppress(OSError):  # the disk is full, which is told elsewhere
            self._tell(self._about() | told)

    def check_same(self, options: Any, ppo: Any) -> None:
        """Refuse to go on with a run by options that would make it another."""
        about = self._about()
        asked = as_json(ppo) | as_json(options)
        fixed = about["ppo"] | {
            name: value
            for name, value in about["options"].items()
            if name not in FREE and name not in LENGTHS
        }
        for name, value in fixed.items():
            if asked[name] != value:
                raise ConfigError(
                    f"{self.folder} holds a run with {name}={value}, which is a part of it; got "
                    f"{name}={asked[name]}. For that start another run in another folder"
                )

    def begin(
        self,
        options: Any,
        ppo: Any,
        *,
        identity: str,
        iterations: int,
        setup: Setup,
        packages: Iterable[str] = (),
        kept_by: Sequence[str] | None = None,
    ) -> None:
        """Start afresh: say what was asked for, forget what an unsaved beginning left."""
        about: dict[str, Any] = {
            IDENTITY: identity,
            "options": as_json(options),
            "ppo": as_json(ppo),
            # as they are today: a later version may have others
            "defaults": {"options": as_json(_plain(options)), "ppo": as_json(_plain(ppo))},
            "iterations": iterations,
            "setup": asdict(setup),
            BEGUN_IN: os.getcwd(),
            KEPT_BY: None if kept_by is None else list(kept_by),
            _UNDER_WAY: True,
            **facts.collect((*FACTS_OF, *packages)),
        }
        about["command"] = command(about)
        if about["options"]["wandb"]:
            about["wandb_id"] = secrets.token_hex(4)
        self._tell(about)
        (self.folder / METRICS_FILE).unlink(missing_ok=True)
        self._open(about, start_steps=0, noted_steps=-1)

    def go_on(
        self,
        options: Any,
        env_steps: int,
        *,
        iterations: int,
        setup: Setup,
        packages: Iterable[str] = (),
        owes_evaluation: bool = False,
        kept_by: Sequence[str] | None = None,
    ) -> None:
        """Continue from a checkpoint: what was noted after it will be noted again."""
        about = self._about() | {_UNDER_WAY: True, "setup": asdict(setup)}
        if kept_by is not None:
            about[KEPT_BY] = list(kept_by)
        before, now = about["options"], as_json(options)
        part = {"env_steps": env_steps, **facts.collect((*FACTS_OF, *packages))}
        part["changed"] = {
            name: [before.get(name), value]
            for name, value in now.items()
            if before.get(name) != value
        }
        about.setdefault("resumed", []).append(part)
        if iterations != about["iterations"]:
            shorter = {name: before[name] for name in LENGTHS}
            earlier = [*about.get(_EARLIER, []), shorter | {"iterations": about["iterations"]}]
            # one by which nothing was learned never was
            made = env_steps // (about["ppo"]["n_steps"] * now["n_envs"])
            most = min(made, iterations - 1)
            about[_EARLIER] = [one for one in earlier if one["iterations"] <= most]
        about |= {"options": now, "iterations": iterations}
        about["command"] = command(about)
        if now["wandb"]:
            about.setdefault("wandb_id", secrets.token_hex(4))
        self._tell(about)
        lines = read_lines(self.folder / METRICS_FILE)
        kept = [line for line in lines if line["env_steps"] <= env_steps]
        if owes_evaluation:
            kept = [
                line
                for line in kept
                if line["env_steps"] < env_steps or not line.keys() & _OF_EVALUATIONS
            ]
        rewrite(self.folder / METRICS_FILE, "".join(f"{json.dumps(line)}\n" for line in kept))
        self.is_told_finished = bool(kept) and kept[-1].get("ended") == "finished"
        noted = max((line["env_steps"] for line in lines), default=-1)
        self._open(about, start_steps=env_steps, noted_steps=noted)

    def note(self, env_steps: int, figures: Figures) -> None:
        """Tell every sink."""
        self.is_told_finished = figures.get("ended") == "finished"
        self._sinks.note(env_steps, figures)

    def note_incidents(self, env_steps: int, incidents: Sequence[Incident]) -> None:
        """Keep the failures that are new among all that the fleet has had."""
        for incident in incidents[self._seen_incidents :]:
            self._kept_incidents += 1
            try:
                replay = self._keep_replay(self._kept_incidents, incident)
                add_line(self.folder / INCIDENTS_FILE, _told(env_steps, incident, replay))
            except OSError as exc:
                _warn(f"an incident could not be kept ({exc}): {incident}")
        self._seen_incidents = len(incidents)

    def close(self) -> Path:
        """Close all, and write the page."""
        self._sinks.close()
        self._sinks = Sinks()
        try:
            self._tell(self._about() | {_UNDER_WAY: False})
            return write_report(self.folder)
        except Exception as exc:  # whatever it is, it must not make a failure of a finished run
            _warn(f"{self.report} could not be written ({exc}); the run itself is whole")
            return self.report

    def _about(self) -> dict[str, Any]:
        about: dict[str, Any] = json.loads((self.folder / RUN_FILE).read_text())
        return about

    def _tell(self, about: Mapping[str, Any]) -> None:
        rewrite(self.folder / RUN_FILE, json.dumps(about, indent=2) + "\n")

    def _open(self, about: Mapping[str, Any], *, start_steps: int, noted_steps: int) -> None:
        self._kept_incidents = len(read_lines(self.folder / INCIDENTS_FILE))
        options = about["options"]
        wanted: list[Callable[[], Sink]] = [lambda: JsonLines(self.folder / METRICS_FILE)]
        if options.get("tensorboard"):
            if tensorboard.is_installed():
                wanted.append(lambda: TensorBoard(self.folder, start_steps))
            else:
                _warn(
                    "tensorboard is not installed, so there are no curves for it: "
                    "pip install 'envfleet[train]' brings it, --no-tensorboard goes without"
                )
        if options.get("wandb"):
            wanted.append(
                lambda: WeightsAndBiases(
                    self.folder,
                    project=options["wandb_project"],
                    run_id=about["wandb_id"],
                    config={"options": options, "ppo": about["ppo"]},
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


def _told(env_steps: int, incident: Incident, replay: str | None) -> dict[str, Any]:
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


def as_json(options: Any) -> dict[str, Any]:
    """Options as they come back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    return found


def _plain(options: Any) -> Any:
    """These options when nobody asks; what has no default is as it was asked for."""
    needed = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.default is MISSING and field.default_factory is MISSING
    }
    return type(options)(**needed)


def settings(about: Mapping[str, Any]) -> dict[str, list[Setting]]:
    """Every option that a run.json tells of, by whose it is."""
    plain = about.get("defaults", {})
    return {
        title: [
            Setting(name, value, plain.get(owner, {}).get(name))
            for name, value in about[owner].items()
        ]
        for owner, title in (("options", "Run"), ("ppo", "PPO"))
    }


def command(about: Mapping[str, Any]) -> str:
    """The line that makes the same run again, whatever recipes there will be."""
    options: Mapping[str, Any] = about["options"]
    earlier: list[dict[str, Any]] = about.get(_EARLIER, [])
    shortest = {name: earlier[0][name] for name in LENGTHS} if earlier else {}
    first = dict(about) | {"options": {**options, **shortest}}
    unusual = [one for group in settings(first).values() for one in group if not one.is_plain]
    if any(one.name == "num_episodes" for one in unusual):  # it goes before the other length
        unusual = [one for one in unusual if one.name != "total_steps"]
    words = ["envfleet", "train", "--env", options["env"], "--no-recipe"]
    lines = [words + [word for one in unusual for word in _flag(one.name, one.value)]]
    if earlier:
        lines[0] += ["--checkpoint-dir", _AGAIN]
    for length in [*earlier[1:], *([options] if earlier else [])]:
        name = "total_steps" if length["num_episodes"] is None else "num_episodes"
        lines.append(["envfleet", "train", "--resume", _AGAIN, *_flag(name, length[name])])
    return " && ".join(shlex.join(line) for line in lines)


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    match value:
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case list() | tuple():
            return [f"--{flag}", ",".join(map(str, value))]
        case dict():
            return [f"--{flag}", json.dumps(value)]
    return [f"--{flag}", str(value)]


def read_record(folder: Path) -> RunRecord:
    """What a run's folder tells, for its page."""
    about = json.loads((folder / RUN_FILE).read_text())
    lines = read_lines(folder / METRICS_FILE)
    iterations = [line for line in lines if "mean_return" in line]
    made = iterations[-1]["iteration"] if iterations else 0
    ended = str(lines[-1].get("ended", "")) if lines else ""
    state, _, reason = ended.partition(": ")
    seconds = sum(line.get("seconds") or 0.0 for line in lines)
    parts = shares(_spent(lines), seconds)
    found = advice(parts, Setup(**about.get("setup", {})))
    said = [str(one) for place, one in enumerate(found) if not place or one.share >= WORTH_SAYING]
    # one that was ended in its last evaluation has that to make up for
    is_finished = made >= about["iterations"] and state == "finished"
    per_iteration = about["ppo"]["n_steps"] * about["options"]["n_envs"]
    return RunRecord(
        folder=str(folder),
        name=folder.resolve().name,
        env=label(about["options"]["env"]),
        state="finished" if is_finished else _STATES.get(state, "unfinished"),
        reason="" if is_finished else reason,
        total_steps=about["iterations"] * per_iteration,
        settings=settings(about),
        iterations=iterations,
        evaluations=[line for line in lines if "evaluation_mean" in line],
        failed_evaluations=[line for line in lines if "evaluation_failed" in line],
        incidents=read_lines(folder / INCIDENTS_FILE),
        seconds=seconds,
        shares=parts,
        verdict=said[0] if said else "nothing was measured",
        advice=said[1:],
        command=about.get("command", ""),
        resume_command=""
        if is_finished
        else shlex.join(["envfleet", "train", "--resume", str(folder)]),
        facts=about,
        resumed=about.get("resumed", []),
        video=_last_video(folder / VIDEOS),
    )


def new_identity() -> str:
    """What tells a run from all others, also from one with the same options."""
    return secrets.token_hex(8)


def read_identity(folder: Path) -> str:
    """That of the run in this folder."""
    identity = json.loads((folder / RUN_FILE).read_text()).get(IDENTITY)
    if not isinstance(identity, str):
        raise CheckpointError(
            str(folder),
            f"has a {RUN_FILE} that does not say which run it is, as earlier versions of envfleet "
            "wrote it; start another run",
        )
    return identity


def check_identity(identity: str, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint's state that is of another run."""
    theirs = state.get(IDENTITY)
    if theirs != identity:
        whose = "does not say of which run it is" if theirs is None else f"is of run {theirs}"
        raise ConfigError(f"it {whose}, and {RUN_FILE} is of run {identity}")


def write_report(folder: Path) -> Path:
    """Make the page of the run in this folder, again if it is there."""
    path = folder / REPORT_FILE
    rewrite(path, render(read_record(folder)))
    return path


_OF_EVALUATIONS = {"evaluation_mean", "evaluation_failed"}

_STATES: dict[str, State] = {"stopped": "stopped", "failed": "failed"}


def _spent(lines: Iterable[Figures]) -> dict[str, float]:
    """Seconds by what they were spent on."""
    spent: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(SECONDS) and value is not None:
                part = name.removeprefix(SECONDS)
                spent[part] = spent.get(part, 0.0) + value
    return spent


def _last_video(folder: Path) -> Video | None:
    paths = sorted(folder.glob("step_*.mp4"))
    if not paths or paths[-1].stat().st_size > _EMBEDDED_BYTES:
        return None
    return Video(f"{folder.name}/{paths[-1].name}", paths[-1].read_bytes())


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
