"""Training by PPO as a run: `envfleet.runs` does the rest.

`train` opens the environments and runs the job; `PPO_KIND` says what all such runs have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envfleet.adapters.names import label
from envfleet.engine.incident import Incident
from envfleet.errors import NothingCollected
from envfleet.learn.environments import env_fn, opened, packages
from envfleet.learn.evaluate import EVALUATION_SEED, evaluate
from envfleet.learn.node_envs import NodeEnvs
from envfleet.learn.options import PPOOptions
from envfleet.learn.ppo import PPOTrainer
from envfleet.learn.torch_setup import usable_device
from envfleet.learn.train_options import FREE, LENGTHS, TrainOptions
from envfleet.observe import video
from envfleet.observe.events import Event
from envfleet.observe.learning_report import learning_page
from envfleet.runs.callbacks import Evaluation, RunCallback, RunOutcome
from envfleet.runs.job import Iterated, Job, JobKind, RunSettings
from envfleet.runs.record import INCIDENTS_FILE
from envfleet.runs.run import run
from envfleet.runs.time_report import Setup

__all__ = ["PPO_KIND", "TrainJob", "TrainOptions", "train"]

PATIENCE_S = 300.0
"""How long a step may take in an evaluation whose environments may hang."""
MOST_LOST = 32
"""After so many steps in a row in which every environment failed, the run fails."""

PPO_KIND = JobKind(
    name="ppo",
    options={"options": TrainOptions, "ppo": PPOOptions},
    titles={"options": "Run", "ppo": "PPO"},
    flags=("--no-recipe",),
    free=FREE,
    lengths=LENGTHS,
    page=lambda record: learning_page(record, "PPO"),
)


def train(
    options: TrainOptions,
    ppo: PPOOptions,
    run_dir: Path,
    callback: RunCallback | None = None,
    *,
    is_resumed: bool = False,
    is_trusted: bool = False,
) -> RunOutcome:
    """Train in `run_dir`, from the start or from its newest checkpoint.

    A run that goes on may have other options where results do not depend on them
    (`train_options.FREE`), and one that is at its end may be made longer. `is_trusted` opens the
    pickles of checkpoints that this user did not write here.
    """
    usable_device(options.device)
    run_dir = Path(run_dir)

    @contextmanager
    def open_job(is_wary: bool) -> Iterator[Job]:
        with opened(options, ppo, is_wary=is_wary) as trainer:
            yield TrainJob(options, trainer, run_dir)

    return run(
        PPO_KIND,
        {"options": options, "ppo": ppo},
        run_settings(options, ppo),
        run_dir,
        open_job,
        callback,
        is_resumed=is_resumed,
        is_trusted=is_trusted,
    )


def run_settings(options: TrainOptions, ppo: PPOOptions) -> RunSettings:
    """What the loop has to know about a training run."""
    return RunSettings(
        title=label(options.env),
        iterations=options.iterations(ppo),
        iteration_steps=ppo.n_steps * options.n_envs,
        save_every=options.save_every,
        keep_checkpoints=options.keep_checkpoints,
        eval_every=options.eval_every,
        tensorboard=options.tensorboard,
        wandb_project=options.wandb_project if options.wandb else None,
        video=options.video,
    )


class TrainJob(Job):
    """What a trainer does on a fleet: PPO of one agent, if not overridden."""

    can_evaluate = True

    def __init__(self, options: TrainOptions, trainer: Any, run_dir: Path) -> None:
        self._options, self._trainer, self._run_dir = options, trainer, run_dir
        self.envs = trainer.envs
        self._lost_steps = 0
        """Steps in a row in which every environment failed."""

    @property
    def env_steps(self) -> int:  # type: ignore[override]
        """Made so far."""
        return self._trainer.env_steps  # type: ignore[no-any-return]

    @property
    def packages(self) -> Sequence[str]:
        """Those that its environments come from."""
        return packages(self._options.env)

    @property
    def incidents(self) -> Sequence[Incident]:
        """Failures of its environments."""
        incidents: Sequence[Incident] = self._trainer.envs.incidents
        return incidents

    @property
    def events(self) -> Sequence[Event]:
        """Decisions about the nodes that it runs on."""
        envs = self._trainer.envs
        return envs.events if isinstance(envs, NodeEnvs) else ()

    @property
    def seconds(self) -> Mapping[str, float]:
        """What its time went into."""
        return self._trainer.seconds  # type: ignore[no-any-return]

    @property
    def setup(self) -> Setup:
        """The setup facts that advice about the time depends on."""
        return self._trainer.setup  # type: ignore[no-any-return]

    def state(self) -> dict[str, Any]:
        """All that the coming iterations depend on."""
        return self._trainer.state()  # type: ignore[no-any-return]

    def load(self, state: dict[str, Any]) -> None:
        """Continue exactly where this state was taken."""
        self._trainer.load(state)

    @property
    def begins_anew(self) -> bool:  # type: ignore[override]
        """Whether it began new episodes when it last went on from a state."""
        return bool(self._trainer.begins_anew)

    def kept_by(self, state: dict[str, Any]) -> tuple[str, ...]:
        """How this state keeps the environments."""
        return tuple(sorted({one.method for one in state["slots"] or ()}))

    def iterate(self, progress: float) -> Iterated:
        """One rollout of every slot, and an update."""
        trainer: PPOTrainer = self._trainer
        rollout = trainer.collect()
        self._count_lost(0 if rollout.valid.any() else rollout.valid.size)
        learned = trainer.learn(rollout, progress)
        age = rollout.age if self._options.collect == "async" else {}
        return Iterated(episodes=rollout.episodes, figures={**asdict(learned), **age})

    def _count_lost(self, steps: int) -> None:
        """All of so many steps were lost, or none of them: fail if it goes on for too long."""
        self._lost_steps = self._lost_steps + steps if steps else 0
        if self._lost_steps >= MOST_LOST:
            last = self.incidents[-1].reason
            raise NothingCollected(self._lost_steps, last, str(self._run_dir / INCIDENTS_FILE))

    def evaluate(self, *, is_wary: bool, should_stop: Callable[[], bool]) -> Evaluation:
        """Play episodes with the likeliest actions."""
        options = self._options
        patience_s = PATIENCE_S if is_wary else None
        return evaluate(
            self._trainer.agent.play,
            env_fn(options),
            episodes=options.eval_episodes,
            max_steps=options.eval_max_steps,
            n_envs=options.eval_envs,
            # a worker answers much later than this process does: only where there is a reason
            in_worker=options.has_deadlines or is_wary,
            start_method=options.parallel_start_method,
            step_timeout_s=options.step_timeout_s or patience_s,
            reset_timeout_s=options.reset_timeout_s or patience_s,
            should_stop=should_stop,
        )

    def film(self, path: Path) -> video.FilmedEpisode:
        """Record the evaluation's first episode once more, with pictures."""
        drawn = env_fn(self._options, render_mode="rgb_array")
        return video.record(self._trainer.agent.play(), drawn, path, seed=EVALUATION_SEED)
