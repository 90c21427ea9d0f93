"""The rows of meta.py that learn: returns of RL², of agents with a memory, and of those without.

`ROWS` has them by name. A row trains one or several agents, each with every seed.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from benchmarks.fresh_process import EndedEarly, in_fresh_processes
from benchmarks.rounds import Outcome, Pace, Row
from benchmarks.tables import Curves, Line, Target
from envfleet.meta import load_config, train
from envfleet.meta.options import LearnerOptions
from envfleet.observe.progress import Progress
from envfleet.runs.callbacks import Evaluation, RunCallback

SCALE = "0 random, 1 oracle"
LAST, FIRST = -1, 0
"""Episodes of a trial."""
SIDE_BY_SIDE = ("env.num_parallel_workers=16", "env.num_processes=1")
"""Trials whose actions are chosen in one batch, while one core steps all of them."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The returns of an episode that count as 0 and as 1."""

    random: float
    """With random actions."""
    oracle: float
    """With the task known."""

    def of(self, value: float) -> float:
        """0 for random actions, 1 with the task known."""
        return round((value - self.random) / (self.oracle - self.random), 4)


POINT_ROBOT, GRID_NAVI = Scale(-66.8, -5.18), Scale(-1.15, 11.07)
WIND, RETURNS = Scale(0.01, 63.2), Scale(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class MetaTask:
    """An agent that learns by a preset, and what its last policy must reach."""

    name: str
    """In tables."""
    preset: str
    scale: Scale
    changes: tuple[str, ...] = ()
    targets: dict[int, Target] = field(default_factory=dict)
    """By episode."""


def at_least(bound: float) -> Target:
    """Of a scaled return."""
    return Target(bound, "")


def at_most(bound: float) -> Target:
    """Of a scaled return."""
    return Target(bound, "", is_ceiling=True)


# as many updates as with a memory; 32 windows of 40 steps of a trial say less than 1280 others
WITHOUT_MEMORY = ("policy.seq_model=mlp", "train.batch_size=640")

ALONE = {
    "point-robot-rl2": MetaTask(
        "PointRobot-v0, RL²", "point_robot/rl2", POINT_ROBOT, targets={LAST: at_least(0.85)}
    ),
    "point-robot-memory": MetaTask(
        "PointRobot-v0, Memory SAC", "point_robot/rnn", POINT_ROBOT, SIDE_BY_SIDE,
        {LAST: at_least(0.85)},
    ),
    "point-robot-markov": MetaTask(
        "PointRobot-v0, Markov SAC", "point_robot/rnn", POINT_ROBOT,
        (*SIDE_BY_SIDE, *WITHOUT_MEMORY), {LAST: at_most(0.45)},
    ),
    "point-robot-oracle": MetaTask(
        "PointRobot-v0, Markov SAC that sees the task", "point_robot/rnn", POINT_ROBOT,
        (*SIDE_BY_SIDE, *WITHOUT_MEMORY, "env.oracle=true"), {LAST: at_least(0.95)},
    ),
    "grid-navi-rl2": MetaTask(
        "GridNavi-v0, RL²", "grid_navi/rl2", GRID_NAVI,
        targets={LAST: at_least(0.85), FIRST: at_most(0.45)},
    ),
    "grid-navi-memory": MetaTask(
        "GridNavi-v0, discrete Memory SAC", "grid_navi/rnn", GRID_NAVI, SIDE_BY_SIDE
    ),
}  # fmt: skip
"""Rows of one agent."""


SMALL_NETWORKS = (
    "policy.rnn_hidden_size=64", "policy.observ_embedding_size=16", "policy.separate=false",
    "policy.dqn_layers=[64, 64]", "policy.policy_layers=[64, 64]", "policy.lr=1e-3",
)  # fmt: skip
# of 100 trials with undirected exploration not one reaches the goal, so there are many trials
IN_WIND = (
    *SIDE_BY_SIDE, *SMALL_NETWORKS, "train.num_init_rollouts_pool=160", "train.num_iters=203",
    "train.num_rollouts_per_iter=32", "train.num_updates_per_iter=40", "eval.log_interval=20",
    "policy.gamma=0.95", "policy.tau=0.02", "policy.sac={alpha_lr: 0.01, noise_correlation: 0.9}",
)  # fmt: skip
ON_A_CHEETAH = (
    *SIDE_BY_SIDE, *SMALL_NETWORKS, "train.num_init_rollouts_pool=16", "train.num_iters=98",
    "train.num_rollouts_per_iter=8", "train.num_updates_per_iter=64", "eval.log_interval=10",
    "policy.gamma=0.97", "policy.tau=0.01", "policy.sac={alpha_lr: 0.003}",
)  # fmt: skip

COMPARED = {
    "wind-returns": (
        MetaTask(
            "Wind-v0, Memory SAC", "wind/rnn", WIND,
            (*IN_WIND, "policy.seq_model=lstm", "train.sampled_seq_len=20"),
        ),
        MetaTask(
            "Wind-v0, RL²", "wind/rl2", WIND, ("train.num_iters=208", "eval.log_interval=20")
        ),
        MetaTask(
            "Wind-v0, Markov SAC", "wind/mlp", WIND, (*IN_WIND, "train.batch_size=640")
        ),
    ),
    "half-cheetah-vel-returns": (
        MetaTask(
            "HalfCheetahVel-v0, Memory SAC", "half_cheetah_vel/rnn", RETURNS,
            (
                *ON_A_CHEETAH, "policy.seq_model=lstm", "train.sampled_seq_len=64",
                "policy.reward_prediction=1",
            ),
        ),
        MetaTask(
            "HalfCheetahVel-v0, RL²", "half_cheetah_vel/rl2", RETURNS,
            ("train.num_iters=100", "eval.log_interval=10"),
        ),
        MetaTask(
            "HalfCheetahVel-v0, Markov SAC", "half_cheetah_vel/mlp", RETURNS,
            (*ON_A_CHEETAH, "train.batch_size=640"),
        ),
    ),
}  # fmt: skip
"""Rows of several agents, of which the last has no memory."""


def alone(task: MetaTask, pace: Pace, progress: Progress, title: str) -> Outcome:
    """A line for each episode that has a target, and the curves of all episodes."""
    try:
        curves = learn([task], pace, progress, title)[0]
    except EndedEarly as exc:
        targets = list(task.targets.values()) or [at_least(0.0)]
        return Outcome([Line(task.name, SCALE, targets[0], (), failure=str(exc))])
    lines = []
    for number, target in task.targets.items():
        last = curves[number].last
        seeds = f"{pace.seeds} seed{'s' if pace.seeds > 1 else ''}"
        episode = "last" if number == LAST else "first"
        work = f"{task.name}, held-out tasks, {episode} episode, mean of {seeds}"
        lines.append(Line(work, SCALE, target, (statistics.mean(last),), (last,)))
    return Outcome(lines, curves=curves)


def learn(tasks: list[MetaTask], pace: Pace, progress: Progress, title: str) -> list[list[Curves]]:
    """Train each agent with every seed; the curves of each, by episode.

    Raises:
        EndedEarly: A run ended without a result.
    """
    asked = [
        (task, seed, max(1, round(iterations(task) * pace.part)))
        for task in tasks
        for seed in range(pace.seeds)
    ]
    found: dict[int, Points] = {}
    with progress.bar(title, len(asked)) as bar:
        for place, points in in_fresh_processes(one_run, asked, pace.jobs):
            found[place] = points
            task, seed, _ = asked[place]
            bar.note(f"{task.name}, seed {seed}: {points[-1][1][LAST]:.2f}")
            bar.advance()
    return [
        _curves(task, [found[number * pace.seeds + seed] for seed in range(pace.seeds)])
        for number, task in enumerate(tasks)
    ]


def compared(tasks: tuple[MetaTask, ...], pace: Pace, progress: Progress, title: str) -> Outcome:
    """Curves of all agents, and how far the others end above the last."""
    try:
        *others, markov = learn(list(tasks), pace, progress, title)
    except EndedEarly as exc:
        work = tasks[-1].name
        return Outcome([Line(work, "the others", at_least(0.0), (), failure=str(exc))])
    lines = []
    for task, curves in zip(tasks, others, strict=False):
        ahead = tuple(
            one - other for one, other in zip(curves[LAST].last, markov[LAST].last, strict=True)
        )
        work = f"{task.name}, held-out tasks, last episode, so much above"
        lines.append(Line(work, tasks[-1].name, at_least(0.0), (statistics.mean(ahead),), (ahead,)))
    return Outcome(lines, curves=[one for each in [*others, markov] for one in each])


Points = list[tuple[int, list[float]]]
"""Environment steps, and the return of each episode of a trial."""


def _curves(task: MetaTask, runs: list[Points]) -> list[Curves]:
    episodes, most = len(runs[0][-1][1]), max(points[-1][0] for points in runs)
    title = f"{task.name}, {most:,} steps"
    return [
        Curves(
            title if episodes == 1 else f"{title}, episode {number + 1}",
            {
                seed: tuple((steps, each[number], 0.0) for steps, each in points)
                for seed, points in enumerate(runs)
            },
        )
        for number in range(episodes)
    ]


def iterations(task: MetaTask) -> int:
    """Iterations of a whole run."""
    return load_config(task.preset, task.changes).train.num_iters


def steps(task: MetaTask) -> int:
    """The most environment steps of a whole run."""
    config = load_config(task.preset, task.changes)
    options = config.train
    if not isinstance(options, LearnerOptions):
        return int(options.num_iters * options.num_rollouts_per_iter * config.policy.n_steps)
    limit = gymnasium.spec(config.env.env_name).max_episode_steps
    assert limit is not None
    rollouts = options.num_init_rollouts_pool + options.num_iters * options.num_rollouts_per_iter
    return rollouts * limit * config.env.max_rollouts_per_task


def one_run(task: MetaTask, seed: int, num_iters: int) -> Points:
    """Train, and return every evaluation; the last one is of the last policy."""
    seen = _Evaluations(task.scale)
    alone = "env.num_parallel_workers=1"
    config = load_config(
        task.preset, [alone, *task.changes, f"train.num_iters={num_iters}"], seed=seed
    )
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), seen)
    return seen.points


class _Evaluations(RunCallback):
    def __init__(self, scale: Scale) -> None:
        self._scale, self.points = scale, Points()

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """Keep the return of each episode, scaled."""
        figures: dict[str, Any] = dict(evaluation.figures)
        episodes = [
            self._scale.of(value)
            for name, value in figures.items()
            if name.startswith("metrics/return_eval_episode_") and not name.endswith("_sto")
        ]
        self.points.append((env_steps, episodes))


ROWS: dict[str, Row] = {
    **{name: partial(alone, task) for name, task in ALONE.items()},
    **{name: partial(compared, tasks) for name, tasks in COMPARED.items()},
}
