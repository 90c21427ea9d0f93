"""One run from beginning to end: iterate, evaluate, keep checkpoints, note figures, go on later.

    run folder/  run.json       what was asked for: enough to go on
                 metrics.jsonl  one line per iteration and per evaluation
                 *.pt           checkpoints: the last few, latest.pt, best.pt

A run that is ended in any way goes on from its newest whole checkpoint as if nothing had been: what
came after that checkpoint is done again, with the same results.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch

from envfleet.adapters.gymnasium import FleetVectorEnv, make_vec
from envfleet.adapters.names import find
from envfleet.engine.options import BackendName, StartMethod, one_of
from envfleet.errors import CheckpointError, ConfigError, WorkerDied
from envfleet.learn.accounting import shares, verdict
from envfleet.learn.checkpoint import CheckpointFolder, load
from envfleet.learn.evaluate import Evaluation, evaluate
from envfleet.learn.ppo import Agent, Learned, PPOOptions, PPOTrainer

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
RECENT = 100
"""Episodes in the mean that is shown."""


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
    save_every: int = 25_000
    """Environment steps between checkpoints; the last iteration is kept in any case."""
    keep_checkpoints: int = 3
    """Checkpoints that are kept, beside the best one."""
    eval_every: int = 25_000
    """Environment steps between evaluations; 0 evaluates at the end only."""
    eval_episodes: int = 10
    """Episodes of one evaluation, played on an environment of its own."""

    def __post_init__(self) -> None:
        for name in ("n_envs", "total_steps", "save_every", "keep_checkpoints", "eval_episodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")
        if self.num_episodes is not None and self.num_episodes < 1:
            raise ConfigError(f"num_episodes must be at least 1, got {self.num_episodes}")
        if self.eval_every < 0:
            raise ConfigError(f"eval_every must be 0 or more, got {self.eval_every}")
        one_of("backend", self.backend, Literal["auto", BackendName])
        if self.parallel_start_method is not None:
            one_of("parallel_start_method", self.parallel_start_method, StartMethod)
        if not DEVICES.fullmatch(self.device):
            raise ConfigError(
                f"device must be one of auto, cpu, cuda, cuda:N or mps; got {self.device!r}"
            )

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

    @property
    def env_steps_per_second(self) -> float:
        """Over all of the run's time here, evaluation and checkpoints included."""
        return self.new_steps / self.seconds if self.seconds else 0.0


class Watcher:
    """Is told what happens in a run; the base class does not care."""

    def begun(self, envs: FleetVectorEnv, start_steps: int) -> None:
        """The environments are there; `start_steps` have been made before."""

    def iterated(self, iteration: Iteration) -> None:
        """A rollout and an update are done."""

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
    watcher = watcher or Watcher()
    _device(options.device)
    folder = CheckpointFolder(run_dir, keep=options.keep_checkpoints)
    folder.prepare()
    if not is_resumed and (run_dir / RUN_FILE).exists():
        raise ConfigError(f"{run_dir} holds a run already; resume it, or choose another folder")
    started_s = time.perf_counter()
    with opened(options, ppo) as trainer:
        run = _Run(options, ppo, trainer, folder, watcher)
        if is_resumed and not folder.is_empty:
            run.go_on(folder.newest(str(trainer.device)))
        else:  # also a run that was ended before its first checkpoint
            asked = {"options": asdict(options), "ppo": asdict(ppo)}
            _rewrite(run_dir / RUN_FILE, json.dumps(asked, indent=2) + "\n")
            (run_dir / METRICS_FILE).unlink(missing_ok=True)
        watcher.begun(trainer.envs, trainer.env_steps)
        first_steps, started_in_s = trainer.env_steps, time.perf_counter() - started_s
        is_stopped = run.iterate()
        seconds = time.perf_counter() - started_s
        parts = shares(run.seconds | {"start-up": started_in_s}, seconds)
        return Outcome(
            run_dir=run_dir,
            env_steps=trainer.env_steps,
            new_steps=trainer.env_steps - first_steps,
            seconds=seconds,
            best_return=run.best,
            last_evaluation=run.last_evaluation,
            incidents=len(trainer.envs.incidents),
            shares=parts,
            verdict=verdict(parts),
            is_stopped=is_stopped,
        )


@contextmanager
def opened(options: TrainOptions, ppo: PPOOptions) -> Iterator[PPOTrainer]:
    """A trainer on a fleet of its own, as a run has them at its beginning."""
    device = _device(options.device)
    envs = make_vec(
        find(options.env).source,
        options.n_envs,
        backend=options.backend,
        num_workers=options.num_workers,
        start_method=options.parallel_start_method,
        autoreset="same_step",
        on_failure="restart",
        env_kwargs=options.env_kwargs,
    )
    with closing(envs), _one_thread():
        yield PPOTrainer(envs, ppo, seed=options.seed, device=device)


