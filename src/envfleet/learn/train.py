"""One run from beginning to end: iterate, evaluate, keep checkpoints, note figures, go on later.

A run that is ended in any way goes on from its newest whole checkpoint as if nothing had been: what
came after that checkpoint is done again, with the same results. What else lies in its folder is
``run_folder.py``'s business.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch

from envfleet.adapters.gymnasium import FleetVectorEnv, make_vec
from envfleet.adapters.names import find
from envfleet.engine.auto import Plan, choose_start_method, plan_fleet
from envfleet.engine.machine import usable_cores
from envfleet.engine.options import (
    BackendName,
    Deadlines,
    StartMethod,
    check_count,
    check_seconds,
    one_of,
)
from envfleet.errors import CheckpointError, ConfigError, VideoError, WorkerDied
from envfleet.learn.accounting import shares, verdict
from envfleet.learn.alone import alone_in
from envfleet.learn.checkpoint import CheckpointFolder, fitting, load
from envfleet.learn.device import usable_device
from envfleet.learn.evaluate import EVALUATION_SEED, MAX_STEPS, Evaluation, evaluate
from envfleet.learn.options import by_name, check_flag, check_seed
from envfleet.learn.ppo import Agent, Learned, PPOOptions, PPOTrainer
from envfleet.learn.run_folder import (
    IDENTITY,
    RUN_FILE,
    RunFolder,
    check_identity,
    new_identity,
    read_identity,
)
from envfleet.observe import video, weights_and_biases
from envfleet.observe.figures import SECONDS

DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
MIN_GAIN = 1.5
"""What workers must promise: between the policy's turns they fall asleep, and waking them takes
longer than a round trip from step to step."""
CUT_OFF = (
    "the run was cut off before, and an environment that ends its process would do that again here"
)
RECENT = 100
"""Episodes in the mean that is shown."""

PATIENCE_S = 300.0
"""How long a step may take in an evaluation that has ended a process before."""
RETRY_S = 1.0
"""How long a last checkpoint that could not be written waits for its second try."""


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
        check_count("eval_max_steps", self.eval_max_steps)
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


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration did."""

    number: int
    """From 1."""
    of: int
    env_steps: int
    episodes: list[tuple[float, int]]
    """Return and length of those that ended."""
    mean_return: float | None
    """Of the last hundred episodes; None before the first one ended."""
    learned: Learned
    seconds: dict[str, float]
    """Where the time of this process went so far."""
    mean_length: float | None = None
    """Of the same episodes, in steps."""
    env_steps_per_second: float = 0.0
    """Of this iteration: its rollout and its update."""
    incidents: int = 0
    """Failures of the fleet since this process began."""


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


class Watcher:
    """Is told what happens in a run; the base class does not care."""

    def resumed(self, best: float | None) -> None:
        """It goes on with a run whose best evaluation had this mean; told before `begun`."""

    def begun(self, envs: FleetVectorEnv, start_steps: int) -> None:
        """The environments are there; `start_steps` have been made before."""

    def iterated(self, iteration: Iteration) -> None:
        """A rollout and an update are done."""

    def evaluating(self, env_steps: int) -> None:
        """The policy is being looked at, which may take a while."""

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """The policy has been looked at."""

    def should_stop(self) -> bool:
        """Asked after every iteration: True saves and ends the run."""
        return False


def train(
    options: TrainOptions,
    ppo: PPOOptions,
    run_dir: Path,
    watcher: Watcher | None = None,
    *,
    is_resumed: bool = False,
) -> Outcome:
    """Train in `run_dir`, from the beginning or from its newest checkpoint."""
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
        report = run.end("stopped" if is_stopped else "finished")
        parts = shares(run.spent(), run.seconds)
        return Outcome(
            run_dir=run_dir,
            env_steps=trainer.env_steps,
            new_steps=trainer.env_steps - first_steps,
            seconds=run.seconds,
            best_return=run.best,
            last_evaluation=run.last_evaluation,
            incidents=len(trainer.envs.incidents),
            shares=parts,
            verdict=verdict(parts),
            is_stopped=is_stopped,
            report=report,
        )


@contextmanager
def opened(
    options: TrainOptions, ppo: PPOOptions, *, is_wary: bool = False
) -> Iterator[PPOTrainer]:
    """A trainer on a fleet of its own, as a run has them at its beginning.

    Args:
        options: Of the run.
        ppo: How to learn.
        is_wary: Whether the environments may take their process along: then that is never this one,
            unless it was asked for.
    """
    device = usable_device(options.device)
    with closing(_fleet(options, ppo, is_wary)) as envs, _one_thread():
        yield PPOTrainer(envs, ppo, seed=options.seed, device=device)


