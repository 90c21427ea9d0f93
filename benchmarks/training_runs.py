"""Training runs with several seeds, each in its own process, and their learning curves."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fresh_process import in_fresh_processes
from benchmarks.rounds import Pace
from benchmarks.tables import Curves
from envfleet.learn.recipes import Recipe
from envfleet.learn.train import TrainOptions, train
from envfleet.observe.progress import Progress
from envfleet.runs.callbacks import Evaluation, RunCallback

EVALUATIONS, EPISODES = 10, 20
"""Number of evaluations during a run, and episodes in each."""

Points = tuple[tuple[int, float, float], ...]


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """An environment and the recipe to train on it."""

    env: str
    """A Gymnasium id."""
    recipe: Recipe

    def steps(self, part: float) -> int:
        """Environment steps of one run, or of a `part` of it."""
        return max(1, round(self.recipe.total_steps * part))

    def title(self, part: float) -> str:
        """Its name in tables."""
        name = self.env.rpartition(":")[2]
        return f"{name}, {self.steps(part):,} steps"


def learn(task: TrainingTask, pace: Pace, progress: Progress, title: str) -> Curves:
    """Train once for each seed.

    Raises:
        EndedEarly: A run ended without a result.
    """
    steps = task.steps(pace.part)
    asked = [(task, seed, steps) for seed in range(pace.seeds)]
    found: dict[int, Points] = {}
    with progress.bar(title, len(asked)) as bar:
        for place, points in in_fresh_processes(one_run, asked, pace.jobs):
            found[asked[place][1]] = points
            bar.note(f"seed {asked[place][1]}: {points[-1][1]:,.1f}")
            bar.advance()
    runs = {seed: found[seed] for seed in sorted(found)}
    return Curves(task.title(pace.part), runs)


def one_run(task: TrainingTask, seed: int, steps: int) -> Points:
    """Train, and return every evaluation; the last one is of the last policy."""
    recipe, seen = task.recipe, _Evaluations()
    options = TrainOptions(
        task.env,
        n_envs=recipe.n_envs,
        total_steps=steps,
        seed=seed,
        device="cpu",
        # runs share the cores, and every backend gives the same policy
        backend="serial",
        save_every=steps,
        eval_every=max(1, steps // EVALUATIONS),
        eval_episodes=EPISODES,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(options, recipe.options, Path(folder), seen)
    return tuple(seen.points)


class _Evaluations(RunCallback):
    def __init__(self) -> None:
        self.points: list[tuple[int, float, float]] = []

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """Keep its figures."""
        self.points.append((env_steps, round(evaluation.mean, 4), round(evaluation.std, 4)))
