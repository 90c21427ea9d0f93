"""Settings that are known to work: the RL zoo's, as far as they carry over, and CleanRL's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from envfleet.learn.ppo import PPOOptions


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train on one environment."""

    n_envs: int
    total_steps: int
    options: PPOOptions
    eval_episodes: int = 10
    """Win rates need more of them than returns do."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrapper: str | None = None
    """What the environment is wrapped in; see `envfleet.learn.wrappers`."""
    note: str = ""
    """What a user has to know beside the settings."""


_NORMALISED = PPOOptions(
    batch_size=64,
    learning_rate=3e-4,
    anneal_learning_rate=False,
    normalise_obs=True,
    normalise_rewards=True,
)

_CLEANRL = Recipe(
    1,
    1_000_000,
    replace(_NORMALISED, n_steps=2048, n_epochs=10, anneal_learning_rate=True, clip_values=True),
)
"""CleanRL's one recipe for everything of MuJoCo."""

RECIPES: dict[str, Recipe] = {
    "CartPole-v1": Recipe(
        8,
        100_000,
        PPOOptions(
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            learning_rate=1e-3,
            anneal_clip_range=True,
            gamma=0.98,
            gae_lambda=0.8,
        ),
    ),
    "Acrobot-v1": Recipe(16, 1_000_000, replace(_NORMALISED, n_steps=256, gae_lambda=0.94)),
    "MountainCar-v0": Recipe(16, 1_000_000, replace(_NORMALISED, n_steps=16, gae_lambda=0.98)),
    "Pendulum-v1": Recipe(
        4,
        100_000,
        PPOOptions(
            n_steps=1024,
            batch_size=64,
            n_epochs=10,
            learning_rate=1e-3,
            anneal_learning_rate=False,
            gamma=0.9,
        ),
    ),
    "HalfCheetah-v5": Recipe(
        1,
        1_000_000,
        replace(
            _NORMALISED,
            n_steps=512,
            hidden=(256, 256),
            activation="relu",
            log_std=-2.0,
            orthogonal=False,
            n_epochs=20,
            learning_rate=2.0633e-5,
            clip_range=0.1,
            gamma=0.98,
            gae_lambda=0.92,
            ent_coef=0.000401762,
            vf_coef=0.58096,
            max_grad_norm=0.8,
        ),
    ),
    # by the zoo's, two seeds of two learned to stand still and no more
    "Hopper-v5": _CLEANRL,
    **dict.fromkeys(
        (
            "Ant-v5",
            "Humanoid-v5",
            "HumanoidStandup-v5",
            "InvertedDoublePendulum-v5",
            "InvertedPendulum-v5",
            "Pusher-v5",
            "Reacher-v5",
            "Swimmer-v5",
            "Walker2d-v5",
        ),
        _CLEANRL,
    ),
}
"""By Gymnasium id."""

_ATARI = Recipe(
    8,
    10_000_000,
    PPOOptions(
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        learning_rate=2.5e-4,
        clip_range=0.1,
        anneal_clip_range=True,
        ent_coef=0.01,
        normalise_rewards=True,
    ),
    env_kwargs={"frameskip": 1},
    wrapper="envfleet.learn.wrappers:atari",
    note="84x84 in grey, 4 frames per step, the last 4 steps at once",
)
_MINIGRID = Recipe(
    8,
    100_000,
    replace(_NORMALISED, n_steps=128, n_epochs=10, learning_rate=2.5e-4),
    wrapper="envfleet.learn.wrappers:without_mission",
    note="the text of the mission is left out",
)
FAMILIES = {re.compile(r"ALE/.*-v5"): _ATARI, re.compile(r"(MiniGrid|BabyAI)-.*"): _MINIGRID}
"""By the form of an id."""


def recipe_for(env: str) -> Recipe | None:
    """The recipe of an environment, by its name as `find` gives it."""
    env_id = env.rpartition(":")[2]
    of_family = [recipe for form, recipe in FAMILIES.items() if form.fullmatch(env_id)]
    return RECIPES.get(env) or next(iter(of_family), None)
