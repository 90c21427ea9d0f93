"""Matches between runs and chance: everyone plays everyone in every seat, and Elo's ratings.

A player is a run's folder, one of its checkpoints, or `random`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envfleet.errors import CheckpointError, ConfigError
from envfleet.learn.agent import Agent
from envfleet.learn.evaluate import EVALUATION_SEED
from envfleet.learn.train_options import TrainOptions
from envfleet.multiagent.agent_environments import AgentEnv
from envfleet.multiagent.agent_train import AGENT_KIND
from envfleet.multiagent.elo import Ratings, elo
from envfleet.multiagent.filming import film_game
from envfleet.multiagent.games import (
    OPENING,
    Player,
    PolicyPlayer,
    RandomPlayer,
    Seating,
    Tally,
    all_seatings,
    in_turn,
    play_games,
)
from envfleet.observe.jsonl import rewrite
from envfleet.observe.video import FilmedEpisode
from envfleet.runs.checkpoint import CheckpointFolder, fitting, load
from envfleet.runs.run_file import IDENTITY, RunFile, check_identity

__all__ = ["RANDOM", "Match", "Pairing", "open_match"]

RANDOM = "random"
"""The name of the player that plays any move."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """The games of two players."""

    one: int
    other: int
    tally: Tally
    """Of the first."""
    by_seat: dict[str, Tally]
    """Of the first, by the agent that it played."""
    mean_turns: float


@dataclass(frozen=True, slots=True)
class Match:
    """Who plays, and in what."""

    options: TrainOptions
    env: AgentEnv
    players: tuple[Player, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The players' names."""
        return tuple(player.name for player in self.players)

    def play(
        self,
        games: int,
        *,
        seed: int = EVALUATION_SEED,
        opening: int = OPENING,
        progress: Callable[[], None] = lambda: None,
        **fleet: Any,
    ) -> list[Pairing]:
        """Play so many games for each pair, in every seat equally often.

        Args:
            games: Of each pair; as many more as it takes to play every seat equally often.
            seed: Of environments and of draws.
            opening: So many turns at the start of each game are drawn, so that games differ.
            progress: Called after each pair.
            **fleet: Options of `AECVecEnv`; no result depends on them.
        """
        seatings = all_seatings(len(self.env.agents))
        if games < len(seatings):
            raise ConfigError(f"every seat needs a game: play at least {len(seatings)}")
        games += -games % len(seatings)
        found = []
        for one, other in combinations(range(len(self.players)), 2):
            played = play_games(
                partial(in_turn, self.env.env_fn),
                [self.players[one], self.players[other]],
                seatings,
                games,
                seed=seed,
                opening=opening,
                max_turns=self.options.eval_max_steps,
                **fleet,
            )
            by_seat = {}
            for number, agent in enumerate(self.env.agents):
                alone = [game for game in played if _is_alone(game.seating, number)]
                by_seat[str(agent)] = Tally.of(alone, 0)
            turns = float(np.mean([game.turns for game in played]))
            found.append(Pairing(one, other, Tally.of(played, 0), by_seat, turns))
            progress()
        return found

    def ratings(self, pairings: Sequence[Pairing]) -> Ratings:
        """Elo's ratings of all players; chance is rated 0 if it takes part."""
        scores = np.zeros((len(self.players), len(self.players)))
        for pairing in pairings:
            score = pairing.tally.score
            scores[pairing.one, pairing.other] = score
            scores[pairing.other, pairing.one] = pairing.tally.games - score
        reference = self.names.index(RANDOM) if RANDOM in self.names else None
        return elo(scores, reference=reference)

    def film(
        self,
        one: int,
        other: int,
        path: Path,
        *,
        seed: int = EVALUATION_SEED,
        opening: int = OPENING,
    ) -> FilmedEpisode:
        """Record a game of two players; the first plays the first agent."""
        drawn = partial(in_turn, partial(self.env.env_fn, render_mode="rgb_array"))
        seating = tuple(0 if number == 0 else 1 for number in range(len(self.env.agents)))
        players = self.players[one], self.players[other]
        return film_game(drawn, players, seating, path, seed=seed, opening=opening)

    def document(self, pairings: Sequence[Pairing], ratings: Ratings) -> dict[str, Any]:
        """All results as plain data."""
        return {
            "env": self.options.env,
            "env_kwargs": self.options.env_kwargs,
            "players": [
                {"name": name, "elo": round(points, 1), "elo_error": round(error, 1)}
                for name, points, error in zip(
                    self.names, ratings.points, ratings.errors, strict=True
                )
            ],
            "pairings": [
                {
                    "players": [self.names[one.one], self.names[one.other]],
                    "games": one.tally.games,
                    **_tally_json(one.tally),
                    "win_rate": one.tally.win_rate,
                    "first_player_as": {
                        name: _tally_json(tally) for name, tally in one.by_seat.items()
                    },
                    "mean_turns": one.mean_turns,
                }
                for one in pairings
            ],
        }


