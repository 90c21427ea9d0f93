"""Report sections of a job that learns: learning curve, evaluations, updates. Pure.

A job that measures returns, evaluations and figures of its updates takes these for its page, and
may add others of its own.
"""

from __future__ import annotations

import base64

from envfleet.observe.charts import Mark, line_chart, thin
from envfleet.observe.figures import Figures, figure
from envfleet.observe.markup import Markup, tag
from envfleet.observe.report import (
    JobPage,
    RunRecord,
    Video,
    empty,
    points,
    rounded,
    section,
    table,
    tile,
)

__all__ = ["learning_page"]

_NOT_DRAWN = frozenset({"iteration", "env_steps", "mean_return", "episodes", "seconds", "epochs"})


def learning_page(run: RunRecord, title: str) -> JobPage:
    """Tiles and sections of a run that learns, under the name of what it learns by."""
    return JobPage(title, _tiles(run), (_learning(run), _evaluations(run), _updates(run)))


def _tiles(run: RunRecord) -> tuple[Markup, ...]:
    best = _best(run)
    last = run.iterations[-1] if run.iterations else {}
    mean = last.get("mean_return")
    tiles = [
        tile(
            "best evaluation",
            "none yet" if best is None else rounded(best["evaluation_mean"]),
            "" if best is None else f"at {best['env_steps']:,} steps",
        ),
        tile(
            "mean return", "none yet" if mean is None else rounded(mean), "of the last 100 episodes"
        ),
    ]
    if run.evaluations and (latest := run.evaluations[-1]) is not best:
        tiles.insert(
            1, tile("last evaluation", _spread(latest), f"at {latest['env_steps']:,} steps")
        )
    return tuple(tiles)


def _learning(run: RunRecord) -> Markup:
    marks = [
        Mark(
            one["env_steps"],
            float(one["evaluation_mean"]),
            float(one.get("evaluation_std") or 0.0),
            f"evaluation at {one['env_steps']:,} steps: {_spread(one)}",
        )
        for one in run.evaluations
        if one["evaluation_mean"] is not None
    ]
    line = thin("mean return", points(run.iterations, "mean_return"))
    keys = [tag("li", tag("i", class_="key l0"), figure("mean_return").meaning)]
    if marks:
        keys.append(tag("li", tag("i", class_="key eval"), "evaluations and their spread"))
    breaks = [float(part["env_steps"]) for part in run.resumed]
    if breaks:
        keys.append(tag("li", tag("i", class_="key break"), "the run went on from a checkpoint"))
    drawn = line_chart(
        "return",
        [line] if line.points else [],
        marks,
        x_unit="environment steps",
        breaks=breaks,
        y_ticks=7,
        x_ticks=8,
        is_large=True,
    )
    return section("Learning curve", drawn, tag("ul", *keys, class_="keys"))


def _film(video: Video) -> Markup:
    source = f"data:video/mp4;base64,{base64.b64encode(video.mp4).decode()}"
    return tag(
        "figure",
        tag("figcaption", tag("b", "one of its episodes"), tag("small", video.name)),
        tag("video", src=source, controls=True, loop=True, muted=True, playsinline=True),
        class_="film",
    )


def _evaluations(run: RunRecord) -> Markup:
    if not run.evaluations and not run.failed_evaluations:
        return section("Evaluation", empty("The policy has not been evaluated yet."))
    best = _best(run)
    made = sorted((*run.evaluations, *run.failed_evaluations), key=lambda one: one["env_steps"])
    rows = [_evaluation(one, is_best=one is best) for one in made]
    head = ("steps", "mean return", "spread", "")
    film = [] if run.video is None else [_film(run.video)]
    return section("Evaluation", tag("div", table(head, rows, "numbers"), *film, class_="columns"))


def _evaluation(one: Figures, *, is_best: bool) -> Markup:
    steps = tag("td", f"{one['env_steps']:,}")
    if "evaluation_failed" in one:
        return tag("tr", steps, tag("td", f"failed: {one['evaluation_failed']}", colspan=3))
    lost = one.get("evaluation_lost")
    notes = ["best.pt"] if is_best else []
    notes += [f"{lost} episode{'s' if lost > 1 else ''} lost"] if lost else []
    return tag(
        "tr",
        steps,
        tag("td", rounded(one["evaluation_mean"])),
        tag("td", rounded(one.get("evaluation_std"))),
        tag("td", ", ".join(notes)),
        class_="best" if is_best else None,
    )


def _updates(run: RunRecord) -> Markup:
    names = list(
        dict.fromkeys(
            name
            for one in run.iterations
            for name, value in one.items()
            if isinstance(value, int | float) and name not in _NOT_DRAWN and "/" not in name
        )
    )
    if not names:
        return section("Updates", empty("No iteration is done yet."))
    drawn = [
        line_chart(
            figure(name).title,
            [thin(figure(name).title, points(run.iterations, name))],
            note=figure(name).meaning.replace("`", ""),
            x_ticks=4,
        )
        for name in names
    ]
    return section("Updates", tag("div", *drawn, class_="multiples"))


def _best(run: RunRecord) -> Figures | None:
    """The evaluation whose policy is kept as the best: the last one that was never surpassed."""
    seen = [one for one in run.evaluations if one["evaluation_mean"] is not None]
    return max(reversed(seen), key=lambda one: float(one["evaluation_mean"]), default=None)


def _spread(evaluation: Figures) -> str:
    mean, std = evaluation["evaluation_mean"], evaluation.get("evaluation_std")
    return f"{rounded(mean)} ± {rounded(std)}"
