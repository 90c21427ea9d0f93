"""Reads a run's folder back, and makes the report page of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envfleet.errors import CheckpointError
from envfleet.observe.figures import SECONDS, Figures
from envfleet.observe.jsonl import read_lines, rewrite
from envfleet.observe.report import RunRecord, State, Video, render
from envfleet.runs.job import JobKind
from envfleet.runs.run_file import RUN_FILE, RunFile, option_values
from envfleet.runs.time_report import Setup, advice, shares

__all__ = ["EVENTS_FILE", "INCIDENTS", "INCIDENTS_FILE", "METRICS_FILE", "REPORT_FILE", "VIDEOS"]
__all__ += ["read_metrics", "read_record", "write_report"]

METRICS_FILE, INCIDENTS_FILE, EVENTS_FILE = "metrics.jsonl", "incidents.jsonl", "events.jsonl"
REPORT_FILE, INCIDENTS, VIDEOS = "report.html", "incidents", "videos"

SPEED = "env_steps_per_second"
"""A figure that every iteration has, and no other line."""

_EMBEDDED_BYTES = 4_000_000
"""A video up to this size becomes part of the page."""

_WORTH_SAYING = 0.1
"""Share of the time from which on the page gives advice on a part."""

_TEXTS = ("ended", "evaluation_failed")
"""Figures that are no numbers."""

_STATES: dict[str, State] = {"stopped": "stopped", "failed": "failed"}


def read_record(folder: Path, kind: JobKind) -> RunRecord:
    """What a run's folder says, for its page.

    Raises:
        CheckpointError: The folder holds no run of this kind.
    """
    about = RunFile(folder, kind).read()
    lines = read_metrics(folder)
    iterations = [line for line in lines if SPEED in line]
    made = iterations[-1].get("iteration", 0) if iterations else 0
    ended = str(lines[-1].get("ended", "")) if lines else ""
    state, _, reason = ended.partition(": ")
    seconds = sum(line.get("seconds") or 0.0 for line in lines)
    parts = shares(_spent(lines), seconds)
    try:
        found = advice(parts, Setup(**about["setup"]), kind.remedies)
    except TypeError as exc:
        problem = f"has a {RUN_FILE} whose 'setup' cannot be used ({exc})"
        raise CheckpointError(str(folder), problem) from exc
    said = [str(one) for place, one in enumerate(found) if not place or one.share >= _WORTH_SAYING]
    # a run that was stopped in its last evaluation still has to make that
    is_finished = made >= about["iterations"] and state == "finished"
    return RunRecord(
        folder=str(folder),
        name=folder.resolve().name,
        env=about["title"],
        state="finished" if is_finished else _STATES.get(state, "unfinished"),
        reason="" if is_finished else reason,
        total_steps=about["iterations"] * about["iteration_steps"],
        options=option_values(kind, about),
        iterations=iterations,
        evaluations=[line for line in lines if "evaluation_mean" in line],
        failed_evaluations=[line for line in lines if "evaluation_failed" in line],
        incidents=read_lines(folder / INCIDENTS_FILE),
        events=read_lines(folder / EVENTS_FILE),
        seconds=seconds,
        shares=parts,
        verdict=said[0] if said else "nothing was measured",
        advice=said[1:],
        command=about["command"],
        resume_command="" if is_finished else shlex.join([*kind.command, "--resume", str(folder)]),
        facts=about,
        resumed=about.get("resumed", []),
        video=_last_video(folder / VIDEOS),
    )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole: numbers, but for the few texts."""
    return [
        line
        for line in read_lines(folder / METRICS_FILE)
        if type(line.get("env_steps")) is int
        and all(
            isinstance(value, str) if name in _TEXTS else isinstance(value, int | float | None)
            for name, value in line.items()
        )
    ]


def write_report(folder: Path, kind: JobKind) -> Path:
    """Make the page of the run in this folder, also if there is one already."""
    path, record = folder / REPORT_FILE, read_record(folder, kind)
    rewrite(path, render(record, kind.page(record)))
    return path


def _spent(lines: Iterable[Figures]) -> dict[str, float]:
    """Seconds by part."""
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
