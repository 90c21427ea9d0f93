"""The options of a training run; those of PPO are in ``options.py``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from envfleet.engine.options import BackendName, RayOptions, StartMethod
from envfleet.errors import ConfigError
from envfleet.learn.evaluate import MAX_STEPS
from envfleet.learn.options import PPOOptions
from envfleet.options import Count, CountOrZero, Must, Seconds, Seed, option_class

_DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
Device = Annotated[str, Must("auto, cpu, cuda, cuda:N or mps", lambda x: _DEVICES.fullmatch(x))]
LENGTHS = ("total_steps", "num_episodes")
"""The two ways to say how long a run is."""
FREE = frozenset(
    {
        "device",
        "backend",
        "collect",
        "max_staleness",
        "slow_nodes",
        "ray_address",
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
"""Options that may change when a run goes on: nothing that it learns depends on them (except the
last digits, which depend on the device; and with `collect="async"` it depends on time anyway)."""
SlowNodes = Literal["wait", "rebalance", "skip"]


@option_class
@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train, on what, for how long, and what to keep."""

    env: str
    """What to train on: a Gymnasium id, module:Class, module:function or file.py:Class."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment."""
    wrapper: str | None = None
    """Called with each environment, returns what stands around it: module:function or
    file.py:function."""
    n_envs: Count = 8
    """Environments that run side by side, and whose experience makes one batch."""
    total_steps: Count = 100_000
    """Environment steps of all slots together; whole iterations are made."""
    num_episodes: Count | None = None
    """Iterations instead: each is a rollout of every slot and an update."""
    seed: Seed = 0
    """Of weights, actions, shuffling and environments: the same seed gives the same run."""
    device: Device = "auto"
    """The device of the networks: cpu, cuda, cuda:N, mps, or auto, which takes cuda if there is
    one, else cpu."""
    backend: Literal["auto", BackendName] = "auto"
    """What runs the environments; auto measures, and says what it chose and why."""
    collect: Literal["here", "node", "async"] = "here"
    """Where experience is collected: here, in whole segments on the nodes of a Ray cluster (node),
    or there and also while the policy learns (async)."""
    max_staleness: CountOrZero = 1
    """With collect=async, by how many updates a policy that collects may be out of date; 0 is the
    same as collect=node."""
    slow_nodes: SlowNodes = "wait"
    """What becomes of a node that takes twice as long as the others: wait for it, rebalance (fewer
    slots for it), or skip (another one does its work, and it gets no more)."""
    ray_address: str | None = None
    """The cluster of nodes or of the backend ray: host:port of its head, or auto for that of this
    machine; None takes RAY_ADDRESS, or starts a cluster here."""
    num_workers: Count | None = None
    """Workers that share the environments; None takes as many as cores, at most."""
    parallel_start_method: StartMethod | None = None
    """How worker processes are started: spawn works everywhere, fork is faster but not safe beside
    some libraries, None takes the fastest that is safe."""
    max_restarts: CountOrZero = 100
    """Failures of one environment within ten minutes that cost an episode only; the next one ends
    the run."""
    step_timeout_s: Seconds | None = None
    """Seconds that one step of an environment may take before it counts as a failure; None waits,
    and warns after a while. Needs workers."""
    reset_timeout_s: Seconds | None = None
    """The same for a reset."""
    save_every: Count = 25_000
    """Environment steps between checkpoints; the last iteration is kept in any case."""
    keep_checkpoints: Count = 3
    """Checkpoints that are kept, beside the best one."""
    eval_every: CountOrZero = 25_000
    """Environment steps between evaluations; 0 evaluates at the end only."""
    eval_episodes: Count = 10
    """Episodes of one evaluation, played on an environment of its own."""
    eval_envs: Count = 1
    """Episodes of an evaluation that are played side by side, with the same returns."""
    eval_max_steps: Count = MAX_STEPS
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
        if not all(isinstance(name, str) for name in self.env_kwargs):
            raise ConfigError(
                f"env_kwargs must be a dict of keyword arguments, got {self.env_kwargs!r}"
            )
        if self.ray_address is not None and self.backend != "ray" and self.collect == "here":
            raise ConfigError(
                f"ray_address is for backend='ray', collect='node' and collect='async', got "
                f"backend={self.backend!r} with ray_address={self.ray_address!r}"
            )

    @property
    def ray(self) -> RayOptions | None:
        """What the backend ray is given."""
        return RayOptions(address=self.ray_address) if self.backend == "ray" else None

    @property
    def fleet(self) -> dict[str, Any]:
        """What fleets of its environments are opened with, wherever they are."""
        return {
            "start_method": self.parallel_start_method,
            "step_timeout_s": self.step_timeout_s,
            "reset_timeout_s": self.reset_timeout_s,
            "on_failure": "restart",
            "max_restarts": self.max_restarts,
            "copy": False,
        }

    @property
    def has_deadlines(self) -> bool:
        """Whether a hung environment is given up, which cannot be done in this process."""
        return self.step_timeout_s is not None or self.reset_timeout_s is not None

    def iterations(self, ppo: PPOOptions) -> int:
        """How many rollouts the run has."""
        per_iteration = ppo.n_steps * self.n_envs
        return self.num_episodes or -(-self.total_steps // per_iteration)
