"""Environments that live in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from envfleet.errors import level_of_caller
from envfleet.llm.turns import (
    ENV_ERRORS,
    EnvFailure,
    EpisodePlayer,
    EpisodeSoFar,
    TurnReply,
    TurnRequest,
    execute,
)


class LocalEnvs:
    """Environments in this process, by id."""

    def __init__(self) -> None:
        self.players: dict[int, EpisodePlayer] = {}

    def add(self, env_id: int, env: Any) -> None:
        """Take an environment in, replacing the one with the same id."""
        self.remove(env_id)
        self.players[env_id] = EpisodePlayer(env)

    def remove(self, env_id: int) -> None:
        """Close an environment, if it lives here."""
        if env_id in self.players:
            close_env(self.players.pop(env_id).env)

    def execute(self, requests: Mapping[int, TurnRequest]) -> dict[int, TurnReply]:
        """Carry out one request after another."""
        return {env_id: execute(self.players[env_id], one) for env_id, one in requests.items()}

    def rebuild(self, env_id: int, make: Callable[[], Any], request: TurnRequest) -> TurnReply:
        """Build an environment here, and carry out a request that brings it to where it was."""
        try:
            self.add(env_id, make())
        except Exception as exc:
            return request.failed(EnvFailure.of("the constructor", exc))
        return execute(self.players[env_id], request)

    def move_here(
        self,
        env_id: int,
        make: Callable[[], Any],
        request: TurnRequest,
        so_far: EpisodeSoFar,
        why: str,
    ) -> TurnReply:
        """Rebuild an environment here that was lost with its worker, and carry out the request."""
        warnings.warn(
            f"environment {env_id} goes on in this process, with its state: {why}. Look into what "
            "kills the workers (memory, most often), or set es_manager.sequential_env_types",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )
        return self.rebuild(env_id, make, request.with_replay(so_far))

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
            f"{type(env).__name__} failed in close: {EnvFailure.of('close', exc).error}",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )
