"""Meta-RL as a run: `train` opens what a configuration asks for; `envfleet.runs` does the rest."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from envfleet.engine.incident import Incident
from envfleet.engine.machine import usable_cores
from envfleet.errors import CheckpointError
from envfleet.meta.agents.options import PolicyOptions, policy_options
from envfleet.meta.collect import PlayedTrial
from envfleet.meta.config import MetaConfig, words
from envfleet.meta.learner import Learner
from envfleet.meta.node_collectors import NodeCollectors
from envfleet.meta.options import EnvOptions, EvalOptions, LearnerOptions, RunOptions
from envfleet.meta.remedies import LEARNER_REMEDIES
from envfleet.meta.report import FREE, meta_page, saves_every, write_progress, write_trials
from envfleet.observe.events import Event
from envfleet.runs.callbacks import Evaluation, EvaluationStopped, RunCallback, RunOutcome
from envfleet.runs.folder import free_folder
from envfleet.runs.job import Iterated, Job, JobKind, RunSettings
from envfleet.runs.run import run
from envfleet.runs.run_file import JOB, RUN_FILE, RunFile
from envfleet.runs.time_report import Setup

__all__ = ["META_KIND", "folder_for", "resumed_config", "run_learner", "train"]

META_KIND = JobKind(
    name="meta",
    options={
        "run": RunOptions,
        "env": EnvOptions,
        "train": LearnerOptions,
        "eval": EvalOptions,
        "policy": PolicyOptions,
    },
    titles={"run": "Run", "env": "Environment", "train": "Training", "policy": "Agent"},
    command=("envfleet", "meta"),
    free=FREE,
    lengths=("num_iters",),
    remedies=LEARNER_REMEDIES,
    page=functools.partial(meta_page, title="meta-RL"),
    words=words,
)


def train(
    config: MetaConfig,
    run_dir: Path | str | None = None,
    callback: RunCallback | None = None,
    *,
    is_resumed: bool = False,
    is_trusted: bool = False,
) -> RunOutcome:
    """Train in a folder, from the start or from its newest checkpoint.

    Args:
        config: What `load_config` returned.
        run_dir: The folder; None is a new one in `runs`.
        callback: Is told what happens, and can stop the run.
        is_resumed: Whether to go on with the run in the folder.
        is_trusted: Whether to open pickles in checkpoints that this user did not write here.
    """
    folder = folder_for(config) if run_dir is None else Path(run_dir)
    if config.is_rl2:
        from envfleet.meta.rl2 import train_rl2

        return train_rl2(config, folder, callback, is_resumed=is_resumed, is_trusted=is_trusted)

    @contextmanager
    def open_job(is_wary: bool) -> Iterator[Job]:
        with Learner.of(config) as learner:
            yield _TrainingJob(learner, folder)

    return _run(config, folder, open_job, callback, is_resumed=is_resumed, is_trusted=is_trusted)


def run_learner(learner: Learner, folder: Path, callback: RunCallback | None) -> RunOutcome:
    """The same for a learner that is there, and that is closed by its owner."""

    @contextmanager
    def open_job(is_wary: bool) -> Iterator[Job]:
        yield _TrainingJob(learner, folder)

    return _run(learner.config, folder, open_job, callback)


def _run(
    config: MetaConfig, folder: Path, open_job: Any, callback: RunCallback | None, **how: bool
) -> RunOutcome:
    asked = config.train
    assert isinstance(asked, LearnerOptions)
    longest = _horizon(config)
    steps = asked.num_rollouts_per_iter * longest
    pool_share = -(-asked.num_init_rollouts_pool * longest // asked.num_iters)
    settings = RunSettings(
        title=config.env.env_name,
        iterations=asked.num_iters,
        iteration_steps=steps + pool_share,
        save_every=saves_every(config.eval),
        eval_every=config.eval.log_interval,
        counts_iterations=True,
        tensorboard=config.eval.log_tensorboard,
    )
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    try:
        return run(META_KIND, given, settings, folder, open_job, callback, **how)
    finally:
        write_progress(folder)


def _horizon(config: MetaConfig) -> int:
    from envfleet.adapters.names import find
    from envfleet.meta.trial import make_env

    env = make_env(
        find(config.env.env_name).source,
        config.env.max_rollouts_per_task,
        **config.env.task_args,
    )
    env.close()
    return env.horizon_bamdp


class _TrainingJob(Job):
    """A learner's iterations."""

    can_evaluate = True

    def __init__(self, learner: Learner, folder: Path) -> None:
        self._learner, self._folder = learner, folder
        self.envs = learner.train_env_parallel or learner.train_env

    @property
    def env_steps(self) -> int:  # type: ignore[override]
        return self._learner._n_env_steps_total

    @property
    def packages(self) -> Sequence[str]:
        where = type(self._learner.train_env.unwrapped).__module__
        return [where.partition(".")[0], *(["mujoco"] if "locomotion" in where else [])]

    @property
    def incidents(self) -> Sequence[Incident]:
        parallel = self._learner.train_env_parallel
        return () if parallel is None else parallel.incidents

    @property
    def events(self) -> Sequence[Event]:
        parallel = self._learner.train_env_parallel
        return parallel.events if isinstance(parallel, NodeCollectors) else ()

    @property
    def seconds(self) -> Mapping[str, float]:
        return self._learner.seconds

    @property
    def setup(self) -> Setup:
        parallel = self._learner.train_env_parallel
        return Setup(
            n_envs=1 if parallel is None else parallel.num_workers,
            num_workers=0 if parallel is None else parallel.num_processes,
            cores=usable_cores(),
            is_on_cpu=self._learner.agent.device.type == "cpu",
        )

    def state(self) -> dict[str, Any]:
        return self._learner.state(self._folder)

    def load(self, state: dict[str, Any]) -> None:
        self._learner.load_state(self._folder, state)

    def iterate(self, progress: float) -> Iterated:
        """Collect, and update; before the first time collect the initial pool."""
        learner, trials = self._learner, list[PlayedTrial]()
        if not learner._n_rollouts_total and learner.num_init_rollouts_pool:
            learner.collect_rollouts_parallel(
                learner.num_init_rollouts_pool, True, learner.train_env_parallel
            )
            trials += learner.last_trials
            if isinstance(learner.num_updates_per_iter, float):
                learner.update()
        learner.collect_rollouts_parallel(
            learner.num_rollouts_per_iter, parallel_env=learner.train_env_parallel
        )
        trials += learner.last_trials
        figures = learner.log_train_stats(learner.update())
        episodes = [(float(trial.rewards.sum()), len(trial)) for trial in trials]
        return Iterated(episodes=episodes, figures=figures)

    def evaluate(self, *, is_wary: bool, should_stop: Callable[[], bool]) -> Evaluation:
        if should_stop():
            raise EvaluationStopped
        learner = self._learner
        figures = learner.log()
        found = learner.last_results
        env = learner.eval_env
        goal_of = env.get_wrapper_attr("goal_of") if env.has_wrapper_attr("goal_of") else None
        write_trials(self._folder, found, goal_of, learner.tasks_seen)
        write_progress(self._folder)
        return Evaluation(tuple(found.returns.sum(1).tolist()), figures=figures)


def resumed_config(run_dir: Path) -> MetaConfig:
    """What the run in this folder was asked for."""
    kind = META_KIND
    try:
        about = json.loads((run_dir / RUN_FILE).read_text())
        name = about.get(JOB) if isinstance(about, dict) else None
    except (OSError, ValueError) as exc:
        raise CheckpointError(str(run_dir), f"holds no run: {RUN_FILE} cannot be read") from exc
    if name == "rl2":
        from envfleet.meta.rl2 import RL2_KIND

        kind = RL2_KIND
    options = RunFile(run_dir, kind).options()
    if kind is META_KIND:
        policy = options["policy"]
        values = {field.name: getattr(policy, field.name) for field in fields(policy)}
        options["policy"] = policy_options(values)
    return MetaConfig(**options)


def folder_for(config: MetaConfig) -> Path:
    """A folder in `runs` with nothing in it."""
    what = "rl2" if config.is_rl2 else config.policy.seq_model
    return free_folder(Path("runs"), f"{config.env.env_name}-{what}-seed{config.run.seed}")
