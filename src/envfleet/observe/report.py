"""A run as one page: what it learned, where its time went, what failed, and how to do it again.

Pure: a ``RunRecord`` in, HTML out. The page needs nothing but itself, which its own content policy
holds it to: no network, no other file. Whatever comes from outside is escaped by ``markup``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from envfleet.observe.charts import Mark, line_chart, share_bar, thin
from envfleet.observe.figures import Figures, figure
from envfleet.observe.markup import Markup, join, tag

__all__ = ["RunRecord", "Setting", "State", "Video", "render"]

State = Literal["finished", "stopped", "failed", "unfinished"]

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; media-src data:"
)
_NOT_DRAWN = frozenset({"iteration", "env_steps", "mean_return", "episodes", "seconds", "epochs"})
_COLOURS = {
    name: number
    for number, name in enumerate(
        (
            "learning",
            "evaluation",
            "start-up",
            "environments",
            "waiting",
            "inference",
            "transport",
            "filming",
            "the rest",
            "bookkeeping",
        )
    )
}
"""Parts of the time have the same colour on every page."""
_MOST_ROWS = 200
"""Of incidents; all of them are in their own file."""
_STATES: dict[State, str] = {
    "finished": "the run made all of its iterations",
    "stopped": "the run was asked to stop, and can go on",
    "failed": "the run was ended by an error, and can go on from its last checkpoint",
    "unfinished": "the run is under way, or was killed and can go on from its last checkpoint",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One option: what was asked for, and what it is when nobody asks."""

    name: str
    value: Any
    default: Any

    @property
    def is_plain(self) -> bool:
        """Whether it is what it is when nobody asks."""
        return bool(self.value == self.default)


