"""Settings that are known to work for several agents, by the name of the environment."""

from __future__ import annotations

from typing import Literal

from envfleet.learn.options import PPOOptions
from envfleet.learn.recipes import Recipe

_GAME = Recipe(
    64,
    1_000_000,
    PPOOptions(
        n_steps=64,
        batch_size=256,
        learning_rate=1e-3,
        gae_lambda=0.8,
        ent_coef=0.1,
        hidden=(128, 128),
        activation="relu",
    ),
    eval_episodes=100,
)
_TEAM = Recipe(
    16,
    1_000_000,
    PPOOptions(
        n_steps=128,
        batch_size=1024,
        n_epochs=10,
        learning_rate=5e-4,
        ent_coef=0.01,
        normalise_obs=True,
        normalise_rewards=True,
        hidden=(128, 128),
    ),
)

DEFAULTS: dict[Literal["turns", "team"], Recipe] = {"turns": _GAME, "team": _TEAM}
"""For environments without a recipe of their own: a game, or a team."""

AGENT_RECIPES: dict[str, Recipe] = {
    "pettingzoo.classic.connect_four_v3:env": _GAME,
    "mpe2.simple_spread_v3:parallel_env": _TEAM,
}
"""By name, as `envfleet train --env` takes it."""
