"""Train PPO of Stable-Baselines3 on a grid world with several agents, in parallel processes.

    python examples/custom_env_main.py                  8 environments, 250,000 steps
    python examples/custom_env_main.py --num-envs 1     one environment, in this process

Needs `pip install '.[sb3,multiagent,video,wandb]'`. W&B keeps its run on this machine, unless the
variable WANDB_MODE says otherwise. Only slot 0 records videos.
"""

import argparse
import functools
import os

config = {"total_timesteps": 250_000, "num_envs": 8, "video_every": 20_000, "video_length": 200}


def make_env(slot, video_every, video_length):
    from gymnasium.wrappers import RecordVideo

    from envfleet.multiagent import FlattenMultiAgentWrapper, GridWorldEnvMultiAgent

    world = GridWorldEnvMultiAgent(
        size=7,
        agents=[{"name": "alpha", "fov_size": 5}],
        target_config={"movement_speed": 1, "box_cells": 3},
        enable_obstacles=True,
        num_obstacles=3,
        render_mode="rgb_array",
    )
    env = FlattenMultiAgentWrapper(world)
    if slot > 0:
        return env
    is_due = lambda step: step % video_every == 0  # noqa: E731
    return RecordVideo(env, "videos", step_trigger=is_due, video_length=video_length)


def main():
    # Workers import this file too. What only the training needs is imported here, so that they
    # start without PyTorch.
    import torch
    import wandb
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecMonitor

    from envfleet.adapters.sb3 import DummyVecEnv, SubprocVecEnv

    class Curves(BaseCallback):
        def _on_step(self):
            ends = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            if ends:
                wandb.log({"return": sum(ends) / len(ends)}, step=self.num_timesteps)
            return True

    torch.set_num_threads(1)  # on networks as small as these, threads wait for each other
    num_envs, steps = config["num_envs"], config["total_timesteps"]
    every, length = max(1, config["video_every"] // num_envs), config["video_length"]
    fns = [functools.partial(make_env, slot, every, length) for slot in range(num_envs)]
    os.environ.setdefault("WANDB_MODE", "offline")
    with wandb.init(project="grid-world", config=config):
        env = VecMonitor(SubprocVecEnv(fns) if num_envs > 1 else DummyVecEnv(fns))
        model = PPO("MlpPolicy", env, n_steps=min(2048, steps) // num_envs, verbose=1)
        model.learn(steps, callback=Curves())
        model.save("ppo_grid_world")
        env.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO on the grid world.")
    parser.add_argument("--steps", type=int, default=config["total_timesteps"])
    parser.add_argument("--num-envs", type=int, default=config["num_envs"])
    given = parser.parse_args()
    config |= {"total_timesteps": given.steps, "num_envs": given.num_envs}
    main()