@dataclass(frozen=True, slots=True)
class Video:
    """A recorded episode that is short enough to be part of the page."""

    name: str
    mp4: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that is known of a run, as its folder tells it."""

    folder: str
    """Where the run is, as it was named when the page was made."""
    name: str
    env: str
    state: State
    reason: str = ""
    """Why it failed."""
    total_steps: int
    """Environment steps that the whole run has."""
    settings: Mapping[str, Sequence[Setting]]
    """Options by whose they are."""
    iterations: Sequence[Figures] = ()
    evaluations: Sequence[Figures] = ()
    failed_evaluations: Sequence[Figures] = ()
    """Those of which no episode came to its end, and why (`evaluation_failed`)."""
    incidents: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0
    shares: Mapping[str, float]
    """Where the time went, as parts of 1."""
    verdict: str
    advice: Sequence[str] = ()
    """What else could be done about the time."""
    command: str
    """Makes the same run again."""
    resume_command: str = ""
    """Goes on with this one."""
    facts: Mapping[str, Any]
    resumed: Sequence[Mapping[str, Any]] = ()
    """When and where the run went on: `env_steps` and facts."""
    video: Video | None = None

    @property
    def env_steps(self) -> int:
        """Made so far."""
        return int(self.iterations[-1]["env_steps"]) if self.iterations else 0


def render(run: RunRecord) -> str:
    """The page."""
    title = f"{run.env}: {run.name}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", _own_file("report.css")),
    )
    body = tag(
        "body",
        tag(
            "main",
            _header(run),
            _learning(run),
            _evaluations(run),
            _updates(run),
            _time(run),
            _incidents(run),
            _again(run),
            _settings(run),
            _surroundings(run),
        ),
        tag("script", _own_file("report.js")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


# ---- sections ------------------------------------------------------------------------------------


def _header(run: RunRecord) -> Markup:
    best = _best(run)
    last = run.iterations[-1] if run.iterations else {}
    tiles = [
        _tile(
            "best evaluation",
            "none yet" if best is None else _figure(best["evaluation_mean"]),
            "" if best is None else f"at {best['env_steps']:,} steps",
        ),
        *(
            [
                _tile(
                    "last evaluation",
                    _spread(run.evaluations[-1]),
                    f"at {run.evaluations[-1]['env_steps']:,} steps",
                )
            ]
            if run.evaluations and run.evaluations[-1] is not best
            else []
        ),
        _tile(
            "mean return",
            "none yet" if last.get("mean_return") is None else _figure(last["mean_return"]),
            "of the last 100 episodes",
        ),
        _tile("environment steps", f"{run.env_steps:,}", f"of {run.total_steps:,}"),
        _tile("time", _duration(run.seconds), "in all parts" if run.resumed else ""),
        _tile("speed", f"{run.env_steps / run.seconds if run.seconds else 0.0:,.0f}", "steps/s"),
        _tile("incidents", str(len(run.incidents)), "" if run.incidents else "nothing failed"),
    ]
    begun = str(run.facts.get("started", "")).replace("T", " ").removesuffix("+00:00")
    return tag(
        "header",
        tag("p", "envfleet · PPO", class_="kicker"),
        tag(
            "h1",
            run.env,
            " ",
            tag("span", run.state, class_=f"state {run.state}", title=_STATES[run.state]),
        ),
        tag("p", f"{run.name}{f' · begun {begun} UTC' if begun else ''}", class_="quiet"),
        *([tag("p", run.reason, class_="failure")] if run.reason else []),
        tag("div", *tiles, class_="tiles"),
    )


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
    line = thin("mean return", _points(run.iterations, "mean_return"))
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
    return _section("Learning curve", drawn, tag("ul", *keys, class_="keys"))


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
        return _section("Evaluation", _empty("The policy has not been evaluated yet."))
    best = _best(run)
    made = sorted((*run.evaluations, *run.failed_evaluations), key=lambda one: one["env_steps"])
    rows = [_evaluation(one, is_best=one is best) for one in made]
    head = ("steps", "mean return", "spread", "")
    table = _table(head, rows, "numbers")
    film = [] if run.video is None else [_film(run.video)]
    return _section("Evaluation", tag("div", table, *film, class_="columns"))


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
        tag("td", _figure(one["evaluation_mean"])),
        tag("td", _figure(one.get("evaluation_std"))),
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
        return _section("Updates", _empty("No iteration is done yet."))
    drawn = [
        line_chart(
            figure(name).title,
            [thin(figure(name).title, _points(run.iterations, name))],
            note=figure(name).meaning.replace("`", ""),
            x_ticks=4,
        )
        for name in names
    ]
    return _section("Updates", tag("div", *drawn, class_="multiples"))


def _time(run: RunRecord) -> Markup:
    if not run.shares:
        return _section("Where the time went", _empty("Nothing was measured yet."))
    texts = {
        name: f"{share:.1%}, {_duration(share * run.seconds)}" for name, share in run.shares.items()
    }
    more = [tag("ul", *(tag("li", *_spoken(one)) for one in run.advice), class_="advice")]
    return _section(
        "Where the time went",
        share_bar(run.shares, texts, {name: _COLOURS.get(name, 8) for name in run.shares}),
        tag("p", *_spoken(run.verdict), class_="verdict"),
        *(more if run.advice else []),
    )


def _incidents(run: RunRecord) -> Markup:
    if not run.incidents:
        text = "No environment raised, hung or died."
        return _section("Incidents", _empty(text))
    rows = [
        tag(
            "tr",
            tag("td", str(one.get("time", "")).replace("T", " ").removesuffix("+00:00")),
            tag("td", f"{one.get('env_steps', 0):,}"),
            tag("td", str(one.get("slot", ""))),
            tag("td", f"{one.get('kind', '')} during {one.get('doing', '')}"),
            tag("td", "continued" if one.get("seed") is None else str(one["seed"])),
            tag("td", str(one.get("reason", "")), class_="reason"),
            tag("td", tag("code", str(one["replay"])) if one.get("replay") else "not kept"),
        )
        for one in run.incidents[-_MOST_ROWS:]
    ]
    head = ("time (UTC)", "steps", "slot", "what", "seed", "reason", "replay file")
    count = len(run.incidents)
    text = (
        f"{count} failure{'s' if count > 1 else ''}: each cost the episodes that were running in "
        "its slots, and was kept with its seed and actions. "
        f"{f'The last {_MOST_ROWS} are shown. ' if count > _MOST_ROWS else ''}To see one again: "
    )
    kept = [f"{run.folder}/{one['replay']}" for one in run.incidents if one.get("replay")]
    return _section(
        "Incidents",
        tag("p", text, tag("code", f"envfleet doctor replay {(*kept, 'FILE')[0]}")),
        _table(head, rows, "one-line"),
    )


def _again(run: RunRecord) -> Markup:
    pieces = [tag("p", "The same run again, bit for bit on the same machine:"), _code(run.command)]
    if run.resume_command:
        pieces += [tag("p", "Go on with this one:"), _code(run.resume_command)]
    return _section("Reproduce", *pieces)


def _settings(run: RunRecord) -> Markup:
    tables = []
    for owner, settings in run.settings.items():
        rows = [
            tag(
                "tr",
                tag("td", tag("code", one.name)),
                tag("td", _told(one.value)),
                tag("td", "" if one.is_plain else _told(one.default), class_="quiet"),
                class_=None if one.is_plain else "changed",
            )
            for one in settings
        ]
        table = _table(("option", "value", "default"), rows)
        tables.append(tag("div", tag("h3", owner), table))
    note = tag("p", "Coloured: what differs from the plain defaults.", class_="quiet")
    return _section("Options", note, tag("div", *tables, class_="columns settings"))


def _surroundings(run: RunRecord) -> Markup:
    facts = run.facts
    rows = [(name, str(text)) for name, text in facts.get("versions", {}).items()]
    machine = facts.get("machine", {})
    rows += [(name, str(value)) for name, value in machine.items() if value not in (None, "")]
    kept_by = facts.get("environments_kept_by")
    if kept_by is not None:
        rows.append(("environments are kept by", ", ".join(kept_by) or "nothing"))
    git = facts.get("git")
    if git:
        rows.append(("git commit", str(git.get("commit", ""))))
        if "is_dirty" in git:
            rows.append(("tracked files", "changed" if git["is_dirty"] else "as committed"))
    table = _table(
        ("", ""),
        [tag("tr", tag("td", name), tag("td", tag("code", text))) for name, text in rows],
        "facts",
    )
    parts = [
        tag(
            "li",
            f"at {int(part.get('env_steps', 0)):,} steps, "
            f"{str(part.get('started', '')).replace('T', ' ').removesuffix('+00:00')} UTC"
            f"{_differences(facts, part)}",
        )
        for part in run.resumed
    ]
    more = [tag("p", "The run went on from a checkpoint:"), tag("ul", *parts)] if parts else []
    return _section("Versions and machine", table, *more)


# ---- pieces --------------------------------------------------------------------------------------


def _best(run: RunRecord) -> Figures | None:
    """The evaluation whose policy is kept as the best: the last one that was never surpassed."""
    seen = [one for one in run.evaluations if one["evaluation_mean"] is not None]
    return max(reversed(seen), key=lambda one: float(one["evaluation_mean"]), default=None)


def _section(title: str, *children: str) -> Markup:
    return tag("section", tag("h2", title), *children)


def _tile(name: str, value: str, more: str) -> Markup:
    return tag("div", tag("span", name), tag("b", value), tag("small", more), class_="tile")


def _table(head: Sequence[str], rows: Sequence[Markup], kind: str = "") -> Markup:
    heads = [tag("tr", *(tag("th", name) for name in head))] if any(head) else []
    table = tag("table", tag("thead", *heads), tag("tbody", *rows), class_=kind or None)
    return tag("div", table, class_="scroll")


def _code(text: str) -> Markup:
    # a line may break before a flag, not within one
    first, *flags = text.split(" --")
    words = [tag("span", first), *(tag("span", f"--{flag}") for flag in flags)]
    button = tag("button", "Copy", type="button", class_="copy")
    return tag("div", tag("pre", tag("code", join(words, " "))), button, class_="command")


def _empty(text: str) -> Markup:
    return tag("p", text, class_="empty")


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What was not the same when a run went on."""
    changed = [
        f"{name} {before['versions'][name]} became {version}"
        for name, version in after.get("versions", {}).items()
        if before.get("versions", {}).get(name, version) != version
    ]
    changed += [
        f"another {what}" for what in ("machine", "git") if before.get(what) != after.get(what)
    ]
    changed += [
        f"{name} {_told(old)} became {_told(new)}"
        for name, (old, new) in after.get("changed", {}).items()
    ]
    return f" ({', '.join(changed)})" if changed else ""


def _points(lines: Sequence[Figures], name: str) -> list[tuple[float, float]]:
    return [
        (float(one["env_steps"]), float(one[name])) for one in lines if one.get(name) is not None
    ]


def _spread(evaluation: Figures) -> str:
    mean, std = evaluation["evaluation_mean"], evaluation.get("evaluation_std")
    return f"{_figure(mean)} ± {_figure(std)}"


def _spoken(text: str) -> list[Markup | str]:
    """A sentence; what stands between backticks is code."""
    sentence = f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
    return [
        tag("code", part) if number % 2 else part for number, part in enumerate(sentence.split("`"))
    ]


def _figure(value: Any) -> str:
    """A measured number: about four digits."""
    if value is None:
        return "none"
    number = float(value)
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or "none"
    return "none" if value is None else str(value)


def _own_file(name: str) -> Markup:
    return Markup(resources.files("envfleet.observe").joinpath(name).read_text("utf-8"))
