"""What can be chosen about a run; how it learns is ``options.py``'s business."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from envfleet.engine.options import (
    BackendName,
    StartMethod,
    check_count,
    check_seconds,
    one_of,
)
from envfleet.errors import ConfigError
from envfleet.learn.evaluate import MAX_STEPS
from envfleet.learn.options import PPOOptions, by_name, check_flag, check_seed

DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
LENGTHS = ("total_steps", "num_episodes")
"""The two ways to say how long a run is."""
FREE = frozenset(
    {
        "device",
        "backend",
        "num_workers",
        "parallel_start_method",
        "max_restarts",
        "step_timeout_s",
        "reset_timeout_s",
        "save_every",
        "keep_checkpoints",
        "eval_every",
        "eval_episodes",
        "eval_max_steps",
        "eval_envs",
        "tensorboard",
        "wandb",
        "wandb_project",
        "video",
    }
)
"""What a run may go on with others of: nothing that it learns depends on them (of the device, the
last digits do)."""


@by_name
@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train, on what, for how long, and what to keep."""

    env: str
    """What to train on: a Gymnasium id, module:Class, module:function or file.py:Class."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment."""
    n_envs: int = 8
    """Environments that run side by side, and whose experience makes one batch."""
    total_steps: int = 100_000
    """Environment steps of all slots together; whole iterations are made."""
    num_episodes: int | None = None
    """Iterations instead: each is a rollout of every slot and an update."""
    seed: int = 0
    """Of weights, actions, shuffling and environments: the same seed gives the same run."""
    device: str = "auto"
    """Where the networks live: cpu, cuda, cuda:N, mps, or auto, which takes cuda where there is
    one, else cpu."""
    backend: Literal["auto", BackendName] = "auto"
    """What runs the environments; auto measures, and says what it chose and why."""
    num_workers: int | None = None
    """Workers that share the environments; None takes as many as cores, at most."""
    parallel_start_method: StartMethod | None = None
    """How worker processes are started: spawn works everywhere, fork is faster but not safe beside
    some libraries, None takes the fastest that is safe."""
    max_restarts: int = 100
    """Failures of one environment within ten minutes that cost an episode only; the next one ends
    the run."""
    step_timeout_s: float | None = None
    """Seconds that one step of an environment may take before it counts as a failure; None waits,
    and warns after a while. Needs workers."""
    reset_timeout_s: float | None = None
    """The same for a reset."""
    save_every: int = 25_000
    """Environment steps between checkpoints; the last iteration is kept in any case."""
    keep_checkpoints: int = 3
    """Checkpoints that are kept, beside the best one."""
    eval_every: int = 25_000
    """Environment steps between evaluations; 0 evaluates at the end only."""
    eval_episodes: int = 10
    """Episodes of one evaluation, played on an environment of its own."""
    eval_envs: int = 1
    """Episodes of an evaluation that are played side by side, with the same returns."""
    eval_max_steps: int = MAX_STEPS
    """Longest an episode of an evaluation may take, for environments without a time limit."""
    tensorboard: bool = True
    """Write curves for TensorBoard into the run's folder."""
    wandb: bool = False
    """Write them for Weights & Biases too."""
    wandb_project: str = "envfleet"
    """Where Weights & Biases keeps the run."""
    video: bool = False
    """Record an episode of each evaluation."""

    def __post_init__(self) -> None:
        if not isinstance(self.env, str):
            raise ConfigError(f"env must be a name like 'CartPole-v1', got {self.env!r}")
        for name in ("n_envs", "total_steps", "save_every", "keep_checkpoints", "eval_episodes"):
            check_count(name, getattr(self, name))
        for name in ("eval_max_steps", "eval_envs"):
            check_count(name, getattr(self, name))
        check_seed(self.seed)
        for name in ("num_episodes", "num_workers"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.max_restarts != 0 or isinstance(self.max_restarts, bool):
            check_count("max_restarts must be 0, else it", self.max_restarts)
        for name in ("tensorboard", "wandb", "video"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.wandb_project, str):
            raise ConfigError(f"wandb_project must be a name, got {self.wandb_project!r}")
        kwargs: Any = self.env_kwargs
        if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
            raise ConfigError(f"env_kwargs must be a dict of keyword arguments, got {kwargs!r}")
        if self.eval_every != 0 or isinstance(self.eval_every, bool):
            check_count("eval_every must be 0 for the end only, else it", self.eval_every)
        one_of("backend", self.backend, Literal["auto", BackendName])
        for name in ("step_timeout_s", "reset_timeout_s"):
            check_seconds(name, getattr(self, name))
        if self.parallel_start_method is not None:
            one_of("parallel_start_method", self.parallel_start_method, StartMethod)
        if not DEVICES.fullmatch(str(self.device)):
            raise ConfigError(
                f"device must be one of auto, cpu, cuda, cuda:N or mps; got {self.device!r}"
            )

    @property
    def has_deadlines(self) -> bool:
        """Whether an environment may be given up, which cannot be done in this process."""
        return self.step_timeout_s is not None or self.reset_timeout_s is not None

    def iterations(self, ppo: PPOOptions) -> int:
        """How many rollouts the run has."""
        per_iteration = ppo.n_steps * self.n_envs
        return self.num_episodes or -(-self.total_steps // per_iteration)
