"""What environments of some families are wrapped in to be learned from; recipes name these."""

from __future__ import annotations

from typing import Any

import gymnasium


def atari(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """An ALE environment with `frameskip=1` as agents of the literature see it."""
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def without_mission(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """A MiniGrid environment without its text, which no network here reads."""
    return gymnasium.wrappers.FilterObservation(env, ["image", "direction"])
