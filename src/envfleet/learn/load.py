"""What a training run was asked for and what it made, read back from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from envfleet.errors import CheckpointError, ConfigError, EnvfleetError
from envfleet.learn.agent import Agent
from envfleet.learn.environments import env_fn
from envfleet.learn.options import PPOOptions
from envfleet.learn.train import PPO_KIND
from envfleet.learn.train_options import TrainOptions
from envfleet.runs.checkpoint import CheckpointFolder, fitting, load
from envfleet.runs.run_file import IDENTITY, RUN_FILE, RunFile, check_identity

__all__ = ["load_agent", "resumed_options"]


def resumed_options(run_dir: Path) -> tuple[TrainOptions, PPOOptions]:
    """What the run in this folder was asked for."""
    if run_dir.is_file():
        raise CheckpointError(str(run_dir), f"is a file; name the run's folder, {run_dir.parent}")
    if not run_dir.exists():
        raise CheckpointError(str(run_dir), "does not exist, so it holds no run")
    options = RunFile(run_dir, PPO_KIND).options()
    return options["options"], options["ppo"]


def load_agent(path: Path) -> tuple[TrainOptions, Agent]:
    """The options of a run and its agent, from its folder or one of its checkpoints.

    No pickle is opened: an agent is numbers only.
    """
    if not path.exists():
        raise CheckpointError(str(path), "does not exist")
    run_dir = path if path.is_dir() else path.parent
    if run_dir is not path and not (run_dir / RUN_FILE).exists():
        raise CheckpointError(str(path), f"is no checkpoint of a run: no {RUN_FILE} is beside it")
    options, ppo = resumed_options(run_dir)
    try:
        env = env_fn(options)()
    except EnvfleetError:
        raise
    except Exception as exc:
        raise ConfigError(
            f"{options.env} cannot be built with {options.env_kwargs}, as in {RUN_FILE}: {exc}"
        ) from exc
    agent = Agent(env.observation_space, env.action_space, ppo, torch.device("cpu"), options.seed)
    env.close()
    identity = RunFile(run_dir, PPO_KIND).read()[IDENTITY]

    def take(state: dict[str, Any]) -> None:
        check_identity(identity, state)
        agent.load(state["job"])

    if path.is_dir():
        CheckpointFolder(run_dir).newest(take=take, trust="none")
    else:
        with fitting(path):
            take(load(path, trust="none"))
    return options, agent
