"""RL²: the PPO of `envfleet.learn`, with a memory, on trials.

An iteration steps `num_rollouts_per_iter` environments, each in its own trial, `n_steps` times. A
trial that ends is followed by one of another task. What PPO sees, besides the observation, is the
previous action and reward (`rl2_env.py`); its memory lasts for a trial.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from envfleet.adapters.names import find
from envfleet.adapters.opening import spec_of
from envfleet.engine.machine import usable_cores
from envfleet.errors import ConfigError
from envfleet.learn import train_options as learn_options
from envfleet.learn.agent import Agent
from envfleet.learn.environments import opened
from envfleet.learn.options import PPOOptions
from envfleet.learn.torch_setup import threads
from envfleet.learn.train import TrainJob
from envfleet.meta.collect import Seconds, Started
from envfleet.meta.config import RL2, MetaConfig, words
from envfleet.meta.evaluate import TrialResults, evaluation_plans, figures_of, goal_finder, play
from envfleet.meta.options import EnvOptions, EvalOptions, RL2TrainOptions, RunOptions
from envfleet.meta.parallel import ParallelEnvManager
from envfleet.meta.remedies import RL2_REMEDIES
from envfleet.meta.report import FREE, meta_page, saves_every, write_progress, write_trials
from envfleet.meta.rl2_env import make_rl2_env
from envfleet.runs.callbacks import Evaluation, EvaluationStopped, RunCallback, RunOutcome
from envfleet.runs.job import Iterated, Job, JobKind, RunSettings
from envfleet.runs.run import run

__all__ = ["RL2_KIND", "train_rl2"]

RL2_KIND = JobKind(
    name="rl2",
    options={
        "run": RunOptions,
        "env": EnvOptions,
        "train": RL2TrainOptions,
        "eval": EvalOptions,
        "policy": PPOOptions,
    },
    titles={"run": "Run", "env": "Environment", "train": "Training", "policy": "RL² by PPO"},
    command=("envfleet", "meta"),
    flags=(f"policy.algo_name={RL2}",),
    free=FREE,
    lengths=("num_iters",),
    remedies=RL2_REMEDIES,
    page=functools.partial(meta_page, title="RL²"),
    words=words,
)


@dataclass(slots=True)
class _Memory:
    """What PPO's policy remembers of trials; the rewards are in its observations."""

    states: torch.Tensor
    reward: npt.NDArray[Any]

    @torch.inference_mode()
    def reset(self, rows: Any) -> None:
        """Trials begin in these rows."""
        self.states[torch.from_numpy(np.asarray(rows))] = 0.0