def env_fn(options: TrainOptions) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Builds a single environment like those of the run."""
    return functools.partial(find(options.env).build, **options.env_kwargs)


def resumed_options(run_dir: Path) -> tuple[TrainOptions, PPOOptions]:
    """What the run in this folder was asked for."""
    try:
        kept = json.loads((run_dir / RUN_FILE).read_text())
        ppo = PPOOptions(**{**kept["ppo"], "hidden": tuple(kept["ppo"]["hidden"])})
        return TrainOptions(**kept["options"]), ppo
    except FileNotFoundError as exc:
        raise CheckpointError(str(run_dir), f"holds no run: there is no {RUN_FILE}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(str(run_dir), f"has a {RUN_FILE} that is not one ({exc})") from exc


class _Run:
    """The loop, and what it remembers between iterations."""

    def __init__(
        self,
        options: TrainOptions,
        ppo: PPOOptions,
        trainer: PPOTrainer,
        folder: CheckpointFolder,
        watcher: Watcher,
    ) -> None:
        self._options, self._trainer, self._folder = options, trainer, folder
        self._watcher = watcher
        self._iterations = options.iterations(ppo)
        self._number = 0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._saved = self._evaluated = 0
        self.best: float | None = None
        self.last_evaluation: Evaluation | None = None
        self._evaluation_s = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went so far."""
        return self._trainer.seconds | {"evaluation": self._evaluation_s}

    def go_on(self, state: dict[str, Any]) -> None:
        self._trainer.load(state["trainer"])
        self._number, self.best = state["iteration"], state["best"]
        self._recent.extend(state["recent"])
        self._evaluated, self._saved = state["evaluated"], self._trainer.env_steps
        _cut_metrics(self._folder.folder / METRICS_FILE, self._trainer.env_steps)

    def iterate(self) -> bool:
        """All iterations that are left; True if the watcher ended them."""
        trainer = self._trainer
        while self._number < self._iterations:
            rollout = trainer.collect()
            learned = trainer.learn(rollout, self._number / self._iterations)
            self._number += 1
            self._recent.extend(value for value, _ in rollout.episodes)
            mean = float(np.mean(self._recent)) if self._recent else None
            iteration = Iteration(
                number=self._number,
                of=self._iterations,
                env_steps=trainer.env_steps,
                episodes=rollout.episodes,
                mean_return=mean,
                learned=learned,
                seconds=self.seconds,
            )
            self._note(mean_return=mean, episodes=len(rollout.episodes), **asdict(learned))
            self._watcher.iterated(iteration)
            is_last = self._number == self._iterations
            is_stopped = not is_last and self._watcher.should_stop()
            is_best = self._is_evaluation_due(is_last) and self._evaluate()
            if is_last or is_stopped or is_best or self._is_save_due():
                self._save(is_best=is_best, may_wait=not is_last and not is_stopped)
            if is_stopped:
                return True
        return False

    def _is_evaluation_due(self, is_last: bool) -> bool:
        every = self._options.eval_every
        return is_last or (every > 0 and self._trainer.env_steps - self._evaluated >= every)

    def _is_save_due(self) -> bool:
        return self._trainer.env_steps - self._saved >= self._options.save_every

    def _evaluate(self) -> bool:
        """True if the policy has never been better."""
        options, begun_s = self._options, time.perf_counter()
        found = evaluate(self._trainer.agent.play, env_fn(options), episodes=options.eval_episodes)
        self._evaluation_s += time.perf_counter() - begun_s
        self._evaluated, self.last_evaluation = self._trainer.env_steps, found
        self._note(evaluation_mean=found.mean, evaluation_std=found.std)
        self._watcher.evaluated(self._trainer.env_steps, found)
        is_best = self.best is None or found.mean >= self.best
        if is_best:
            self.best = found.mean
        return is_best

    def _save(self, *, is_best: bool, may_wait: bool) -> None:
        try:
            trainer = self._trainer.state()
        except WorkerDied:
            if may_wait:  # its slots come back in the next rollout, after which it is tried again
                return
            trainer = self._trainer.state()
        state = {
            "trainer": trainer,
            "iteration": self._number,
            "best": self.best,
            "evaluated": self._evaluated,
            "recent": list(self._recent),
        }
        self._folder.write(self._trainer.env_steps, state, is_best=is_best)
        self._saved = self._trainer.env_steps

    def _note(self, **figures: Any) -> None:
        line = {"iteration": self._number, "env_steps": self._trainer.env_steps, **figures}
        with (self._folder.folder / METRICS_FILE).open("a") as file:
            file.write(json.dumps(_finite(line)) + "\n")


def load_agent(path: Path) -> tuple[TrainOptions, Agent]:
    """What a run was asked for and the agent it made, from its folder or one of its checkpoints."""
    if not path.exists():
        raise CheckpointError(str(path), "does not exist")
    run_dir = path if path.is_dir() else path.parent
    options, ppo = resumed_options(run_dir)
    state = CheckpointFolder(run_dir).newest() if path.is_dir() else load(path)
    env = env_fn(options)()
    agent = Agent(env.observation_space, env.action_space, ppo, torch.device("cpu"), options.seed)
    env.close()
    agent.load(state["trainer"])
    return options, agent


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as exc:
        raise ConfigError(f"device {name!r} cannot be used here; try --device cpu ({exc})") from exc
    return name


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in figures.items()
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small networks lose by threads, and workers need the cores; sums must not depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rewrite(path: Path, text: str) -> None:
    """Put a file in its place as a whole."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)


def _cut_metrics(path: Path, env_steps: int) -> None:
    """Forget what was noted after the checkpoint: it will be noted again."""
    if not path.exists():
        return
    lines = path.read_text().splitlines()
    whole = [line for line in lines if line.endswith("}")]  # a kill may leave half a line
    kept = [line for line in whole if json.loads(line)["env_steps"] <= env_steps]
    _rewrite(path, "".join(f"{line}\n" for line in kept))
