"""One run from beginning to end: iterate, evaluate, keep checkpoints, note figures, go on later.

A run that is ended in any way goes on from its newest whole checkpoint as if nothing had been: what
came after that checkpoint is done again, with the same results. What else lies in its folder is
``run_folder.py``'s business.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.errors import (
    CheckpointError,
    ConfigError,
    NothingCollected,
    VideoError,
    WorkerDied,
)
from envfleet.learn.accounting import shares, verdict
from envfleet.learn.alone import alone_in
from envfleet.learn.checkpoint import CheckpointFolder
from envfleet.learn.clock import Clock
from envfleet.learn.device import usable_device
from envfleet.learn.environments import env_fn, opened, packages
from envfleet.learn.evaluate import EVALUATION_SEED, Evaluation, EvaluationStopped, evaluate
from envfleet.learn.ppo import PPOOptions, PPOTrainer
from envfleet.learn.run_folder import (
    IDENTITY,
    RunFolder,
    check_identity,
    new_identity,
    read_identity,
)
from envfleet.learn.train_options import TrainOptions
from envfleet.learn.watcher import Iteration, Watcher
from envfleet.observe import video, weights_and_biases

__all__ = ["Iteration", "Outcome", "TrainOptions", "Watcher", "train"]

RECENT = 100
"""Episodes in the mean that is shown."""

PATIENCE_S = 300.0
"""How long a step may take in an evaluation that has ended a process before."""
ENDINGS = ("SystemExit", "KeyboardInterrupt")
"""What an environment may raise that would end this process, were it raised here."""
MOST_LOST = 32
"""Steps without one to learn from, from which on there will be none."""
RETRY_S = 1.0
"""How long a last checkpoint that could not be written waits for its second try."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    run_dir: Path
    env_steps: int
    new_steps: int
    """Made by this process."""
    seconds: float
    best_return: float | None
    """The best mean of an evaluation."""
    last_evaluation: Evaluation | None
    failed_evaluations: int
    """Of which no episode came to its end, in this process."""
    incidents: int
    shares: dict[str, float]
    """Where the time went, as parts of 1."""
    verdict: str
    """What took most, and what to do about it."""
    is_stopped: bool
    """True if the watcher ended it before its time."""
    report: Path
    """The page that shows all of it."""

    @property
    def env_steps_per_second(self) -> float:
        """Over all of the run's time here, evaluation and checkpoints included."""
        return self.new_steps / self.seconds if self.seconds else 0.0


def train(
    options: TrainOptions,
    ppo: PPOOptions,
    run_dir: Path,
    watcher: Watcher | None = None,
    *,
    is_resumed: bool = False,
) -> Outcome:
    """Train in `run_dir`, from the beginning or from its newest checkpoint.

    A run that goes on may have other options of those that nothing depends on that is learned
    (`train_options.FREE`), and one that is at its end may be made longer.
    """
    watcher, run_dir = watcher or Watcher(), Path(run_dir)
    usable_device(options.device)
    if options.wandb:
        weights_and_biases.need()
    if options.video:
        video.need()
    with alone_in(run_dir):
        return _train_alone(options, ppo, run_dir, watcher, is_resumed)


def _train_alone(
    options: TrainOptions, ppo: PPOOptions, run_dir: Path, watcher: Watcher, is_resumed: bool
) -> Outcome:
    checkpoints = CheckpointFolder(run_dir, keep=options.keep_checkpoints)
    folder = RunFolder(run_dir)
    checkpoints.prepare()
    if not is_resumed and folder.holds_a_run:
        raise ConfigError(f"{run_dir} holds a run already; resume it, or choose another folder")
    if is_resumed and checkpoints.is_empty and folder.has_kept:
        raise CheckpointError(
            str(run_dir),
            "has lost its checkpoints: the run kept some, and there is none any more; put one "
            "back, or start another run in another folder",
        )
    if is_resumed and not checkpoints.is_empty:
        folder.check_same(options, ppo)
    started_s = time.perf_counter()
    is_wary = is_resumed and folder.was_cut_off
    with opened(options, ppo, is_wary=is_wary) as trainer:
        run = _Run(options, ppo, trainer, checkpoints, folder, watcher, started_s)
        if is_resumed and not checkpoints.is_empty:
            run.identity = read_identity(run_dir)
            checkpoints.newest(str(trainer.device), take=run.take)
            run.go_on()
            watcher.resumed(run.best)
        else:  # also a run that was ended before its first checkpoint
            run.begin()
        watcher.begun(trainer.envs, trainer.env_steps)
        first_steps = trainer.env_steps
        try:
            is_stopped = run.iterate()
        except Exception as exc:
            run.end(f"failed: {' '.join(str(exc).split()) or type(exc).__name__}")
            raise
        except KeyboardInterrupt:
            folder.let_go()
            raise
        report = run.end("stopped" if is_stopped else "finished")
        parts = shares(run.spent(), run.seconds)
        return Outcome(
            run_dir=run_dir,
            env_steps=trainer.env_steps,
            new_steps=trainer.env_steps - first_steps,
            seconds=run.seconds,
            best_return=run.best,
            last_evaluation=run.last_evaluation,
            failed_evaluations=run.failed_evaluations,
            incidents=len(trainer.envs.incidents),
            shares=parts,
            verdict=verdict(parts, trainer.setup),
            is_stopped=is_stopped,
            report=report,
        )


