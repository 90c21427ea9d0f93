"""``envfleet match``: a round robin between runs and chance, with Elo's ratings and a film."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from envfleet.adapters.names import label
from envfleet.cli.arguments import add_option, value_of
from envfleet.cli.command import Context
from envfleet.cli.report import Block, Report, Table, Text
from envfleet.engine.options import BackendName
from envfleet.errors import MissingExtra, VideoError
from envfleet.learn.evaluate import EVALUATION_SEED
from envfleet.options import Count, CountOrZero
from envfleet.runs.folder import free_folder

RESULT, FILM = "match.json", "game.mp4"

_EPILOG = """\
examples:
  envfleet match runs/a runs/b random --games 400
  envfleet match runs/a/best.pt runs/a random
  envfleet match runs/a random --no-film --json

Each pair plays --games games, or the few more that it takes to play every seat equally often. The
ratings are those under which the results are most likely (Elo's model, draws count half), with an
interval of 95 %; random is rated 0. A game of the two best players is filmed where the extra
`video` is installed and the environment can draw itself. The results are kept in a folder,
matches/ENV unless --out names one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``match``."""
    parser.description = "Let runs with several agents play against each other and against chance."
    parser.epilog = _EPILOG
    parser.add_argument(
        "players",
        metavar="PLAYER",
        nargs="+",
        help="a run's folder, one of its checkpoints, or random",
    )
    add_option(parser, "--games", "N", Count, "games of each pair", 400)
    text = "turns at the start of each game that are drawn by the policies' probabilities, so that "
    text += "games differ; later moves are the likeliest"
    add_option(parser, "--opening", "N", CountOrZero, text, 4)
    add_option(parser, "--seed", "N", CountOrZero, "of environments and draws", EVALUATION_SEED)
    add_option(parser, "--backend", "NAME", BackendName, "what runs the games", "serial")
    parser.add_argument(
        "--out", metavar="DIR", type=value_of(Path), help="where results and the film are kept"
    )
    parser.add_argument("--no-film", action="store_true", help="record no game")


def run(args: argparse.Namespace, context: Context) -> Report:
    """Play the match."""
    from envfleet.multiagent.match import open_match, write_result

    match = open_match(args.players)
    pairs = len(match.names) * (len(match.names) - 1) // 2
    with context.progress.bar("pairs", pairs) as bar:
        pairings = match.play(
            args.games,
            seed=args.seed,
            opening=args.opening,
            progress=bar.advance,
            backend=args.backend,
        )
    ratings = match.ratings(pairings)
    folder = args.out or free_folder(Path("matches"), label(match.options.env))
    document = match.document(pairings, ratings)
    order = sorted(range(len(match.names)), key=lambda one: -ratings.points[one])
    blocks: list[Block] = []
    document["film"] = None
    if not args.no_film:
        try:
            path = folder / FILM
            match.film(order[0], order[1], path, seed=args.seed, opening=args.opening)
            document["film"] = str(path)
            whose = f"{match.names[order[0]]} against {match.names[order[1]]}"
            blocks.append(Text(f"A game of {whose} is in {path}"))
        except (VideoError, MissingExtra) as exc:  # what was played counts all the same
            context.say(Text(f"envfleet: no game was filmed: {exc}", "warn"))
    document["result"] = str(folder / RESULT)
    write_result(folder / RESULT, document)
    blocks.append(Text(f"The results are in {folder / RESULT}"))
    games = pairings[0].tally.games
    heading = Text(f"{label(match.options.env)}: {games} games for each pair")
    if games != args.games:
        blocks.append(
            Text(f"{games} games and not {args.games}, so that every seat was played equally often")
        )
    return Report(
        True, document, (heading, _match_table(document, order), *_match_pairs(document), *blocks)
    )


def _match_table(document: dict[str, Any], order: list[int]) -> Table:
    """The players, the best first, with what they scored."""
    rows = []
    for number in order:
        player = document["players"][number]
        won = [_of(pair, player["name"]) for pair in document["pairings"]]
        wins, draws, losses = (sum(part) for part in zip(*filter(None, won), strict=True))
        rows.append(
            (
                player["name"],
                f"{player['elo']:.0f}",
                f"± {player['elo_error']:.0f}",
                str(wins),
                str(draws),
                str(losses),
                f"{(wins + draws / 2) / (wins + draws + losses):.1%}",
            )
        )
    columns = ("player", "Elo", "95 %", "won", "drawn", "lost", "score")
    return Table(columns, tuple(rows), frozenset(columns[1:]))


def _of(pair: dict[str, Any], name: str) -> tuple[int, int, int] | None:
    """Wins, draws and losses of a player in a pair; None if it did not play."""
    if name not in pair["players"]:
        return None
    found = pair["wins"], pair["draws"], pair["losses"]
    return found if pair["players"][0] == name else (found[2], found[1], found[0])


def _match_pairs(document: dict[str, Any]) -> tuple[Table, ...]:
    seats = list(document["pairings"][0]["first_player_as"])
    rows = []
    for pair in document["pairings"]:
        by_seat = pair["first_player_as"].values()
        shares = [one["wins"] / max(sum(one.values()), 1) for one in by_seat]
        one, other = pair["players"]
        rows.append((one, other, f"{pair['win_rate']:.1%}", *(f"{share:.1%}" for share in shares)))
    columns = ("player", "against", "won", *(f"as {name}" for name in seats))
    return (Table(columns, tuple(rows), frozenset(columns[2:])),)
