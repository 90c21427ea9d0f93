"""`Learner`: collects trials, updates an agent, evaluates it, and goes on later.

    plans (seed, j) ─► trials, one by one or side by side ─► buffer, in order of j ─► updates

Rollout j draws its task, the seed of its environment and its exploration from (seed, j), and enters
the buffer in the order of j. So the buffer is the same, bit for bit, whether rollouts are collected
one after another or by any number of workers, and if workers are killed on the way.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.adapters.names import find
from envfleet.errors import ConfigError
from envfleet.learn.torch_setup import threads, usable_device
from envfleet.meta.agents.agent import make_agent, rows_are_equal
from envfleet.meta.agents.options import AGENT_ARCHS, PolicyOptions
from envfleet.meta.buffers import ReplayBuffer
from envfleet.meta.collect import PlayedTrial, Seconds, Started, TrialPlan
from envfleet.meta.config import MetaConfig, read_config
from envfleet.meta.evaluate import TrialResults, evaluation_plans, figures_of, play
from envfleet.meta.node_collectors import NodeCollectors
from envfleet.meta.options import LearnerOptions, updates_due
from envfleet.meta.parallel import ParallelEnvManager, make_parallel_env
from envfleet.meta.tasks import TaskSampler, sample_uniformly
from envfleet.meta.trial import VariBadWrapper, make_env
from envfleet.options import CountOrZero, check
from envfleet.runs.callbacks import RunCallback, RunOutcome
from envfleet.runs.checkpoint import CheckpointFolder

__all__ = ["Learner"]

EVALUATION_TRIALS = 20
"""Trials of an evaluation, if an environment has no list of tasks."""
_OF_UPDATES = 1 << 33
"""Keeps the draws of updates apart from those of rollouts."""


class Learner:
    """Learns on tasks, with an agent that may have a memory."""

    train_env: VariBadWrapper
    eval_env: VariBadWrapper
    train_env_parallel: ParallelEnvManager | NodeCollectors | None

    def __init__(
        self,
        env_args: Mapping[str, Any],
        train_args: Mapping[str, Any] | None = None,
        eval_args: Mapping[str, Any] | None = None,
        policy_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        *,
        cuda: int = -1,
        run_dir: Path | str | None = None,
        task_sampler: TaskSampler = sample_uniformly,
    ) -> None:
        """Make environments and agent; the arguments are the sections of a YAML file.

        Args:
            env_args: Section `env`, see `EnvOptions`.
            train_args: Section `train`, see `LearnerOptions`.
            eval_args: Section `eval`, see `EvalOptions`.
            policy_args: Section `policy`, see `PolicyOptions`.
            seed: Of weights, rollouts and updates.
            cuda: The number of the GPU of the networks; -1 is the CPU.
            run_dir: Where `train` keeps the run; None is a new folder in `runs`.
            task_sampler: Chooses the task of a rollout.
        """
        sections = {"env": env_args, "train": train_args, "eval": eval_args, "policy": policy_args}
        self._make(read_config({**sections, "seed": seed, "cuda": cuda}), task_sampler)
        self.run_dir = run_dir

    @classmethod
    def of(cls, config: MetaConfig) -> Self:
        """Make the learner of a configuration."""
        learner = cls.__new__(cls)
        learner._make(config, sample_uniformly)
        return learner

    run_dir: Path | str | None = None

    def _make(self, config: MetaConfig, task_sampler: TaskSampler) -> None:
        self.config = config
        if not isinstance(self.config.train, LearnerOptions):
            raise ConfigError(
                "RL² learns by PPO, not by replay: call envfleet.meta.train with its configuration"
            )
        self.seed, self._sampler = config.run.seed, task_sampler
        self._train_options = self.config.train
        self.init_env(**self.config.env.init_args)
        try:
            self._read_env()
            self.init_agent()
            self.init_train()
        except BaseException:
            self.close()
            raise

    # ---- parts ----------------------------------------------------------------------------------

    def init_env(
        self,
        env_type: str,
        env_name: str,
        max_rollouts_per_task: int,
        num_train_tasks: int | None,
        num_eval_tasks: int | None,
        num_parallel_workers: int = 4,
        **kwargs: Any,
    ) -> None:
        """Make the environments: `train_env`, `eval_env` and `train_env_parallel`."""
        env: Any = find(env_name).source if ":" in env_name else env_name
        tasks = {"num_train_tasks": num_train_tasks, "num_eval_tasks": num_eval_tasks}
        kwargs |= {name: value for name, value in tasks.items() if value is not None}
        self.train_env = make_env(env, max_rollouts_per_task, seed=self.seed, **kwargs)
        self.eval_env = make_env(env, max_rollouts_per_task, seed=self.seed + 1, **kwargs)
        self.train_env_parallel = None
        options, num = self.config.env, num_parallel_workers
        make = functools.partial(
            make_parallel_env,
            env,
            max_rollouts_per_task,
            seed=self.seed,
            step_timeout_s=options.step_timeout_s,
            **kwargs,
        )
        if options.collect == "node":

            def make_there(num: int, cores: int) -> ParallelEnvManager:
                most = min(cores, options.num_processes or cores)
                return make(num_workers=num, num_processes=most)

            policy: PolicyOptions = self.config.policy
            self.train_env_parallel = NodeCollectors(make_there, policy, num, options.ray_address)
        elif num > 1:
            self.train_env_parallel = make(num_workers=num, num_processes=options.num_processes)

    def _read_env(self) -> None:
        env = self.train_env
        self.max_trajectory_len = env.horizon_bamdp
        """The most steps of a rollout."""
        shape = env.observation_space.shape
        assert shape is not None
        self.obs_dim, self.action_space = shape[0], env.action_space
        tasks = (
            getattr(env.unwrapped, "train_tasks", None),
            getattr(env.unwrapped, "eval_tasks", None),
        )
        self.train_tasks: Sequence[Any] = tasks[0] or []
        """Numbers of the tasks to train on; empty if they are endless."""
        self.eval_tasks: Sequence[Any] = tasks[1] or [None] * EVALUATION_TRIALS
        """Numbers of the tasks to evaluate on; None has the environment draw one."""

    def init_agent(self) -> None:
        """Make the agent; its weights follow from the seed."""
        policy: PolicyOptions = self.config.policy
        device = usable_device(self.config.run.device)
        with threads():
            self.agent = make_agent(policy, self.obs_dim, self.action_space, self.seed, device)
            self.agent_arch = self.agent.arch
            most = max(64, self.config.env.num_parallel_workers)
            if not rows_are_equal(self.agent, most):
                warnings.warn(
                    "on this machine PyTorch's results for a row depend on the other rows, so "
                    "rollouts that are collected with another number of workers differ in their "
                    "last digits",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def init_train(self) -> None:
        """Make the buffer, and begin to count."""
        options, is_discrete = self._train_options, isinstance(self.action_space, spaces.Discrete)
        window = options.sampled_seq_len
        if self.agent_arch is AGENT_ARCHS.Markov:
            window = 1
        elif window == -1:
            window = self.max_trajectory_len
        self.policy_storage = ReplayBuffer(
            options.buffer_size,
            self.obs_dim,
            1 if is_discrete else self.agent.action_dim,
            window=window,
            weight_baseline=options.sample_weight_baseline,
        )
        self.num_init_rollouts_pool = options.num_init_rollouts_pool
        self.num_rollouts_per_iter = options.num_rollouts_per_iter
        self.num_updates_per_iter = options.num_updates_per_iter
        per_iteration = options.num_iters * options.num_rollouts_per_iter
        self.n_env_steps_total = self.max_trajectory_len * (
            self.num_init_rollouts_pool + per_iteration
        )
        """The most steps of the whole run."""
        self._n_env_steps_total = self._n_rollouts_total = self._n_rl_update_steps_total = 0
        self._successes_in_buffer = self._last_env_steps = 0
        self._sampling = np.random.default_rng([self.seed, _OF_UPDATES])
        self.tasks_seen: Counter[str] = Counter()
        """How many rollouts each training task had."""
        self._collecting, self._learning_s = Seconds(), 0.0
        self._started = Started()

    # ---- collecting -----------------------------------------------------------------------------

    def plan(self, number: int, *, random_actions: bool = False) -> TrialPlan:
        """All that rollout `number` draws."""
        rng = np.random.default_rng([self.seed, number])
        env_seed, steps = int(rng.integers(1 << 31)), self.max_trajectory_len
        task = self._sampler(rng, self.train_tasks)
        if not random_actions:
            return TrialPlan(number, task, env_seed, noise=self.agent.noise(rng, steps))
        actions: npt.NDArray[Any]
        if isinstance(self.action_space, spaces.Discrete):
            actions = rng.integers(self.action_space.n, size=steps)
        else:
            actions = rng.uniform(-1, 1, (steps, self.agent.action_dim)).astype(np.float32)
        return TrialPlan(number, task, env_seed, actions=actions)

    def collect_rollouts(self, num_rollouts: int, random_actions: bool = False) -> int:
        """Collect rollouts one after another; the environment steps that were made."""
        return self._collect(self.train_env, num_rollouts, random_actions)

    def collect_rollouts_parallel(
        self,
        num_rollouts: int,
        random_actions: bool = False,
        parallel_env: ParallelEnvManager | NodeCollectors | None = None,
    ) -> int:
        """Collect rollouts side by side; the environment steps that were made.

        Args:
            num_rollouts: How many; need not be a multiple of the workers.
            random_actions: Act at random.
            parallel_env: Where, such as `train_env_parallel`; None is one after another.
        """
        env = self.train_env if parallel_env is None else parallel_env
        return self._collect(env, num_rollouts, random_actions)

    def _collect(self, env: Any, num_rollouts: int, random_actions: bool) -> int:
        check("num_rollouts", num_rollouts, CountOrZero)
        for name in ("observation_space", "action_space", "horizon_bamdp"):
            # collectors on nodes make their environments from this learner's own settings
            given, own = getattr(env, name, None), getattr(self.train_env, name)
            if given != own and not isinstance(env, NodeCollectors):
                raise ConfigError(
                    f"parallel_env has other environments than this learner: its {name} is "
                    f"{given}, not {own}; make it with the same arguments, or pass "
                    "train_env_parallel"
                )
        first = self._n_rollouts_total
        plans = [
            self.plan(number, random_actions=random_actions)
            for number in range(first, first + num_rollouts)
        ]
        with threads():
            trials = play(self.agent, plans, env, deterministic=False, seconds=self._collecting)
        for trial in trials:
            self._store(trial)
        self._last_env_steps = sum(map(len, trials))
        self.last_trials: Sequence[PlayedTrial] = trials
        return self._last_env_steps

    def _store(self, trial: PlayedTrial) -> None:
        self.policy_storage.add_rollout(trial)
        self._n_rollouts_total += 1
        self._n_env_steps_total += len(trial)
        self._successes_in_buffer += trial.is_success
        if trial.task is not None:
            self.tasks_seen[str(trial.task)] += 1

    # ---- learning -------------------------------------------------------------------------------

    def update(self, num_updates: int | EllipsisType | None = None) -> dict[str, float]:
        """Update the agent; what there is to log, as means over the updates.

        Args:
            num_updates: How many; None, or `...`, as many as `num_updates_per_iter` says of the
                steps that were collected last.
        """
        if num_updates is None or num_updates is ...:
            num_updates = updates_due(self.num_updates_per_iter, self._last_env_steps)
        check("num_updates", num_updates, CountOrZero)
        begun_s = time.perf_counter()
        sums: Counter[str] = Counter()
        with threads():
            for _ in range(num_updates):
                batch = self.policy_storage.sample(self._train_options.batch_size, self._sampling)
                sums.update(self.agent.update(batch))
        self._n_rl_update_steps_total += num_updates
        self._learning_s += time.perf_counter() - begun_s
        return {name: value / max(1, num_updates) for name, value in sums.items()}

    def train(self, callback: RunCallback | None = None) -> RunOutcome:
        """Learn in a folder: collect, update, evaluate and save, from the start to the end."""
        from envfleet.meta.training import folder_for, run_learner

        folder = Path(self.run_dir) if self.run_dir is not None else folder_for(self.config)
        return run_learner(self, folder, callback)

    def _start_training(self) -> None:
        """Begin to count the time."""
        self._started = Started(self._n_env_steps_total)

    def log_train_stats(self, train_stats: Mapping[str, float]) -> dict[str, float]:
        """The figures of an iteration by the names they are logged under."""
        return {
            **self._started.figures(self._n_env_steps_total),
            "z/rollouts": self._n_rollouts_total,
            "z/rl_steps": self._n_rl_update_steps_total,
            **{f"rl_loss/{name}": value for name, value in train_stats.items()},
        }

    # ---- evaluating -----------------------------------------------------------------------------

    def evaluate(
        self, tasks: Sequence[Any], deterministic: bool = True
    ) -> tuple[Any, Any, Any, Any]:
        """Play one trial of each task, side by side if there are workers.

        Returns:
            Returns by task and episode, whether each task's goal was reached, the observations of
            each trial, and how many steps it had.
        """
        found = self.results(tasks, deterministic=deterministic)
        observations = [trial.obs for trial in found.trials]
        return found.returns, found.successes, observations, found.total_steps

    def results(self, tasks: Sequence[Any], *, deterministic: bool = True) -> TrialResults:
        """The same, with the trials."""
        if not len(tasks):
            raise ConfigError("there is no task to evaluate on; give at least one")
        noise = None
        if not deterministic:
            noise = lambda rng: self.agent.noise(rng, self.max_trajectory_len)  # noqa: E731
        plans = evaluation_plans(tasks, self.seed, noise)
        env: Any = self.train_env_parallel or self.eval_env
        with threads():
            trials = play(self.agent, plans, env, deterministic=deterministic, seconds=Seconds())
        return TrialResults.of(trials, self.eval_env.flag_at, self.eval_env.episodes_per_task)

    def log(self) -> dict[str, float]:
        """Evaluate on training and evaluation tasks; the figures."""
        most = self.config.eval.max_eval_tasks
        splits = {"train": self.train_tasks[:most], "eval": self.eval_tasks[:most]}
        figures: dict[str, float] = {"metrics/successes_in_buffer": self._successes_in_buffer}
        for split, tasks in splits.items():
            if not len(tasks):
                continue
            found = self.results(tasks)
            figures |= figures_of(found, split)
            self.last_results = found
            if self.config.eval.eval_stochastic:
                drawn = self.results(tasks, deterministic=False)
                figures |= figures_of(drawn, split, "_sto")
        return figures

    # ---- keeping --------------------------------------------------------------------------------

    def state(self, folder: Path) -> dict[str, Any]:
        """All that goes on; the buffer's data is written to a file in `folder`."""
        return {
            "agent": self.agent.state_dict(),
            "buffer": self.policy_storage.save(folder),
            "sampling": self._sampling.bit_generator.state,
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "tasks_seen": dict(self.tasks_seen),
        }

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on exactly where this state was taken."""
        self.policy_storage.load(folder, state["buffer"])
        self.agent.load_state_dict(state["agent"])
        self._sampling.bit_generator.state = state["sampling"]
        for name in _COUNTS:
            setattr(self, name, int(state["counts"][name]))
        self.tasks_seen = Counter(state["tasks_seen"])
        self._start_training()

    def save(self, folder: Path | str) -> Path:
        """Keep everything in a folder, beside what was kept there before; the newest file."""
        folder = Path(folder)
        checkpoints = CheckpointFolder(folder)
        checkpoints.prepare()
        checkpoints.write(self._n_env_steps_total, self.state(folder), is_best=False)
        return folder / "latest.pt"

    def load(self, folder: Path | str) -> None:
        """Go on exactly where `save` left off."""
        folder = Path(folder)
        CheckpointFolder(folder).newest(
            take=lambda state: self.load_state(folder, state), trust="own"
        )

    def close(self) -> None:
        """Close the environments; may be called twice."""
        for name in ("train_env_parallel", "train_env", "eval_env"):
            env = getattr(self, name, None)
            if env is not None:
                env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seconds(self) -> dict[str, float]:
        """What the time went into so far."""
        return {**self._collecting.parts, "learning": self._learning_s}


_COUNTS = (
    "_n_env_steps_total",
    "_n_rollouts_total",
    "_n_rl_update_steps_total",
    "_successes_in_buffer",
    "_last_env_steps",
)
"""Numbers of a learner that go on."""
