"""A run as one page: what came of it, where its time went, what failed, and how to repeat it.

Pure: a `RunRecord` and what its job adds (`JobPage`) in, HTML out. The page needs nothing but
itself: its content policy forbids it to load anything. ``markup`` escapes all text that comes from
outside.

    header, job's tiles ─► job's sections ─► time ─► incidents ─► nodes ─► reproduce ─► options
    ─► versions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, Self

from envfleet.observe.charts import part_colour, share_bar
from envfleet.observe.figures import Figures
from envfleet.observe.markup import Markup, join, tag

__all__ = ["JobPage", "OptionValue", "RunRecord", "State", "Video", "render"]
__all__ += ["empty", "points", "rounded", "section", "table", "tile"]

State = Literal["finished", "stopped", "failed", "unfinished"]

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; media-src data:"
)
_MOST_ROWS = 200
"""Of incidents; all of them are in their own file."""
_STATES: dict[State, str] = {
    "finished": "the run made all of its iterations",
    "stopped": "the run was asked to stop, and can go on",
    "failed": "the run was ended by an error, and can go on from its last checkpoint",
    "unfinished": "the run is under way, or was killed and can go on from its last checkpoint",
}


@dataclass(frozen=True, slots=True)
class OptionValue:
    """One option: its value and its default."""

    name: str
    value: Any
    default: Any

    @property
    def is_plain(self) -> bool:
        """Whether it has its default."""
        return bool(self.value == self.default)


@dataclass(frozen=True, slots=True)
class Video:
    """A recorded episode that is short enough to be part of the page."""

    name: str
    mp4: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that a run's folder says about it."""

    folder: str
    """Where the run is, as it was named when the page was made."""
    name: str
    env: str
    """What the run is about."""
    state: State
    reason: str = ""
    """Why it failed."""
    total_steps: int
    """Environment steps that the whole run has; 0 if it is not measured in them."""
    options: Mapping[str, Sequence[OptionValue]]
    """By the heading of their table."""
    iterations: Sequence[Figures] = ()
    evaluations: Sequence[Figures] = ()
    failed_evaluations: Sequence[Figures] = ()
    """Those that completed no episode, and why (`evaluation_failed`)."""
    incidents: Sequence[Mapping[str, Any]] | None = ()
    """None if the job tells of failures itself."""
    events: Sequence[Mapping[str, Any]] = ()
    """Decisions about where work is done: `env_steps` and those of `observe.events`."""
    seconds: float = 0.0
    shares: Mapping[str, float]
    """The share of the time that each part took."""
    verdict: str
    advice: Sequence[str] = ()
    """What else would save time."""
    command: str
    """Repeats the run."""
    repeats: str = "The same run again"
    """What the command does."""
    resume_command: str = ""
    """Continues it."""
    facts: Mapping[str, Any]
    resumed: Sequence[Mapping[str, Any]] = ()
    """When and where the run went on: `env_steps` and facts."""
    video: Video | None = None

    @property
    def env_steps(self) -> int:
        """Made so far."""
        return int(self.iterations[-1]["env_steps"]) if self.iterations else 0


@dataclass(frozen=True, slots=True)
class JobPage:
    """What a kind of job adds to the page; build it with `tile` and `section`."""

    title: str = ""
    """What kind of job it is."""
    tiles: Sequence[Markup] = ()
    """Numbers in the header."""
    sections: Sequence[Markup] = ()
    """Between the header and where the time went."""

    @classmethod
    def of(cls, run: RunRecord) -> Self:
        """A page to which the job adds nothing."""
        return cls()


