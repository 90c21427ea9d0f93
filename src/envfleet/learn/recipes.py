"""Settings that are known to work: the RL zoo's, as far as they carry over, and CleanRL's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envfleet.learn.ppo import PPOOptions


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train on one environment."""

    n_envs: int
    total_steps: int
    options: PPOOptions
    eval_episodes: int = 10
    """Win rates need more of them than returns do."""


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
