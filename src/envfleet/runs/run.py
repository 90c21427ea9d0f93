"""One run from start to end: iterate, evaluate, save, and go on later with the same results.

    open ─► take the newest checkpoint, if there is one
              │
              ▼
        ┌─ iterate ─► note ─► save ─► evaluate ─► save as best ─► film ─┐
        └───────────────────────────────────────────────────────────────┘  until done or stopped

Law: a run that ended in any way goes on from its newest usable checkpoint as if it had not ended.
What came after that checkpoint is done again, with the same results. What is learned is saved
before it is evaluated, so that an evaluation that hangs or ends the process costs itself only.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.errors import CheckpointError, ConfigError, VideoError, WorkerDied
from envfleet.observe import video, weights_and_biases
from envfleet.runs.callbacks import (
    Evaluation,
    EvaluationStopped,
    Iteration,
    RunCallback,
    RunOutcome,
)
from envfleet.runs.checkpoint import CheckpointFolder, Trust
from envfleet.runs.clock import Clock
from envfleet.runs.folder import RunFolder
from envfleet.runs.job import Iterated, Job, JobKind, Options, RunSettings
from envfleet.runs.lock import locked
from envfleet.runs.plain_data import check_structure
from envfleet.runs.record import SPEED
from envfleet.runs.run_file import EARLIER, IDENTITY, check_identity, check_same, new_identity
from envfleet.runs.time_report import shares, verdict, verdict_so_far

__all__ = ["run"]

RECENT = 100
"""Episodes in the mean that is shown."""
ENDINGS = ("SystemExit", "KeyboardInterrupt")
"""What an environment may raise that would end this process if it were raised here."""
RETRY_S = 1.0
"""How long a last checkpoint that could not be written waits for its second try."""


def run(
    kind: JobKind,
    options: Options,
    settings: RunSettings,
    run_dir: Path,
    open_job: Callable[[bool], AbstractContextManager[Job]],
    callback: RunCallback | None = None,
    *,
    is_resumed: bool = False,
    is_trusted: bool = False,
) -> RunOutcome:
    """Run a job in `run_dir`, from the start or from its newest checkpoint.

    Args:
        kind: What kind of job it is.
        options: What was asked for: an instance of each of the kind's option classes.
        settings: The same as the loop needs it.
        run_dir: The folder of the run.
        open_job: Opens the job and closes it at the end. Its argument says whether the run was cut
            off before: environments that may end their process are then not to run in this one.
        callback: Is told what happens, and can stop the run.
        is_resumed: Whether to go on with the run in the folder. Its options may differ where
            results do not depend on them (`kind.free`); at its end it may be made longer.
        is_trusted: Whether to open pickles in checkpoints that this user did not write here.
    """
    callback, run_dir = callback or RunCallback(), Path(run_dir)
    if settings.wandb_project is not None:
        weights_and_biases.need()
    if settings.video:
        video.need()
    with locked(run_dir):
        checkpoints = CheckpointFolder(run_dir, keep=settings.keep_checkpoints)
        folder = RunFolder(run_dir, kind)
        started_s = time.perf_counter()
        has_checkpoint = _prepare(kind, options, checkpoints, folder, is_resumed)
        with open_job(is_resumed and folder.was_cut_off) as job:
            loop = _RunLoop(kind, options, settings, job, checkpoints, folder, callback, started_s)
            if has_checkpoint:
                loop.go_on("all" if is_trusted else "own")
            else:  # also a run that ended before its first checkpoint
                loop.begin()
            return loop.outcome()


def _prepare(
    kind: JobKind,
    options: Options,
    checkpoints: CheckpointFolder,
    folder: RunFolder,
    is_resumed: bool,
) -> bool:
    """Find out before anything starts whether the run can; True if it goes on from a checkpoint."""
    checkpoints.prepare()
    run_dir = folder.folder
    if not is_resumed:
        if folder.run_file.exists:
            raise ConfigError(f"{run_dir} holds a run already; resume it, or choose another folder")
        return False
    if checkpoints.is_empty:
        if folder.has_saved:
            raise CheckpointError(
                str(run_dir),
                "has lost its checkpoints: the run had some, and they were deleted; put one back, "
                "or start another run in another folder",
            )
        return False
    check_same(kind, run_dir, folder.run_file.read(), options)
    return True


class _RunLoop:
    """The loop, and what it remembers between iterations."""

    def __init__(
        self,
        kind: JobKind,
        options: Options,
        settings: RunSettings,
        job: Job,
        checkpoints: CheckpointFolder,
        folder: RunFolder,
        callback: RunCallback,
        started_s: float,
    ) -> None:
        self._kind, self._options, self._settings, self._job = kind, options, settings, job
        self._checkpoints, self._folder, self._callback = checkpoints, folder, callback
        self._identity = new_identity()
        self._setup = job.setup
        self._lengths = [settings.iterations]
        """How many iterations the run was to have, each time, and has now."""
        self._number = 0
        self._had_deaths = False
        """Whether environments died or hung before the run went on."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._saved = self._evaluated = 0
        self._owes_save = self._owes_evaluation = False
        self._is_wary = False
        """Whether an evaluation was interrupted before: it may hang or end its process."""
        self._owed_best: tuple[int, dict[str, Any]] | None = None
        self._kept_by: tuple[str, ...] | None = None
        """How checkpoints keep the environments; None if that is not known."""
        self._films = settings.video
        self._clock = Clock(started_s, self._spent)
        self._start_up_s = self._evaluation_s = self._filming_s = 0.0
        self._failed_evaluations = 0
        self._lost_episodes = False
        """Whether the last evaluation lost an episode."""
        self._best: float | None = None
        self._last_evaluation: Evaluation | None = None

    # ---- start, end ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a new run."""
        self._rehearse()
        self._folder.begin(
            self._options,
            self._settings,
            self._setup,
            identity=self._identity,
            packages=self._job.packages,
            kept_by=self._kept_by,
        )
        self._start_up_s = self._clock.elapsed_s

    def go_on(self, trust: Trust) -> None:
        """Continue from the newest usable checkpoint."""
        about = self._folder.run_file.read()
        self._identity = about[IDENTITY]
        self._checkpoints.newest(take=self._take, trust=trust)
        earlier = [one["iterations"] for one in about.get(EARLIER, [])]
        self._check_length(about["iterations"], earlier)
        self._rehearse()
        self._had_deaths = self._folder.has_deaths
        if self._films and self._folder.was_filming:
            self._films = False
            _warn("the run ended while it was filmed; it goes on without videos")
        self._folder.go_on(
            self._options,
            self._settings,
            self._setup,
            env_steps=self._job.env_steps,
            iteration=self._number,
            owes_evaluation=self._owes_evaluation,
            packages=self._job.packages,
            kept_by=self._kept_by,
            begins_anew=self._job.begins_anew,
        )
        earlier = [one["iterations"] for one in self._folder.run_file.read().get(EARLIER, [])]
        self._lengths = [*earlier, self._settings.iterations]
        self._start_up_s = self._clock.elapsed_s
        self._callback.resumed(self._best)

    def outcome(self) -> RunOutcome:
        """Make all iterations that are left, and say how that ended."""
        job, first_steps = self._job, self._job.env_steps
        self._callback.begun(job.envs, first_steps)
        try:
            is_stopped = self._iterate_all()
        except Exception as exc:
            self._end(f"failed: {' '.join(str(exc).split()) or type(exc).__name__}")
            raise
        except KeyboardInterrupt:
            self._folder.let_go()
            raise
        report = self._end("stopped" if is_stopped else "finished")
        parts = shares(self._spent(), self._clock.noted_s)
        return RunOutcome(
            run_dir=self._folder.folder,
            env_steps=job.env_steps,
            new_steps=job.env_steps - first_steps,
            seconds=self._clock.noted_s,
            best_return=self._best,
            last_evaluation=self._last_evaluation,
            failed_evaluations=self._failed_evaluations,
            incidents=len(job.incidents),
            shares=parts,
            verdict=verdict(parts, self._setup, self._kind.remedies),
            is_stopped=is_stopped,
            report=report,
        )

    def _end(self, how: str) -> Path:
        self._folder.note_incidents(self._job.env_steps, self._job.incidents)
        self._tell_decisions()
        if how == "finished" and self._folder.is_noted_finished:
            self._clock.lap()  # nothing was left to do, and the end is noted already
        else:
            self._note(ended=how)
        return self._folder.close()

    def _take(self, state: dict[str, Any]) -> None:
        """Continue from where a checkpoint was made."""
        check_identity(self._identity, state)
        best = None if state.get("best") is None else 0.0
        like = self._state({}) | {"best": best, "recent": [(0.0, 0)], "job": None}
        check_structure(like, state)
        self._job.load(state["job"])
        self._number, self._best = state["iteration"], state["best"]
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._evaluated, self._saved = state["evaluated"], self._place
        # it ended between the checkpoint and the end of the evaluation that was due with it, and
        # the evaluation may have been the reason unless the run was asked to end
        self._owes_evaluation = state["owes_evaluation"]
        may_be_it = self._folder.was_cut_off or state["is_wary"]
        self._is_wary = self._owes_evaluation and may_be_it

    def _check_length(self, before: int, earlier: list[int]) -> None:
        """A run is as long as it was, or longer once it is at its end.

        What is annealed goes by the length, so from elsewhere it would be a run that no command
        can repeat. A length by which no iteration was made may be taken back.
        """
        if earlier and self._number == earlier[-1]:
            before = earlier[-1]
        now, steps = self._settings.iterations, self._settings.iteration_steps
        if now < before:
            raise ConfigError(
                f"a run can be made longer, not shorter: this one has {before * steps:,} steps "
                f"({before} iterations)"
            )
        if now > before > self._number:
            raise ConfigError(
                f"a run can be made longer once it is at its end, and this one has made "
                f"{self._job.env_steps:,} of {before * steps:,} steps; go on with it as it is first"
            )

    # ---- iterations ------------------------------------------------------------------------------

    def _iterate_all(self) -> bool:
        """All iterations that are left; True if the callback ended them."""
        try:
            return self._iterate()
        except EvaluationStopped:
            return True

    def _iterate(self) -> bool:
        job, iterations = self._job, self._settings.iterations
        if self._owes_evaluation:
            self._keep(saves=True, evaluates=True, may_wait=self._number < iterations)
        while self._number < iterations:
            begun_s, begun_steps = time.perf_counter(), job.env_steps
            made = job.iterate(self._progress)
            seconds = time.perf_counter() - begun_s
            self._number += 1
            self._tell(made, (job.env_steps - begun_steps) / seconds)
            is_last = self._number == iterations
            is_stopped = not is_last and self._callback.should_stop()
            self._keep(
                saves=is_last or is_stopped or self._is_save_due(),
                evaluates=self._is_evaluation_due(is_last),
                may_wait=not is_last and not is_stopped,
            )
            if is_stopped:
                return True
        return False

    @property
    def _place(self) -> int:
        """How far it is, as the settings count what is due."""
        return self._number if self._settings.counts_iterations else self._job.env_steps

    @property
    def _progress(self) -> float:
        """The share that is done of the run, by the length that it was to have at this point."""
        return self._number / next(length for length in self._lengths if length > self._number)

    def _tell(self, made: Iterated, speed: float) -> None:
        """Note an iteration's figures, keep what failed in it, and tell the callback."""
        job = self._job
        self._recent.extend(made.episodes)
        iteration = Iteration(
            number=self._number,
            of=self._settings.iterations,
            env_steps=job.env_steps,
            episodes=made.episodes,
            mean_return=_mean_or_none(value for value, _ in self._recent),
            mean_length=_mean_or_none(length for _, length in self._recent),
            figures=made.figures,
            env_steps_per_second=speed,
            seconds=(seconds := self._spent()),
            incidents=len(job.incidents),
            verdict=verdict_so_far(seconds, self._setup, self._kind.remedies),
        )
        self._folder.note_incidents(iteration.env_steps, job.incidents)
        self._tell_decisions()
        self._note(
            mean_return=iteration.mean_return,
            mean_length=iteration.mean_length,
            episodes=len(iteration.episodes),
            **made.figures,
            **{SPEED: speed},
        )
        self._callback.iterated(iteration)

    def _tell_decisions(self) -> None:
        """Keep the decisions that are new, and tell the callback."""
        for event in self._folder.note_events(self._job.env_steps, self._job.events):
            self._callback.decided(event)

    def _note(self, **figures: Any) -> None:
        line = {"iteration": self._number, **figures, **self._clock.lap()}
        self._folder.note(self._job.env_steps, line)

    def _spent(self) -> dict[str, float]:
        """Seconds of this process so far, by part."""
        others = {"start-up": self._start_up_s}
        if self._job.can_evaluate:
            others = {"evaluation": self._evaluation_s, **others}
        if self._settings.video:
            others["filming"] = self._filming_s
        return {**self._job.seconds, **others}

    # ---- evaluations -----------------------------------------------------------------------------

    def _is_evaluation_due(self, is_last: bool) -> bool:
        every, since = self._settings.eval_every, self._place - self._evaluated
        return self._job.can_evaluate and (is_last or (every > 0 and since >= every))

    def _evaluate(self) -> bool:
        """True if no evaluation was better before."""
        self._evaluated = self._place
        self._callback.evaluating(self._job.env_steps)
        begun_s = time.perf_counter()
        try:
            found = self._job.evaluate(
                is_wary=self._must_be_wary, should_stop=self._callback.should_stop
            )
        except EvaluationStopped:
            raise
        except Exception as exc:  # it costs this evaluation, not the run
            return self._evaluation_failed(f"{type(exc).__name__}: {exc}")
        finally:
            self._evaluation_s += time.perf_counter() - begun_s
        self._lost_episodes = bool(found.lost)
        if found.lost:
            _warn(
                f"{len(found.lost)} of {len(found.lost) + len(found.returns)} episodes of the "
                f"evaluation at {self._job.env_steps} steps were lost ({found.lost[-1]}); the "
                "others count"
            )
        self._last_evaluation = found
        lost = {"evaluation_lost": len(found.lost)} if found.lost else {}
        self._note(evaluation_mean=found.mean, evaluation_std=found.std, **lost, **found.figures)
        self._callback.evaluated(self._job.env_steps, found)
        is_best = math.isfinite(found.mean) and (self._best is None or found.mean >= self._best)
        if is_best:
            self._best = found.mean
        return is_best

    def _evaluation_failed(self, why: str) -> bool:
        self._lost_episodes = True
        self._failed_evaluations += 1
        _warn(f"the evaluation at {self._job.env_steps} steps failed ({why}); the run goes on")
        self._note(evaluation_failed=why)
        return False

    @property
    def _must_be_wary(self) -> bool:
        """Whether environments have ended, or could have ended, the process they were in."""
        return (
            self._is_wary
            or self._had_deaths
            or any(
                one.kind != "exception" or one.reason.startswith(ENDINGS)
                for one in self._job.incidents
            )
        )

    def _film(self) -> None:
        """Record an episode, in this process: only if all is saved and the evaluation went well."""
        if self._lost_episodes or self._is_wary:
            return
        path, begun_s = self._folder.video(self._job.env_steps), time.perf_counter()
        self._folder.note_filming(True)
        try:
            made = self._job.film(path)
        except VideoError as exc:
            self._films = exc.was_drawn  # what cannot be drawn now cannot be drawn later
            _warn(f"{exc}; the run goes on{'' if self._films else ' without'}")
        else:
            if not made.is_whole:
                _warn(f"{path} shows the first {made.frames:,} steps of a longer episode")
        finally:
            self._folder.note_filming(False)
            self._filming_s += time.perf_counter() - begun_s

    # ---- checkpoints -----------------------------------------------------------------------------

    def _rehearse(self) -> None:
        """Find out whether checkpoints can be written, and how they keep the environments."""
        try:
            state = self._job.state()
        except WorkerDied:  # its slots come back in the first iteration
            return
        self._checkpoints.rehearse(self._state(state))
        self._tell_kept_by(state)

    def _tell_kept_by(self, job: dict[str, Any]) -> bool:
        """Say how this state keeps the environments; False if that is known."""
        kept_by = self._job.kept_by(job)
        if kept_by is None or kept_by == self._kept_by:
            return False
        self._kept_by = kept_by
        self._callback.kept_by(kept_by)
        return True

    def _is_save_due(self) -> bool:
        due = self._place - self._saved >= self._settings.save_every
        return due or self._owes_save

    def _state(self, job: dict[str, Any], *, owes_evaluation: bool = False) -> dict[str, Any]:
        return {
            IDENTITY: self._identity,
            "job": job,
            "iteration": self._number,
            "best": self._best,
            "evaluated": self._evaluated,
            "owes_evaluation": owes_evaluation,
            "is_wary": self._is_wary,
            "recent": list(self._recent),
        }

    def _keep(self, *, saves: bool, evaluates: bool, may_wait: bool) -> None:
        """Save and evaluate if they are due, or after the next iteration if they may wait.

        Raises `EvaluationStopped` if the callback does not wait for the evaluation.
        """
        if not saves and not evaluates:
            return
        try:
            job = self._job.state()
        except WorkerDied:
            if may_wait:  # its slots come back in the next iteration
                self._owes_save = self._owes_save or saves
                return
            job = self._job.state()
        if self._tell_kept_by(job) and self._kept_by is not None:
            self._folder.note_kept_by(self._kept_by)
        state = self._state(job, owes_evaluation=evaluates)
        self._save(state, is_best=False, may_wait=may_wait or evaluates)
        if evaluates:
            try:
                if self._callback.should_stop():
                    raise EvaluationStopped
                is_best = self._evaluate()
            except EvaluationStopped:
                if self._owes_save:
                    self._save(state, is_best=False, may_wait=False)
                raise
            self._owes_evaluation = False
            self._save(self._state(job), is_best=is_best, may_wait=may_wait)
            if self._films and not self._callback.should_stop():
                self._film()

    def _save(self, state: dict[str, Any], *, is_best: bool, may_wait: bool) -> None:
        """Write a checkpoint now, or after the next iteration if that fails and may wait."""
        if is_best:
            self._owed_best = self._job.env_steps, state
        try:
            self._write(state)
        except CheckpointError as exc:
            if not may_wait:
                time.sleep(RETRY_S)
                self._write(state)
                return
            if not self._owes_save:  # a full disk may be cleared
                _warn(
                    f"{exc}; the run goes on with the checkpoint before it, and it is tried again "
                    "after every iteration"
                )
            self._owes_save = True

    def _write(self, state: dict[str, Any]) -> None:
        steps = self._job.env_steps
        if self._owed_best is not None and self._owed_best[0] < steps:
            self._checkpoints.write(*self._owed_best, is_best=True)
            self._owed_best = None
        self._checkpoints.write(steps, state, is_best=self._owed_best is not None)
        self._saved, self._owes_save, self._owed_best = self._place, False, None
        self._folder.note_saved()


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _mean_or_none(values: Iterable[float]) -> float | None:
    """None for no values."""
    found = list(values)
    return float(np.mean(found)) if found else None
