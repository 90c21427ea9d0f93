"""What a meta-RL run is asked for: the sections of its YAML file.

    env      which environment, which tasks, how many workers
    train    how much to collect and to learn
    eval     how often to evaluate and to save
    policy   the agent (`agents/options.py`), or PPO's options with `algo_name: rl2`

Nothing here needs PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from envfleet.errors import ConfigError
from envfleet.options import (
    Count,
    CountOrZero,
    Must,
    NotNegative,
    Positive,
    Seconds,
    Seed,
    option_class,
)

__all__ = [
    "EnvOptions",
    "EvalOptions",
    "LearnerOptions",
    "RL2TrainOptions",
    "RunOptions",
    "updates_due",
]

Interval = Annotated[int, Must("a whole number, -1 or 0 for never", lambda x: x >= -1)]
SeqLen = Annotated[
    int, Must("a whole number of at least 2, or -1 for all", lambda x: x > 1 or x == -1)
]

Collect = Literal["here", "node"]


@option_class
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is not in a section."""

    seed: Seed = 0
    """Of weights, rollouts and updates: the same seed gives the same run."""
    cuda: Annotated[int, Must("-1 for the CPU, or the number of a GPU", lambda x: x >= -1)] = -1
    """The GPU of the networks, by its number; -1 is the CPU."""

    @property
    def device(self) -> str:
        """The same in PyTorch's words."""
        return "cpu" if self.cuda < 0 else f"cuda:{self.cuda}"


@option_class
@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """Which environment, which tasks, and where it runs."""

    env_name: str
    """A Gymnasium id, or module:function, which makes an environment."""
    env_type: Literal["meta"] = "meta"
    """Tasks with trials of several episodes; the only kind there is."""
    max_rollouts_per_task: Count = 2
    """Episodes of one trial."""
    num_tasks: Count | None = None
    """How many tasks there are; None is the sum of the two below, or endless."""
    num_train_tasks: Count | None = None
    """How many of them are for training."""
    num_eval_tasks: CountOrZero | None = None
    """How many are for evaluation."""
    oracle: bool = False
    """Show the task in the observation."""
    task_seed: CountOrZero | None = None
    """What the tasks are drawn from; None leaves that to the environment."""
    num_parallel_workers: Count = 1
    """Environments that run side by side; no result depends on it."""
    num_processes: Count | None = None
    """Among how many processes they are dealt; None is the number of usable cores."""
    collect: Collect = "here"
    """node plays whole rollouts on the nodes of a Ray cluster; num_parallel_workers is then the
    number of environments on all nodes. No result depends on it."""
    ray_address: str | None = None
    """Of that cluster, host:port or auto; None takes the environment variable RAY_ADDRESS, or
    starts a cluster on this machine."""
    step_timeout_s: Seconds | None = None
    """Seconds that one step may take in a worker before the worker is replaced; None is ten
    minutes."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments for the environment."""

    @property
    def task_args(self) -> dict[str, Any]:
        """What the environment is made with."""
        names = ("num_tasks", "num_train_tasks", "num_eval_tasks", "task_seed")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return given | self.env_kwargs

    @property
    def init_args(self) -> dict[str, Any]:
        """The arguments of `Learner.init_env`."""
        mine = {
            "env_type": self.env_type,
            "env_name": self.env_name,
            "max_rollouts_per_task": self.max_rollouts_per_task,
            "num_train_tasks": self.num_train_tasks,
            "num_eval_tasks": self.num_eval_tasks,
            "num_parallel_workers": self.num_parallel_workers,
        }
        oracle = {"oracle": True} if self.oracle else {}
        return mine | oracle | self.task_args


@option_class
@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """How much an agent collects and learns."""

    num_iters: Count = 100
    """Iterations: each collects rollouts and updates the agent."""
    num_init_rollouts_pool: CountOrZero = 0
    """Rollouts with random actions before the first iteration."""
    num_rollouts_per_iter: Count = 1
    """Rollouts of one iteration; each is one trial."""
    num_updates_per_iter: Count | Positive | None = None
    """Updates of one iteration; with a point (0.02), updates per environment step; None is 1.0."""
    buffer_size: Count = 1_000_000
    """Steps that are kept."""
    buffer_type: Literal["seq_efficient", "seq_vanilla"] = "seq_efficient"
    """Both names stand for the one buffer there is, which stores every observation once."""
    batch_size: Count = 32
    """Sequences, or steps of an agent without memory, of one update."""
    sampled_seq_len: SeqLen = -1
    """Steps of a sequence; -1 takes whole trials."""
    sample_weight_baseline: NotNegative = 0.0
    """From 0, where long trials are sampled more often, towards all alike."""


@option_class
@dataclass(frozen=True, slots=True, kw_only=True)
class RL2TrainOptions:
    """How much RL² collects; how it learns from that is in `policy`."""

    num_iters: Count = 100
    """Iterations: each steps all environments `n_steps` times, and learns from that."""
    num_rollouts_per_iter: Count = 32
    """Environments whose experience makes one batch."""


@option_class
@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """How often a run is evaluated and saved."""

    eval_stochastic: bool = False
    """Evaluate with drawn actions too, not only with the best ones."""
    log_interval: Count = 10
    """Iterations between evaluations."""
    save_interval: Interval = -1
    """Iterations between checkpoints; -1 or 0 saves with every evaluation."""
    log_tensorboard: bool = True
    """Write curves for TensorBoard."""
    max_eval_tasks: Count = 20
    """At most so many training tasks, and so many for evaluation, are evaluated on."""


def updates_due(asked: int | float | None, env_steps: int) -> int:
    """How many updates follow so many new environment steps."""
    if isinstance(asked, int):
        return asked
    return math.ceil((1.0 if asked is None else asked) * env_steps)


def check_tasks(options: EnvOptions) -> None:
    """Refuse names that the environment is given by other options."""
    twice = sorted(options.env_kwargs.keys() & asdict(options).keys())
    if twice:
        raise ConfigError(f"env.env_kwargs has {twice[0]}, an option of env; move it there")
