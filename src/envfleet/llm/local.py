"""Environments that live in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from envfleet.errors import level_of_caller
from envfleet.llm.turns import (
    ENV_ERRORS,
    EpisodeFailure,
    EpisodeSoFar,
    Request,
    TurnPlayer,
    TurnReply,
)


class LocalEnvs:
    """Environments in this process, by id."""

    def __init__(self) -> None:
        self.players: dict[int, TurnPlayer] = {}

    def add(self, env_id: int, env: Any) -> None:
        """Take an environment in, replacing the one with the same id."""
        self.remove(env_id)
        self.players[env_id] = TurnPlayer(env)

    def remove(self, env_id: int) -> None:
        """Close an environment, if it lives here."""
        if env_id in self.players:
            close_env(self.players.pop(env_id).env)

    def execute(self, requests: Mapping[int, Request]) -> dict[int, TurnReply]:
        """Carry out one request after another."""
        return {env_id: one.execute(self.players[env_id]) for env_id, one in requests.items()}

    def rebuild(
        self, env_id: int, make: Callable[[], Any], episode: EpisodeSoFar
    ) -> EpisodeFailure | None:
        """Build an environment here and bring it to where another one stood; why it failed."""
        try:
            self.add(env_id, make())
        except Exception as exc:
            return EpisodeFailure.of("the constructor", exc)
        return self.players[env_id].replay(episode)

    def close(self) -> None:
        """Close every environment, and forget it."""
        for player in self.players.values():
            close_env(player.env)
        self.players.clear()


def close_env(env: Any) -> None:
    """Close an environment; one that fails to close is reported by a warning only."""
    try:
        getattr(env, "close", lambda: None)()
    except ENV_ERRORS as exc:
        warnings.warn(
            f"{type(env).__name__} failed in close: {EpisodeFailure.of('close', exc).error}",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )
