"""How an episode that has begun in one process goes on in another.

Of an environment that can name what belongs to its episode (`episode` and `take_up`, as every
`TextEnv` can) only that travels, and one environment in a worker begins episodes for all of its
kind. Any other environment travels whole, made for the one episode.

Law: what arrives goes on as it would have where it began.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

from envfleet.llm.turns import Opening, Player

Moved = tuple[bool, bytes]
"""Whether it is an episode alone, and what was pickled: of it or of the environment."""


class Beginner:
    """Begins episodes of one kind, for environments elsewhere to go on with."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._player: Player | None = None

    def begin(self, seed: int, mode: str) -> tuple[Moved, Opening]:
        """Begin the episode of this seed."""
        player = self._player or Player(self._make())
        opening = player.begin(seed, mode)
        # One that failed may be left in any state; an environment that moves whole is gone.
        is_kept = opening.failure is None and can_part(player.env)
        self._player = player if is_kept else None
        return packed(player.env), opening


def can_part(env: Any) -> bool:
    """Whether an environment can hand its episode over to another of its kind."""
    return hasattr(env, "episode") and hasattr(env, "take_up")


def packed(env: Any) -> Moved:
    """An environment's episode, or the environment, ready to travel."""
    if can_part(env):
        # At once: the next episode of this environment may use the same lists.
        return True, pickle.dumps(env.episode(), pickle.HIGHEST_PROTOCOL)
    return False, cloudpickle.dumps(env)


def arrived(moved: Moved, env: Any) -> Any:
    """The environment in which the episode goes on: `env`, or the one that came."""
    is_episode, content = moved
    if not is_episode:
        return pickle.loads(content)
    env.take_up(pickle.loads(content))
    return env
