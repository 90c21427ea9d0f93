"""How well Stable-Baselines3's PPO plays the grid world, between chance and the scripted player."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.sb3_contenders import GRID_WORLD, grid_world
from envfleet.adapters.sb3 import FleetVecEnv
from envfleet.multiagent import GridWorldEnvParallel, GridWorldPolicy

NUM_ENVS, STEPS = 8, 250_000
EPISODES = 16
"""Games that are played to find out how good a player is; all players play the same."""
FIRST_SEED = 1_000

Act = Callable[[str, Any], int]


def learned_return(steps: int, seed: int) -> float:
    """Train for so many steps, and return what the policy earns per episode."""
    import torch
    from stable_baselines3 import PPO

    from benchmarks.grid_network import OneHot, SymmetricPolicy

    torch.set_num_threads(1)
    envs = _envs(NUM_ENVS)
    try:
        model = PPO(
            SymmetricPolicy,
            envs,
            policy_kwargs={"features_extractor_class": OneHot},
            n_steps=64,
            batch_size=128,
            n_epochs=10,
            learning_rate=lambda left: 1e-3 * left,
            gamma=0.7,
            gae_lambda=0.9,
            ent_coef=0.005,
            seed=seed,
            device="cpu",
        )
        model.learn(steps)
    finally:
        envs.close()
    return _policy_return(model)


def _envs(num_envs: int) -> Any:
    from stable_baselines3.common.vec_env import VecFrameStack

    from benchmarks.grid_network import FRAMES

    return VecFrameStack(FleetVecEnv([grid_world] * num_envs), FRAMES)


def _policy_return(model: Any) -> float:
    envs = _envs(EPISODES)
    try:
        envs.seed(FIRST_SEED)
        obs, total = envs.reset(), 0.0
        is_over = False
        while not is_over:
            obs, rewards, dones, _ = envs.step(model.predict(obs, deterministic=True)[0])
            total += float(rewards.sum())
            is_over = bool(dones.all())  # episodes end by their number of steps only
    finally:
        envs.close()
    return total / EPISODES


def scripted_return() -> float:
    """What the scripted player earns per episode."""
    return float(np.mean([_played(seed, lambda env, _: GridWorldPolicy(env)) for seed in _seeds()]))


def random_return() -> float:
    """What random moves earn per episode."""
    return float(np.mean([_played(seed, _by_chance) for seed in _seeds()]))


def _seeds() -> range:
    return range(FIRST_SEED, FIRST_SEED + EPISODES)


def _by_chance(env: Any, seed: int) -> Act:
    rng = np.random.default_rng(seed)
    return lambda agent, _: int(rng.integers(env.action_space(agent).n))


def _played(seed: int, make_player: Callable[[Any, int], Act]) -> float:
    env = GridWorldEnvParallel(**GRID_WORLD)
    act = make_player(env, seed)
    seen, _ = env.reset(seed=seed)
    total = 0.0
    while env.agents:
        seen, rewards, *_ = env.step({agent: act(agent, seen[agent]) for agent in env.agents})
        total += sum(rewards.values())
    return total
