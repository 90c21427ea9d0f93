"""What a run was asked for and what it made, read back from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from envfleet.adapters.names import look_also_in
from envfleet.errors import CheckpointError
from envfleet.learn.agent import Agent
from envfleet.learn.checkpoint import CheckpointFolder, fitting, load
from envfleet.learn.environments import env_fn
from envfleet.learn.options import PPOOptions
from envfleet.learn.run_folder import BEGUN_IN, RUN_FILE, check_identity, read_identity
from envfleet.learn.train_options import TrainOptions


def resumed_options(run_dir: Path) -> tuple[TrainOptions, PPOOptions]:
    """What the run in this folder was asked for."""
    if run_dir.is_file():
        raise CheckpointError(str(run_dir), f"is a file; name the run's folder, {run_dir.parent}")
    if not run_dir.exists():
        raise CheckpointError(str(run_dir), "does not exist, so it holds no run")
    try:
        kept = json.loads((run_dir / RUN_FILE).read_text())
        look_also_in(kept.get(BEGUN_IN))
        ppo = PPOOptions(**{**kept["ppo"], "hidden": tuple(kept["ppo"]["hidden"])})
        return TrainOptions(**kept["options"]), ppo
    except FileNotFoundError as exc:
        raise CheckpointError(str(run_dir), f"holds no run: there is no {RUN_FILE}") from exc
    except OSError as exc:
        problem = f"has a {RUN_FILE} that cannot be read: {exc.strerror}"
        raise CheckpointError(str(run_dir), problem) from exc
    except (ValueError, KeyError, TypeError) as exc:
        problem = f"has a {RUN_FILE} that this version of envfleet did not write ({exc})"
        raise CheckpointError(str(run_dir), problem) from exc


def load_agent(path: Path) -> tuple[TrainOptions, Agent]:
    """What a run was asked for and the agent it made, from its folder or one of its checkpoints."""
    if not path.exists():
        raise CheckpointError(str(path), "does not exist")
    run_dir = path if path.is_dir() else path.parent
    options, ppo = resumed_options(run_dir)
    env = env_fn(options)()
    agent = Agent(env.observation_space, env.action_space, ppo, torch.device("cpu"), options.seed)
    env.close()
    identity = read_identity(run_dir)

    def take(state: dict[str, Any]) -> None:
        check_identity(identity, state)
        agent.load(state["trainer"])

    if path.is_dir():
        CheckpointFolder(run_dir).newest(take=take)
    else:
        with fitting(path):
            take(load(path))
    return options, agent
