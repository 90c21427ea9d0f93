"""What a run of several agents adds to the report page: its games. Pure."""

from __future__ import annotations

from typing import Any

from envfleet.observe.charts import line_chart, thin
from envfleet.observe.figures import Figures
from envfleet.observe.learning_report import learning_page
from envfleet.observe.markup import Markup, tag
from envfleet.observe.report import JobPage, RunRecord, points, section, table, tile

_SEAT = "win_rate_as_"


def agent_page(run: RunRecord) -> JobPage:
    """Tiles and sections of a run in which several agents learn."""
    page = learning_page(run, "PPO, several agents")
    games = [one for one in run.evaluations if "win_rate_random" in one]
    if not games:
        return page
    last = games[-1]
    won = tile(
        "won against random",
        _share(last["win_rate_random"]),
        f"of {last['games_random']} games at {last['env_steps']:,} steps",
    )
    return JobPage(page.title, (won, *page.tiles), (_games(games), *page.sections))


def _games(games: list[Figures]) -> Markup:
    seats = [name for name in games[-1] if name.startswith(_SEAT)]
    shown = ["win_rate_random", "draw_rate_random", *seats, "win_rate_earlier"]
    drawn = [
        line_chart(_title(name), [thin(_title(name), found)], y_ends=(0, 1), x_ticks=4)
        for name in shown
        if (found := points(games, name))
    ]
    head = ("steps", "games", *(_title(name) for name in shown), "earlier policy")
    rows = [
        tag(
            "tr",
            tag("td", f"{one['env_steps']:,}"),
            tag("td", str(one["games_random"])),
            *(tag("td", _share(one.get(name))) for name in shown),
            tag("td", f"at {one['earlier_steps']:,}" if one.get("earlier_steps") else ""),
        )
        for one in games
    ]
    note = tag("p", "Win rates are shares of all games; draws are not wins.")
    return section(
        "Games", tag("div", *drawn, class_="multiples"), table(head, rows, "numbers"), note
    )


def _title(name: str) -> str:
    if name.startswith(_SEAT):
        return f"won as {name.removeprefix(_SEAT)}"
    what, whom = name.split("_rate_")
    return f"{'won' if what == 'win' else 'drawn'} against {whom}"


def _share(value: Any) -> str:
    return "" if value is None else f"{value:.1%}"