def _is_alone(seating: Seating, agent: int) -> bool:
    """Whether the first player plays this agent and no other."""
    return seating[agent] == 0 and seating.count(0) == 1


def _tally_json(tally: Tally) -> dict[str, int]:
    return {"wins": tally.wins, "draws": tally.draws, "losses": tally.losses}


def write_result(path: Path, document: dict[str, Any]) -> None:
    """Keep the results as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rewrite(path, json.dumps(document, indent=2) + "\n")


def open_match(players: Sequence[str]) -> Match:
    """Find the players: folders of runs, checkpoints in them, and `random`.

    Raises:
        ConfigError: There are too few, one is there twice, or they play different games.
        CheckpointError: A run cannot be read.
    """
    names = list(players)
    if len(names) < 2:
        raise ConfigError("a match needs two players: folders of runs, or random")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice; a player does not play against itself")
    runs = [_Run(name) for name in names if name != RANDOM]
    if not runs:
        raise ConfigError("a match needs at least one run: it says what is played")
    first = runs[0]
    for run in runs[1:]:
        if (run.options.env, run.options.env_kwargs) != (
            first.options.env,
            first.options.env_kwargs,
        ):
            raise ConfigError(
                f"{run.name} was trained on {run.options.env} {run.options.env_kwargs}, and "
                f"{first.name} on {first.options.env} {first.options.env_kwargs}; a match is for "
                "players of one game"
            )
    env = AgentEnv(first.options, first.agents.policies)
    if len(env.agents) < 2:
        raise ConfigError(f"{first.options.env} has one agent, and a match needs two")
    found: dict[str, Player] = {run.name: run.player() for run in runs}
    found[RANDOM] = RandomPlayer(env.action_spaces, RANDOM)
    return Match(first.options, env, tuple(found[name] for name in names))


class _Run:
    """A run that plays, read from its folder or from one of its checkpoints."""

    def __init__(self, name: str) -> None:
        self.name, path = name, Path(name)
        if not path.exists():
            raise CheckpointError(name, "does not exist; a player is a run's folder or random")
        self._path, self._folder = path, path if path.is_dir() else path.parent
        self._file = RunFile(self._folder, AGENT_KIND)
        options = self._file.options()
        self.options, self.agents, self._ppo = options["options"], options["agents"], options["ppo"]

    def player(self) -> PolicyPlayer:
        """Its newest policies, or those of the checkpoint. No pickle is opened."""
        env = AgentEnv(self.options, self.agents.policies)
        identity, policies = self._file.read()[IDENTITY], dict[Any, Agent]()
        for group in env.groups:
            spaces = group.observation_space, group.action_space
            policies[group.name] = Agent(*spaces, self._ppo, torch.device("cpu"), 0)

        def take(state: dict[str, Any]) -> None:
            check_identity(identity, state)
            for name, agent in policies.items():
                agent.load(state["job"]["policies"][str(name)])

        if self._path.is_dir():
            CheckpointFolder(self._folder).newest(take=take, trust="none")
        else:
            with fitting(self._path):
                take(load(self._path, trust="none"))
        group_of = env.group_of
        return PolicyPlayer(self.name, {one: policies[group_of[one]] for one in group_of})