def _fleet(options: TrainOptions, ppo: PPOOptions, is_wary: bool) -> FleetVectorEnv:
    backend, num_workers, why = options.backend, options.num_workers, None
    if backend == "auto" and num_workers is None:
        # restarts alone would call for processes, but an environment that raises costs its episode
        # in this process too, and for small ones that is much the faster place
        method = choose_start_method(options.parallel_start_method)
        plan = (
            Plan("process", method, min(usable_cores(), options.n_envs), CUT_OFF)
            if is_wary
            else plan_fleet(
                [env_fn(options)] * options.n_envs,
                method,
                may_be_serial=not options.has_deadlines,
                min_gain=MIN_GAIN,
                deadlines=Deadlines(step_s=options.step_timeout_s, reset_s=options.reset_timeout_s),
            )
        )
        backend, num_workers, why = plan.backend, plan.num_workers, plan.describe(options.n_envs)
    envs = make_vec(
        find(options.env).source,
        options.n_envs,
        backend=backend,
        num_workers=num_workers,
        start_method=options.parallel_start_method,
        autoreset="same_step",
        on_failure="restart",
        max_restarts=options.max_restarts,
        step_timeout_s=options.step_timeout_s,
        reset_timeout_s=options.reset_timeout_s,
        copy=False,
        env_kwargs=options.env_kwargs,
        rollout_steps=0 if ppo.normalise_obs else ppo.n_steps,
    )
    envs.plan = why or envs.plan
    return envs


