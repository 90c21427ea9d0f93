"""Training runs of several seeds, each in a process of its own, and the curves they leave."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.apart import each_apart
from benchmarks.outcome import Pace
from benchmarks.tables import Curves
from envfleet.learn.recipes import Recipe
from envfleet.learn.train import TrainOptions, train
from envfleet.observe.progress import Progress
from envfleet.runs.callbacks import Evaluation, RunCallback

EVALUATIONS, EPISODES = 10, 20
"""How often the policy is looked at on its way, and for how long."""

Points = tuple[tuple[int, float, float], ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is to be learned, and how."""

    env: str
    """A Gymnasium id."""
    recipe: Recipe

    def steps(self, part: float) -> int:
        """Environment steps of one run, of which only a `part` is made."""
        return max(1, round(self.recipe.total_steps * part))

    def title(self, part: float) -> str:
        """What to call it in tables."""
        name = self.env.rpartition(":")[2]
        return f"{name}, {self.steps(part):,} steps"


def learn(lesson: Lesson, pace: Pace, progress: Progress, title: str) -> Curves:
    """One run for each seed.

    Raises:
        EndedEarly: A run ended without a policy.
    """
    steps = lesson.steps(pace.part)
    asked = [(lesson, seed, steps) for seed in range(pace.seeds)]
    found: dict[int, Points] = {}
    with progress.bar(title, len(asked)) as bar:
        for place, points in each_apart(one_run, asked, pace.jobs):
            found[asked[place][1]] = points
            bar.note(f"seed {asked[place][1]}: {points[-1][1]:,.1f}")
            bar.advance()
    runs = {seed: found[seed] for seed in sorted(found)}
    return Curves(lesson.title(pace.part), runs)


def one_run(lesson: Lesson, seed: int, steps: int) -> Points:
    """Train, and return every evaluation on the way; the last one is of the last policy."""
    recipe, seen = lesson.recipe, _Evaluations()
    options = TrainOptions(
        lesson.env,
        n_envs=recipe.n_envs,
        total_steps=steps,
        seed=seed,
        device="cpu",
        # several runs share the cores, and every backend gives the same policy
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
        """Write it down."""
        self.points.append((env_steps, round(evaluation.mean, 4), round(evaluation.std, 4)))