class _Run:
    """The loop, and what it remembers between iterations."""

    def __init__(
        self,
        options: TrainOptions,
        ppo: PPOOptions,
        trainer: PPOTrainer,
        checkpoints: CheckpointFolder,
        folder: RunFolder,
        watcher: Watcher,
        started_s: float,
    ) -> None:
        self._options, self._ppo, self._trainer = options, ppo, trainer
        self._checkpoints, self._folder, self._watcher = checkpoints, folder, watcher
        self.identity = new_identity()
        self._iterations, self._setup = options.iterations(ppo), trainer.setup
        self._lengths = [self._iterations]
        """How long the run was to be, in iterations, and is."""
        self._number = 0
        self._had_deaths = False
        """Whether environments died or hung before the run went on."""
        self._lost_steps = 0
        """In how many steps of rollouts in a row every environment failed."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._saved = self._evaluated = 0
        self._owes_save = self._owes_evaluation = False
        self._is_wary = False
        """Whether an evaluation was interrupted before: it may hang or take its process along."""
        self._owed_best: tuple[int, dict[str, Any]] | None = None
        self._kept_by: tuple[str, ...] | None = None
        """How checkpoints keep the environments; None if that is not known."""
        self._films = options.video
        self._clock = Clock(started_s, self.spent)
        self._start_up_s = self._evaluation_s = self._filming_s = 0.0
        self.failed_evaluations = 0
        self._has_failed = False
        """Whether the last evaluation lost an episode."""
        self.best: float | None = None
        self.last_evaluation: Evaluation | None = None

    def begin(self) -> None:
        self._rehearse()
        self._folder.begin(
            self._options,
            self._ppo,
            identity=self.identity,
            iterations=self._iterations,
            setup=self._setup,
            packages=packages(self._options.env),
            kept_by=self._kept_by,
        )
        self._start_up_s = self._clock.elapsed_s

    def take(self, state: dict[str, Any]) -> None:
        """Stand where a checkpoint was made."""
        check_identity(self.identity, state)
        self._trainer.load(state["trainer"])
        self._number, self.best = state["iteration"], state["best"]
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._evaluated, self._saved = state["evaluated"], self._trainer.env_steps
        # it was ended between the checkpoint and the end of the evaluation that was due with it,
        # and unless somebody asked for that the evaluation may have been the reason
        self._owes_evaluation = state.get("owes_evaluation", False)
        may_be_it = self._folder.was_cut_off or state.get("is_wary", False)
        self._is_wary = self._owes_evaluation and may_be_it

    def go_on(self) -> None:
        self._check_length(self._folder.iterations, self._folder.earlier_iterations)
        self._rehearse()
        self._had_deaths = self._folder.has_deaths
        if self._films and self._folder.was_filming:
            self._films = False
            _warn("the run ended while it was filmed; it goes on without videos")
        self._folder.go_on(
            self._options,
            self._trainer.env_steps,
            iterations=self._iterations,
            packages=packages(self._options.env),
            setup=self._setup,
            owes_evaluation=self._owes_evaluation,
            kept_by=self._kept_by,
        )
        self._lengths = [*self._folder.earlier_iterations, self._iterations]
        self._start_up_s = self._clock.elapsed_s

    def _check_length(self, before: int, earlier: list[int]) -> None:
        """A run is as long as it was, or longer once it is at its end.

        What is annealed goes by the length, so that from anywhere else it would be a run that
        nobody could make again. A length by which nothing was learned yet may be taken back.
        """
        if earlier and self._number == earlier[-1]:
            before = earlier[-1]
        per_iteration = self._ppo.n_steps * self._options.n_envs
        if self._iterations < before:
            raise ConfigError(
                f"a run can be made longer, not shorter: this one has {before * per_iteration:,} "
                f"steps ({before} iterations)"
            )
        if self._iterations > before > self._number:
            raise ConfigError(
                f"a run can be made longer once it is at its end, and this one has made "
                f"{self._trainer.env_steps:,} of {before * per_iteration:,} steps; go on with it "
                "as it is first"
            )

    def iterate(self) -> bool:
        """All iterations that are left; True if the watcher ended them."""
        try:
            return self._iterate()
        except EvaluationStopped:
            return True

    def _iterate(self) -> bool:
        trainer = self._trainer
        if self._owes_evaluation:
            self._keep(saves=True, evaluates=True, may_wait=self._number < self._iterations)
        while self._number < self._iterations:
            begun_s, begun_steps = time.perf_counter(), trainer.env_steps
            rollout = trainer.collect()
            self._lost_steps = 0 if rollout.valid.any() else self._lost_steps + rollout.valid.size
            if self._lost_steps >= MOST_LOST:
                last = trainer.envs.incidents[-1].reason
                raise NothingCollected(self._lost_steps, last, str(self._folder.incidents))
            learned = trainer.learn(rollout, self._progress)
            seconds = time.perf_counter() - begun_s
            self._number += 1
            self._recent.extend(rollout.episodes)
            iteration = Iteration(
                number=self._number,
                of=self._iterations,
                env_steps=trainer.env_steps,
                episodes=rollout.episodes,
                mean_return=_mean(value for value, _ in self._recent),
                learned=learned,
                seconds=self.spent(),
                mean_length=_mean(length for _, length in self._recent),
                env_steps_per_second=(trainer.env_steps - begun_steps) / seconds,
                incidents=len(trainer.envs.incidents),
                setup=self._setup,
            )
            self._tell(iteration)
            is_last = self._number == self._iterations
            is_stopped = not is_last and self._watcher.should_stop()
            self._keep(
                saves=is_last or is_stopped or self._is_save_due(),
                evaluates=self._is_evaluation_due(is_last),
                may_wait=not is_last and not is_stopped,
            )
            if is_stopped:
                return True
        return False

    @property
    def _progress(self) -> float:
        """How much is over of the run as long as it was to be then."""
        return self._number / next(length for length in self._lengths if length > self._number)

    def end(self, how: str) -> Path:
        """Note the last of it, and write the report."""
        self._folder.note_incidents(self._trainer.env_steps, self._trainer.envs.incidents)
        if how == "finished" and self._folder.is_told_finished:
            self._clock.lap()  # nothing was left to do, and nothing is left to say
        else:
            self._note(ended=how)
        return self._folder.close()

    @property
    def seconds(self) -> float:
        """From this process's start to the last note: what its notes add up to."""
        return self._clock.noted_s

    def spent(self) -> dict[str, float]:
        """Seconds of this process so far, by what they were spent on."""
        others = {"evaluation": self._evaluation_s, "start-up": self._start_up_s}
        if self._options.video:
            others["filming"] = self._filming_s
        return {**self._trainer.seconds, **others}

    def _tell(self, iteration: Iteration) -> None:
        """Note an iteration's figures, keep what failed in it, and let the watcher know."""
        self._folder.note_incidents(iteration.env_steps, self._trainer.envs.incidents)
        self._note(
            mean_return=iteration.mean_return,
            mean_length=iteration.mean_length,
            episodes=len(iteration.episodes),
            **asdict(iteration.learned),
            env_steps_per_second=iteration.env_steps_per_second,
        )
        self._watcher.iterated(iteration)

    def _is_evaluation_due(self, is_last: bool) -> bool:
        every = self._options.eval_every
        return is_last or (every > 0 and self._trainer.env_steps - self._evaluated >= every)

    def _is_save_due(self) -> bool:
        due = self._trainer.env_steps - self._saved >= self._options.save_every
        return due or self._owes_save

    def _evaluate(self) -> bool:
        """True if the policy has never been better."""
        self._evaluated = self._trainer.env_steps
        self._watcher.evaluating(self._evaluated)
        begun_s = time.perf_counter()
        try:
            found = self._played()
        finally:
            self._evaluation_s += time.perf_counter() - begun_s
        self._has_failed = isinstance(found, str) or bool(found.lost)
        if isinstance(found, str):
            self.failed_evaluations += 1
            _warn(f"the evaluation at {self._evaluated} steps failed ({found}); the run goes on")
            self._note(evaluation_failed=found)
            return False
        if found.lost:
            _warn(
                f"{len(found.lost)} of {len(found.lost) + len(found.returns)} episodes of the "
                f"evaluation at {self._evaluated} steps were lost ({found.lost[-1]}); the others "
                "count"
            )
        self.last_evaluation = found
        lost = {"evaluation_lost": len(found.lost)} if found.lost else {}
        self._note(evaluation_mean=found.mean, evaluation_std=found.std, **lost)
        self._watcher.evaluated(self._trainer.env_steps, found)
        is_best = math.isfinite(found.mean) and (self.best is None or found.mean >= self.best)
        if is_best:
            self.best = found.mean
        return is_best

    def _played(self) -> Evaluation | str:
        """Episodes of the policy as it is, or why there are none."""
        options = self._options
        incidents = self._trainer.envs.incidents
        is_wary = (
            self._is_wary
            or self._had_deaths
            or any(one.kind != "exception" or one.reason.startswith(ENDINGS) for one in incidents)
        )
        patience_s = PATIENCE_S if is_wary else None
        try:
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
                should_stop=self._watcher.should_stop,
            )
        except EvaluationStopped:
            raise
        except Exception as exc:  # whatever it is, it costs this evaluation, not the run
            return f"{type(exc).__name__}: {exc}"

    def _film(self) -> None:
        """Record the evaluation's first episode once more, this time with pictures.

        That is done in this process: only if all is kept and the episodes went well.
        """
        if self._has_failed or self._is_wary:
            return
        path, begun_s = self._folder.video(self._trainer.env_steps), time.perf_counter()
        drawn = env_fn(self._options, render_mode="rgb_array")
        self._folder.begin_filming()
        try:
            made = video.record(self._trainer.agent.play(), drawn, path, seed=EVALUATION_SEED)
        except VideoError as exc:
            self._films = exc.was_drawn  # what cannot be drawn now cannot be drawn later
            _warn(f"{exc}; the run goes on{'' if self._films else ' without'}")
        else:
            if not made.is_whole:
                _warn(f"{path} shows the first {made.frames:,} steps of a longer episode")
        finally:
            self._folder.end_filming()
            self._filming_s += time.perf_counter() - begun_s

    def _rehearse(self) -> None:
        try:
            state = self._trainer.state()
        except WorkerDied:  # its slots come back in the first rollout
            return
        self._checkpoints.rehearse(self._state(state))
        self._kept_by = tuple(sorted({one.method for one in state["collector"]["slots"] or ()}))
        self._watcher.kept_by(self._kept_by)

    def _state(self, trainer: dict[str, Any], *, owes_evaluation: bool = False) -> dict[str, Any]:
        return {
            IDENTITY: self.identity,
            "trainer": trainer,
            "iteration": self._number,
            "best": self.best,
            "evaluated": self._evaluated,
            "owes_evaluation": owes_evaluation,
            "is_wary": self._is_wary,
            "recent": list(self._recent),
        }

    def _keep(self, *, saves: bool, evaluates: bool, may_wait: bool) -> None:
        """Save and evaluate as far as they are due, or after the next iteration if they may wait.

        What was learned is saved before it is evaluated, so that an evaluation that hangs or takes
        this process along costs itself only; and what is kept as the best is what was evaluated.
        Raises `EvaluationStopped` if the watcher does not wait for the evaluation.
        """
        if not saves and not evaluates:
            return
        try:
            trainer = self._trainer.state()
        except WorkerDied:
            if may_wait:  # its slots come back in the next rollout
                self._owes_save = self._owes_save or saves
                return
            trainer = self._trainer.state()
        state = self._state(trainer, owes_evaluation=evaluates)
        self._save(state, is_best=False, may_wait=may_wait or evaluates)
        if evaluates:
            try:
                if self._watcher.should_stop():
                    raise EvaluationStopped
                is_best = self._evaluate()
            except EvaluationStopped:
                if self._owes_save:
                    self._save(state, is_best=False, may_wait=False)
                raise
            self._owes_evaluation = False
            self._save(self._state(trainer), is_best=is_best, may_wait=may_wait)
            if self._films and not self._watcher.should_stop():
                self._film()

    def _save(self, state: dict[str, Any], *, is_best: bool, may_wait: bool) -> None:
        """Keep a checkpoint now, or after the next iteration if it cannot be and may wait."""
        if is_best:
            self._owed_best = self._trainer.env_steps, state
        try:
            self._write(state)
        except CheckpointError as exc:
            if not may_wait:
                time.sleep(RETRY_S)
                self._write(state)
                return
            if not self._owes_save:  # a disk may be cleared
                warnings.warn(
                    f"{exc}; the run goes on, the checkpoint before it is kept, and it is tried "
                    "again after every iteration",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._owes_save = True

    def _write(self, state: dict[str, Any]) -> None:
        steps = self._trainer.env_steps
        if self._owed_best is not None and self._owed_best[0] < steps:
            self._checkpoints.write(*self._owed_best, is_best=True)
            self._owed_best = None
        self._checkpoints.write(steps, state, is_best=self._owed_best is not None)
        self._saved, self._owes_save, self._owed_best = steps, False, None
        self._folder.kept()

    def _note(self, **figures: Any) -> None:
        line = {"iteration": self._number, **figures, **self._clock.lap()}
        self._folder.note(self._trainer.env_steps, line)


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _mean(values: Iterator[float]) -> float | None:
    """None for no values."""
    found = list(values)
    return float(np.mean(found)) if found else None
