"""What a meta-RL run adds to its folder and to its report page.

    progress.csv    the figures once more, one row per line of metrics.jsonl, for other programs
    trials.json     the last evaluation's paths in the plane, and how many trials each task had

The page gets the return of each episode of a trial, the tasks seen, and the paths as pictures.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envfleet.meta.evaluate import TrialResults
from envfleet.meta.options import EvalOptions
from envfleet.observe.charts import line_chart, thin
from envfleet.observe.jsonl import rewrite
from envfleet.observe.learning_report import learning_page
from envfleet.observe.markup import Markup, tag
from envfleet.observe.report import (
    JobPage,
    RunRecord,
    empty,
    points,
    rounded,
    section,
    table,
    tile,
)
from envfleet.runs.record import read_metrics

__all__ = ["FREE", "meta_page", "saves_every", "write_progress", "write_trials"]

FREE = frozenset(
    {
        "num_parallel_workers",
        "num_processes",
        "collect",
        "ray_address",
        "step_timeout_s",
        "eval_stochastic",
        "log_interval",
        "save_interval",
        "log_tensorboard",
        "max_eval_tasks",
    }
)
"""Options that may change when a run goes on: nothing that it learns depends on them."""

TRIALS_FILE, PROGRESS_FILE = "trials.json", "progress.csv"
_RETURN = "metrics/return_{split}_episode_{number}"
_LOSSES = "rl_loss/"
_PICTURES = 6
"""Trials that are drawn."""
_SIDE = 300.0

GoalOf = Callable[[Any], Sequence[float]]


def saves_every(options: EvalOptions) -> int:
    """Iterations between checkpoints."""
    return options.save_interval if options.save_interval > 0 else options.log_interval


def write_progress(folder: Path) -> None:
    """Make progress.csv of metrics.jsonl."""
    lines = read_metrics(folder)
    if not lines:
        return
    names = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    rows = csv.DictWriter(text, names, restval="", lineterminator="\n")
    rows.writeheader()
    rows.writerows(lines)
    rewrite(folder / PROGRESS_FILE, text.getvalue())


def write_trials(
    folder: Path, found: TrialResults, goal_of: GoalOf | None, tasks_seen: Mapping[str, int]
) -> None:
    """Keep what the page shows; `goal_of` gives a task's goal in the plane, None if there is none.

    Args:
        folder: Of the run.
        found: The last evaluation.
        goal_of: From a task to where its goal is; None if observations are no places.
        tasks_seen: How many trials each training task had, by its number.
    """
    pictures = []
    for trial, task in list(zip(found.trials, found.tasks, strict=True))[:_PICTURES]:
        if goal_of is None or task is None:
            break
        pictures.append(
            {
                "task": task,
                "goal": [round(float(x), 4) for x in goal_of(task)],
                "points": [[round(float(x), 4) for x in row[:2]] for row in trial.obs],
                "episodes": len(found.returns[0]),
            }
        )
    text = json.dumps({"tasks_seen": dict(tasks_seen), "pictures": pictures})
    rewrite(folder / TRIALS_FILE, text + "\n")


def meta_page(run: RunRecord, title: str) -> JobPage:
    """Tiles and sections of a meta-RL run."""
    page = learning_page(run, title)
    kept = _kept_trials(Path(run.folder) / TRIALS_FILE)
    mine = (_episodes(run), _tasks(kept["tasks_seen"]), _paths(kept["pictures"]))
    return JobPage(
        page.title,
        (*_tiles(run), *page.tiles),
        (*mine[:1], *page.sections[:2], *mine[1:], *page.sections[2:], *_losses(run)),
    )


def _kept_trials(path: Path) -> dict[str, Any]:
    """What trials.json says; nothing if it is not there or not whole."""
    found: Any = None
    try:
        found = json.loads(path.read_text())
        pictures = [
            {
                "task": str(one["task"]),
                "goal": [float(x) for x in one["goal"]],
                "points": [[float(x) for x in place] for place in one["points"]],
                "episodes": int(one["episodes"]),
            }
            for one in found["pictures"]
        ]
        seen = {str(task): int(count) for task, count in found["tasks_seen"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {"tasks_seen": {}, "pictures": []}
    return {"tasks_seen": seen, "pictures": pictures}


def _shown_split(run: RunRecord) -> str:
    """Held-out tasks if there are any, else those of training."""
    first = _RETURN.format(split="eval", number=1)
    return "eval" if any(first in one for one in run.evaluations) else "train"


def _names(run: RunRecord) -> list[str]:
    """The figures of the episodes, in order."""
    split, names = _shown_split(run), list[str]()
    while any(_RETURN.format(split=split, number=len(names) + 1) in one for one in run.evaluations):
        names.append(_RETURN.format(split=split, number=len(names) + 1))
    return names


def _tiles(run: RunRecord) -> tuple[Markup, ...]:
    names = _names(run)
    if not names:
        return ()
    last = run.evaluations[-1]
    what = "held-out tasks" if _shown_split(run) == "eval" else "training tasks"
    wanted = {names[0]: "first episode", names[-1]: "last episode"}
    return tuple(tile(text, rounded(last.get(name)), what) for name, text in wanted.items())


def _episodes(run: RunRecord) -> Markup:
    names = _names(run)
    if not names:
        return section("Episodes of a trial", empty("No trial has been evaluated yet."))
    labels = [f"episode {number}" for number in range(1, len(names) + 1)]
    drawn = line_chart(
        "mean return",
        [
            thin(label, points(run.evaluations, name))
            for label, name in zip(labels, names, strict=True)
        ],
        x_unit="environment steps",
        y_ticks=7,
        x_ticks=8,
        is_large=True,
    )
    keys = [
        tag("li", tag("i", class_=f"key l{number}"), label) for number, label in enumerate(labels)
    ]
    which = "tasks that were not trained on" if _shown_split(run) == "eval" else "training tasks"
    note = tag("p", f"Mean return of each episode, on {which}.", class_="quiet")
    return section("Episodes of a trial", note, drawn, tag("ul", *keys, class_="keys"))


def _losses(run: RunRecord) -> list[Markup]:
    """What the updates of an agent report, if they report anything by these names."""
    names = dict.fromkeys(
        name for one in run.iterations for name in one if name.startswith(_LOSSES)
    )
    drawn = [
        line_chart(title, [thin(title, points(run.iterations, name))], x_ticks=4)
        for name in names
        if (title := name.removeprefix(_LOSSES).replace("_", " "))
    ]
    return [section("Losses", tag("div", *drawn, class_="multiples"))] if drawn else []


def _tasks(seen: Mapping[str, int]) -> Markup:
    if not seen:
        text = "Tasks are endless or drawn by the environments: no two trials need have the same."
        return section("Tasks seen", empty(text))
    counts = sorted(seen.values())
    rows = [
        tag("tr", tag("td", name), tag("td", f"{value:,}"))
        for name, value in (
            ("tasks that were trained on", len(counts)),
            ("trials of all of them", sum(counts)),
            ("least trials of a task", counts[0]),
            ("most trials of a task", counts[-1]),
        )
    ]
    return section("Tasks seen", table(("", ""), rows, "facts"))


def _paths(pictures: Sequence[Mapping[str, Any]]) -> Markup:
    if not pictures:
        text = "The environment is not in the plane, or has not been evaluated yet."
        return section("Paths", empty(text))
    drawn = [_picture(one) for one in pictures]
    note = (
        "Episodes differ in colour. The first begins at its dot, the others a step before theirs. "
        "The ring is the goal."
    )
    return section("Paths", tag("p", note, class_="quiet"), tag("div", *drawn, class_="multiples"))


def _picture(one: Mapping[str, Any]) -> Markup:
    places, goal, episodes = one["points"], one["goal"], one["episodes"]
    coordinates = [x for place in (*places, goal) for x in place]
    margin = max(max(coordinates) - min(coordinates), 0.1) * 0.06
    low, high = min(coordinates) - margin, max(coordinates) + margin

    def at(place: Sequence[float]) -> str:
        x, y = (place[0] - low) / (high - low), (high - place[1]) / (high - low)
        return f"{x * _SIDE:.1f},{y * _SIDE:.1f}"

    length = max(1, (len(places) - 1) // episodes)
    lines = []
    for number in range(episodes):
        # the first step of an episode starts from its own start, which is not observed
        path = places[number * length + (number > 0) : (number + 1) * length + 1]
        if path:
            colour = f"var(--c{number % 8})"
            line = f"fill:none;stroke:{colour};stroke-width:1.5"
            dot = f"fill:none;stroke:{colour};stroke-width:6;stroke-linecap:round"
            start = at(path[0])
            lines.append(tag("polyline", points=" ".join(map(at, path)), style=line))
            lines.append(tag("polyline", points=f"{start} {start}", style=dot))
    x, y = at(goal).split(",")
    ring = "fill:none;stroke:var(--eval);stroke-width:2"
    lines.append(tag("circle", cx=x, cy=y, r="7", style=ring))
    frame = "border:1px solid var(--grid);width:100%;aspect-ratio:1"
    svg = tag(
        "svg",
        tag("title", f"task {one['task']}"),
        *lines,
        viewBox=f"0 0 {_SIDE:g} {_SIDE:g}",
        role="img",
        style=frame,
    )
    return tag("figure", tag("figcaption", tag("b", f"task {one['task']}")), svg)
