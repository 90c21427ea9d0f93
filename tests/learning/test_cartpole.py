"""PPO learns: CartPole-v1 by the recipe of the RL zoo, 100,000 steps, evaluated on its own."""

import numpy as np
import torch

import envfleet
from envfleet.learn.ppo import PPOOptions, PPOTrainer

RECIPE = PPOOptions(
    n_steps=32,
    batch_size=256,
    n_epochs=20,
    learning_rate=1e-3,
    anneal_clip_range=True,
    gamma=0.98,
    gae_lambda=0.8,
)


def evaluate(policy, episodes):
    returns = []
    with envfleet.make_vec("CartPole-v1", 1, backend="serial", autoreset="same_step") as envs:
        for episode in range(episodes):
            obs, _ = envs.reset(seed=10_000 + episode)
            total, is_over = 0.0, False
            while not is_over:
                with torch.inference_mode():
                    action = policy.decide(torch.from_numpy(obs)).numpy()
                obs, rewards, terminated, truncated, _ = envs.step(action)
                total += rewards[0]
                is_over = bool(terminated[0] or truncated[0])
            returns.append(total)
    return np.mean(returns)


def test_cartpole_is_solved_in_100_000_steps():
    torch.set_num_threads(1)
    with envfleet.make_vec("CartPole-v1", 8, backend="serial", autoreset="same_step") as envs:
        trainer = PPOTrainer(envs, RECIPE, seed=0)
        trainer.train(100_000)
    assert evaluate(trainer.policy, 10) == 500.0