def env_fn(options: TrainOptions, **more: Any) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Builds a single environment like those of the run, with some arguments more or others."""
    found = find(options.env)
    build = found.build
    if isinstance(found.source, str):
        # the spec travels instead of the id: it may be registered in this process only
        build = functools.partial(gymnasium.make, _spec(found.source), disable_env_checker=True)
    return functools.partial(build, **{**options.env_kwargs, **more})


def _spec(source: str) -> gymnasium.envs.registration.EnvSpec:
    """Of an id, or of "module:Id": once imported, Gymnasium knows the id alone."""
    return gymnasium.spec(source.rpartition(":")[2])


def resumed_options(run_dir: Path) -> tuple[TrainOptions, PPOOptions]:
    """What the run in this folder was asked for."""
    if run_dir.is_file():
        raise CheckpointError(str(run_dir), f"is a file; name the run's folder, {run_dir.parent}")
    if not run_dir.exists():
        raise CheckpointError(str(run_dir), "does not exist, so it holds no run")
    try:
        kept = json.loads((run_dir / RUN_FILE).read_text())
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
        self._iterations = options.iterations(ppo)
        self._number = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._saved = self._evaluated = 0
        self._owes_save = self._owes_evaluation = False
        self._is_wary = False
        """Whether an evaluation may hang or take its process along: one has been interrupted, and
        none has come to its end since."""
        self._owed_best: tuple[int, dict[str, Any]] | None = None
        self._films = options.video
        self._clock = _Clock(started_s, self.spent)
        self._start_up_s = self._evaluation_s = 0.0
        self.best: float | None = None
        self.last_evaluation: Evaluation | None = None

    def begin(self) -> None:
        self._rehearse()
        self._folder.begin(
            self._options,
            self._ppo,
            identity=self.identity,
            iterations=self._iterations,
            packages=_packages(self._options.env),
        )
        self._start_up_s = self._clock.elapsed_s

    def take(self, state: dict[str, Any]) -> None:
        """Stand where a checkpoint was made."""
        check_identity(self.identity, state)
        self._trainer.load(state["trainer"])
        self._number, self.best = state["iteration"], state["best"]
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._evaluated, self._saved = state["evaluated"], self._trainer.env_steps
        # it was killed between the checkpoint and the end of the evaluation that was due with it
        self._owes_evaluation = state.get("owes_evaluation", False)
        self._is_wary = self._owes_evaluation

    def go_on(self) -> None:
        self._rehearse()
        self._folder.go_on(
            self._trainer.env_steps,
            _packages(self._options.env),
            owes_evaluation=self._owes_evaluation,
        )
        self._start_up_s = self._clock.elapsed_s

    def iterate(self) -> bool:
        """All iterations that are left; True if the watcher ended them."""
        trainer = self._trainer
        if self._owes_evaluation:
            self._keep(saves=True, evaluates=True, may_wait=self._number < self._iterations)
        while self._number < self._iterations:
            begun_s, begun_steps = time.perf_counter(), trainer.env_steps
            rollout = trainer.collect()
            learned = trainer.learn(rollout, self._number / self._iterations)
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

    def end(self, how: str) -> Path:
        """Note the last of it, and write the report."""
        self._folder.note_incidents(self._trainer.env_steps, self._trainer.envs.incidents)
        self._note(ended=how)
        return self._folder.close()

    @property
    def seconds(self) -> float:
        """From this process's start to the last note: what its notes add up to."""
        return self._clock.noted_s

    def spent(self) -> dict[str, float]:
        """Seconds of this process so far, by what they were spent on."""
        others = {"evaluation": self._evaluation_s, "start-up": self._start_up_s}
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
        options, begun_s = self._options, time.perf_counter()
        patience_s = PATIENCE_S if self._is_wary else None
        self._evaluated = self._trainer.env_steps
        self._watcher.evaluating(self._evaluated)
        try:
            play, env = self._trainer.agent.play, env_fn(options)
            found = evaluate(
                play,
                env,
                episodes=options.eval_episodes,
                max_steps=options.eval_max_steps,
                # a worker answers much later than this process does: only where there is a reason
                in_worker=options.has_deadlines or self._is_wary,
                start_method=options.parallel_start_method,
                step_timeout_s=options.step_timeout_s or patience_s,
                reset_timeout_s=options.reset_timeout_s or patience_s,
            )
        except Exception as exc:  # the environment's own: it costs this evaluation, not the run
            what = f"{type(exc).__name__}: {exc}"
            warnings.warn(
                f"the evaluation at {self._evaluated} steps failed ({what}); the run goes on",
                RuntimeWarning,
                stacklevel=2,
            )
            self._note(evaluation_failed=what)
            return False
        else:
            if self._films:
                self._film()
        finally:
            self._evaluation_s += time.perf_counter() - begun_s
        self.last_evaluation, self._is_wary = found, False
        self._note(evaluation_mean=found.mean, evaluation_std=found.std)
        self._watcher.evaluated(self._trainer.env_steps, found)
        is_best = math.isfinite(found.mean) and (self.best is None or found.mean >= self.best)
        if is_best:
            self.best = found.mean
        return is_best

    def _film(self) -> None:
        """Record the evaluation's first episode once more, this time with pictures."""
        path = self._folder.video(self._trainer.env_steps)
        try:
            drawn = env_fn(self._options, render_mode="rgb_array")
            video.record(self._trainer.agent.play(), drawn, path, seed=EVALUATION_SEED)
        except VideoError as exc:
            self._films = False  # what cannot be drawn now cannot be drawn later
            warnings.warn(f"{exc}; the run goes on without", RuntimeWarning, stacklevel=2)

    def _rehearse(self) -> None:
        try:
            self._checkpoints.rehearse(self._state(self._trainer.state()))
        except WorkerDied:  # its slots come back in the first rollout
            return

    def _state(self, trainer: dict[str, Any], *, owes_evaluation: bool = False) -> dict[str, Any]:
        return {
            IDENTITY: self.identity,
            "trainer": trainer,
            "iteration": self._number,
            "best": self.best,
            "evaluated": self._evaluated,
            "owes_evaluation": owes_evaluation,
            "recent": list(self._recent),
        }

    def _keep(self, *, saves: bool, evaluates: bool, may_wait: bool) -> None:
        """Save and evaluate as far as they are due, or after the next iteration if they may wait.

        What was learned is saved before it is evaluated, so that an evaluation that hangs or takes
        this process along costs itself only; and what is kept as the best is what was evaluated.
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
        if saves:
            state = self._state(trainer, owes_evaluation=evaluates)
            self._save(state, is_best=False, may_wait=may_wait or evaluates)
        if evaluates:
            is_best = self._evaluate()
            self._owes_evaluation = False
            if saves or is_best:
                self._save(self._state(trainer), is_best=is_best, may_wait=may_wait)

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


class _Clock:
    """Wall time between notes, and where it went."""

    def __init__(self, started_s: float, spent: Callable[[], Mapping[str, float]]) -> None:
        self._started_s = self._last_s = started_s
        self._spent, self._before = spent, dict[str, float]()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s

    @property
    def noted_s(self) -> float:
        return self._last_s - self._started_s

    def lap(self) -> dict[str, float]:
        """As figures: the seconds since the last lap, and by what they were spent on."""
        now_s = time.perf_counter()
        laps = {"seconds": now_s - self._last_s}
        for name, total_s in self._spent().items():
            lap_s = total_s - self._before.get(name, 0.0)
            # a split may move what it took for waiting to another part: that is not time won
            if lap_s > 0:
                laps[SECONDS + name] = lap_s
                self._before[name] = total_s
        self._last_s = now_s
        return {name: round(value, 6) for name, value in laps.items()}


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


def _packages(env: str) -> list[str]:
    """Where an environment comes from, as far as its name tells."""
    source = find(env).source
    entry: Any = source
    if isinstance(source, str):
        entry = _spec(source).entry_point
    where = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return [where.partition(".")[0], *(["mujoco"] if "mujoco" in where else [])]


def _mean(values: Iterator[float]) -> float | None:
    """None for no values."""
    found = list(values)
    return float(np.mean(found)) if found else None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small networks lose by threads, and workers need the cores; sums must not depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