class PPOActor:
    """A policy of PPO that plays trials."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def initial_state(self, num_rows: int) -> _Memory:
        """Nothing is remembered yet."""
        return _Memory(self._agent.fresh_states(num_rows), np.zeros(num_rows))

    def noise(self, rng: np.random.Generator, num_steps: int) -> npt.NDArray[Any]:
        """The noise of so many steps of one row, for `act`."""
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 63)))
        return self._agent.policy.head.noise((num_steps,), generator).numpy()

    @torch.inference_mode()
    def act(
        self, state: _Memory, obs: Any, noise: Any, deterministic: bool
    ) -> tuple[npt.NDArray[Any], _Memory]:
        """The likeliest actions, or drawn ones."""
        agent, head = self._agent, self._agent.policy.head
        said, states = agent.policy.respond(agent.tensors(agent.look(obs)), state.states, None)
        chosen = head.mode(said) if deterministic else head.sample(said, agent.tensor(noise))
        actions = agent.fit(chosen.cpu().numpy())
        return actions, _Memory(states.clone(), state.reward)


def train_rl2(
    config: MetaConfig,
    run_dir: Path,
    callback: RunCallback | None = None,
    *,
    is_resumed: bool = False,
    is_trusted: bool = False,
) -> RunOutcome:
    """Train in `run_dir`, from the start or from its newest checkpoint."""
    ppo: PPOOptions = config.policy
    options, run_dir = _options(config), Path(run_dir)

    @contextmanager
    def open_job(is_wary: bool) -> Iterator[Job]:
        with opened(options, ppo, is_wary=is_wary) as trainer:
            yield _RL2Job(config, options, trainer, run_dir)

    settings = RunSettings(
        title=config.env.env_name,
        iterations=config.train.num_iters,
        iteration_steps=ppo.n_steps * config.train.num_rollouts_per_iter,
        save_every=saves_every(config.eval),
        eval_every=config.eval.log_interval,
        counts_iterations=True,
        tensorboard=config.eval.log_tensorboard,
    )
    given = {"run": config.run, "env": config.env, "train": config.train, "eval": config.eval}
    try:
        return run(
            RL2_KIND,
            given | {"policy": ppo},
            settings,
            run_dir,
            open_job,
            callback,
            is_resumed=is_resumed,
            is_trusted=is_trusted,
        )
    finally:
        write_progress(run_dir)


def _options(config: MetaConfig) -> learn_options.TrainOptions:
    """The run as `envfleet.learn` knows it."""
    env, kwargs = config.env, {"oracle": True} if config.env.oracle else {}
    if config.policy.memory is None:
        raise ConfigError(
            "RL² needs a memory: set policy.memory to lstm or gru; without one the agent cannot "
            "find out its task"
        )
    workers = min(env.num_parallel_workers, env.num_processes or usable_cores())
    source = find(env.env_name).source
    return learn_options.TrainOptions(
        env=f"{make_rl2_env.__module__}:{make_rl2_env.__name__}",
        env_kwargs={
            # its registration travels, which worker processes may not have
            "env_id": spec_of(source) if isinstance(source, str) else source,
            "episodes_per_task": env.max_rollouts_per_task,
            **env.task_args,
            **kwargs,
        },
        n_envs=config.train.num_rollouts_per_iter,
        num_episodes=config.train.num_iters,
        seed=config.run.seed,
        device=config.run.device,
        step_timeout_s=env.step_timeout_s if workers > 1 else None,
        backend="serial" if workers == 1 else "process",
        collect=env.collect,
        ray_address=env.ray_address,
        num_workers=min(workers, config.train.num_rollouts_per_iter),
    )


class _RL2Job(TrainJob):
    """PPO on trials, evaluated by episode on tasks that it was not trained on."""

    def __init__(
        self, config: MetaConfig, options: learn_options.TrainOptions, trainer: Any, run_dir: Path
    ) -> None:
        super().__init__(options, trainer, run_dir)
        self._config, self._folder = config, run_dir
        self._started = Started(self.env_steps)

    def load(self, state: dict[str, Any]) -> None:
        """Continue exactly where this state was taken."""
        super().load(state)
        self._started = Started(self.env_steps)

    def iterate(self, progress: float) -> Iterated:
        """One rollout of every slot, and an update."""
        done = super().iterate(progress)
        return replace(done, figures={**self._started.figures(self.env_steps), **done.figures})

    def evaluate(self, *, is_wary: bool, should_stop: Callable[[], bool]) -> Evaluation:
        """Play a trial of each task, on environments of its own."""
        most = self._config.eval.max_eval_tasks
        make = functools.partial(make_rl2_env, **self._options.env_kwargs)
        backend = "process" if is_wary else "serial"
        with ParallelEnvManager([make] * most, backend=backend) as manager, threads():
            splits = {"train": manager.train_tasks[:most], "eval": manager.eval_tasks[:most]}
            splits = {split: tasks for split, tasks in splits.items() if tasks}
            found: dict[str, TrialResults] = {}
            figures: dict[str, float] = {}
            for split, tasks in (splits or {"eval": [None] * most}).items():
                if should_stop():
                    raise EvaluationStopped
                found[split] = self._played(manager, tasks)
                figures |= figures_of(found[split], split)
                if self._config.eval.eval_stochastic:
                    drawn = self._played(manager, tasks, deterministic=False)
                    figures |= figures_of(drawn, split, "_sto")
            held_out = found.get("eval") or found["train"]
            write_trials(self._folder, held_out, goal_finder(manager), {})
        totals = held_out.returns.sum(1).tolist()
        return Evaluation(tuple(totals), figures=figures)

    def _played(
        self, manager: ParallelEnvManager, tasks: Any, *, deterministic: bool = True
    ) -> TrialResults:
        actor, seconds = PPOActor(self._trainer.agent), Seconds()
        noise, steps = None, manager.horizon_bamdp
        assert steps is not None
        if not deterministic:
            noise = functools.partial(actor.noise, num_steps=steps)
        plans = evaluation_plans(tasks, self._config.run.seed, noise)
        trials = play(actor, plans, manager, deterministic=deterministic, seconds=seconds)
        episodes = self._config.env.max_rollouts_per_task
        flag_at = None if episodes == 1 else manager.fleet.get("flag_at", slots=[0])[0]
        return TrialResults.of(trials, flag_at, episodes)