def render(run: RunRecord, page: JobPage) -> str:
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
            _header(run, page),
            *page.sections,
            _time(run),
            *([] if run.incidents is None else [_incidents(run, run.incidents)]),
            *_decisions(run),
            _again(run),
            _options(run),
            _surroundings(run),
        ),
        tag("script", _own_file("report.js")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


# ---- sections ------------------------------------------------------------------------------------


def _header(run: RunRecord, page: JobPage) -> Markup:
    tiles = [*page.tiles]
    if run.total_steps:
        tiles.append(tile("environment steps", f"{run.env_steps:,}", f"of {run.total_steps:,}"))
    tiles.append(tile("time", _duration(run.seconds), "in all parts" if run.resumed else ""))
    if run.total_steps:
        rate = run.env_steps / run.seconds if run.seconds else 0.0
        tiles.append(tile("speed", f"{rate:,.0f}", "steps/s"))
    if run.incidents is not None:
        more = "" if run.incidents else "nothing failed"
        tiles.append(tile("incidents", str(len(run.incidents)), more))
    begun = str(run.facts.get("started", "")).replace("T", " ").removesuffix("+00:00")
    return tag(
        "header",
        tag("p", " · ".join(filter(None, ("envfleet", page.title))), class_="kicker"),
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


def _time(run: RunRecord) -> Markup:
    if not run.shares:
        return section("Where the time went", empty("Nothing was measured yet."))
    texts = {
        name: f"{share:.1%}, {_duration(share * run.seconds)}" for name, share in run.shares.items()
    }
    more = [tag("ul", *(tag("li", *_spoken(one)) for one in run.advice), class_="advice")]
    return section(
        "Where the time went",
        share_bar(run.shares, texts, {name: part_colour(name) for name in run.shares}),
        tag("p", *_spoken(run.verdict), class_="verdict"),
        *(more if run.advice else []),
    )


def _incidents(run: RunRecord, incidents: Sequence[Mapping[str, Any]]) -> Markup:
    if not incidents:
        text = "No environment raised, hung or died."
        return section("Incidents", empty(text))
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
        for one in incidents[-_MOST_ROWS:]
    ]
    head = ("time (UTC)", "steps", "slot", "what", "seed", "reason", "replay file")
    count = len(incidents)
    text = (
        f"{count} failure{'s' if count > 1 else ''}: each cost the episodes that were running in "
        "its slots, and was kept with its seed and actions. "
        f"{f'The last {_MOST_ROWS} are shown. ' if count > _MOST_ROWS else ''}To see one again: "
    )
    kept = [f"{run.folder}/{one['replay']}" for one in incidents if one.get("replay")]
    return section(
        "Incidents",
        tag("p", text, tag("code", f"envfleet doctor replay {(*kept, 'FILE')[0]}")),
        table(head, rows, "one-line"),
    )


def _decisions(run: RunRecord) -> list[Markup]:
    """Which nodes took part, were slow or lost; nothing for a run on one machine."""
    rows = [
        tag(
            "tr",
            tag("td", f"{one.get('env_steps', 0):,}"),
            tag("td", str(one.get("where", ""))),
            tag("td", str(one.get("kind", ""))),
            tag("td", str(one.get("why", "")), class_="reason"),
        )
        for one in run.events[-_MOST_ROWS:]
    ]
    head = ("steps", "where", "what", "reason")
    return [section("Nodes", table(head, rows, "one-line"))] if rows else []


def _again(run: RunRecord) -> Markup:
    pieces = [tag("p", f"{run.repeats}:"), _code(run.command)]
    if run.resume_command:
        are_kept = run.facts.get("environments_kept_by") != []
        pieces.append(tag("p", f"Go on with this one{'' if are_kept else ', with new episodes'}:"))
        pieces.append(_code(run.resume_command))
    return section("Reproduce", *pieces)


def _options(run: RunRecord) -> Markup:
    tables = []
    for owner, values in run.options.items():
        rows = [
            tag(
                "tr",
                tag("td", tag("code", one.name)),
                tag("td", _reported_text(one.value)),
                tag("td", "" if one.is_plain else _reported_text(one.default), class_="quiet"),
                class_=None if one.is_plain else "changed",
            )
            for one in values
        ]
        tables.append(tag("div", tag("h3", owner), table(("option", "value", "default"), rows)))
    note = tag("p", "Coloured: what differs from the plain defaults.", class_="quiet")
    return section("Options", note, tag("div", *tables, class_="columns settings"))


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
    listed = table(
        ("", ""),
        [tag("tr", tag("td", name), tag("td", tag("code", text))) for name, text in rows],
        "facts",
    )
    parts = [
        tag(
            "li",
            f"at {int(part.get('env_steps', 0)):,} steps, "
            f"{str(part.get('started', '')).replace('T', ' ').removesuffix('+00:00')} UTC"
            f"{', with new episodes' if part.get('new_episodes') else ''}"
            f"{_differences(facts, part)}",
        )
        for part in run.resumed
    ]
    more = [tag("p", "The run went on from a checkpoint:"), tag("ul", *parts)] if parts else []
    return section("Versions and machine", listed, *more)


# ---- pieces --------------------------------------------------------------------------------------


def section(title: str, *children: str) -> Markup:
    """A part of the page with a heading."""
    return tag("section", tag("h2", title), *children)


def tile(name: str, value: str, more: str = "") -> Markup:
    """A number in the header, with its name above and a remark below."""
    return tag("div", tag("span", name), tag("b", value), tag("small", more), class_="tile")


def table(head: Sequence[str], rows: Sequence[Markup], kind: str = "") -> Markup:
    """A table that scrolls where it does not fit; `rows` are ``tr`` elements."""
    heads = [tag("tr", *(tag("th", name) for name in head))] if any(head) else []
    table = tag("table", tag("thead", *heads), tag("tbody", *rows), class_=kind or None)
    return tag("div", table, class_="scroll")


def _code(text: str) -> Markup:
    # a line may break before a flag, not within one
    first, *flags = text.split(" --")
    words = [tag("span", first), *(tag("span", f"--{flag}") for flag in flags)]
    button = tag("button", "Copy", type="button", class_="copy")
    return tag("div", tag("pre", tag("code", join(words, " "))), button, class_="command")


def empty(text: str) -> Markup:
    """What stands where there is nothing to show."""
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
        f"{name} {_reported_text(old)} became {_reported_text(new)}"
        for name, (old, new) in after.get("changed", {}).items()
    ]
    return f" ({', '.join(changed)})" if changed else ""


def points(lines: Sequence[Figures], name: str) -> list[tuple[float, float]]:
    """Steps and values of one figure, without the lines that do not have it."""
    return [
        (float(one["env_steps"]), float(one[name])) for one in lines if one.get(name) is not None
    ]


def _spoken(text: str) -> list[Markup | str]:
    """A sentence; what stands between backticks is code."""
    sentence = f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
    return [
        tag("code", part) if number % 2 else part for number, part in enumerate(sentence.split("`"))
    ]


def rounded(value: Any) -> str:
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


def _reported_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or "none"
    return "none" if value is None else str(value)


def _own_file(name: str) -> Markup:
    return Markup(resources.files("envfleet.observe").joinpath(name).read_text("utf-8"))
