"""The rows of meta.py's table: collection of trials, and returns of meta-RL.

`ROWS` has all rows by name.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fresh_process import EndedEarly, in_fresh_processes
from benchmarks.peer_pomdp import PomdpBaselines
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.tables import Curves, Line, Target
from benchmarks.workload import timed
from envfleet.cli.measure import Contender, Slice
from envfleet.learn.torch_setup import threads
from envfleet.meta import Learner, load_config, train
from envfleet.observe.progress import Progress
from envfleet.runs.callbacks import Evaluation, RunCallback

SEQUENTIAL = "collect_rollouts, one environment"


class Collecting:
    """Rollouts of a Memory agent: in so many slots, or one after another."""

    def __init__(self, env_name: str, num_slots: int) -> None:
        """Collect in `num_slots` slots; 1 is `collect_rollouts`."""
        self._env_name, self._num_slots = env_name, num_slots
        self.key = f"slots-{num_slots}"
        self.label = SEQUENTIAL if num_slots == 1 else f"envfleet, {num_slots} slots"
        self._learner: Learner | None = None

    def open(self) -> None:
        """Make environments and agent."""
        self._learner = Learner(
            env_args={
                "env_name": self._env_name,
                "max_rollouts_per_task": 2,
                "num_train_tasks": 50,
                "num_eval_tasks": 20,
                "num_parallel_workers": self._num_slots,
            },
            train_args={"buffer_size": 100_000},
            policy_args={"seq_model": "gru", "rnn_hidden_size": 128},
        )

    def run(self, seconds: float) -> Slice:
        """Collect one rollout in every slot, again and again."""
        learner = self._learner
        assert learner is not None
        parallel = learner.train_env_parallel

        def step() -> int:
            return learner.collect_rollouts_parallel(self._num_slots, parallel_env=parallel)

        return timed(step, seconds)

    def close(self) -> None:
        """Close."""
        if self._learner is not None:
            self._learner.close()


class Acting:
    """The actions of so many slots in one batch; a step is one batch."""

    def __init__(self, num_rows: int) -> None:
        """Act for `num_rows` slots."""
        self._num_rows = num_rows
        self.key, self.label = f"rows-{num_rows}", f"one batch of {num_rows} slots"

    def open(self) -> None:
        """Make the agent."""
        args = {"env_name": "PointRobot-v0", "num_train_tasks": 50}
        policy = {"seq_model": "gru", "rnn_hidden_size": 128}
        with Learner(env_args=args, train_args={"buffer_size": 1000}, policy_args=policy) as one:
            self._agent = one.agent
        rng, rows = np.random.default_rng(0), self._num_rows
        self._state = self._agent.initial_state(rows)
        self._obs = rng.standard_normal((rows, self._agent.obs_dim), np.float32)
        self._noise = rng.standard_normal((rows, self._agent.action_dim), np.float32)

    def run(self, seconds: float) -> Slice:
        """Act."""

        def step() -> int:
            _, self._state = self._agent.act(self._state, self._obs, self._noise, False)
            return 1

        with threads():
            return timed(step, seconds)

    def close(self) -> None:
        """Nothing is open."""


def _collected(
    env_name: str, num_slots: int, target: float, pace: Pace, progress: Progress, title: str
) -> Outcome:
    work = f"{env_name}, {num_slots} slots, Memory agent"
    contenders: list[Contender] = [Collecting(env_name, num_slots), Collecting(env_name, 1)]
    rounds = Rounds(env_name, contenders, pace, progress, title)
    line = rounds.line(work, SEQUENTIAL, target, f"slots-{num_slots}", "slots-1")
    return Outcome([line], rounds.entries())


def ant_dir(pace: Pace, progress: Progress, title: str) -> Outcome:
    """A step takes about as long as an action."""
    return _collected("AntDir-v0", 8, 2.2, pace, progress, title)


def half_cheetah_vel(pace: Pace, progress: Progress, title: str) -> Outcome:
    """A step takes a quarter as long as an action."""
    return _collected("HalfCheetahVel-v0", 8, 2.5, pace, progress, title)


def point_robot(pace: Pace, progress: Progress, title: str) -> Outcome:
    """A step takes next to nothing."""
    return _collected("PointRobot-v0", 32, 7.0, pace, progress, title)


def pomdp_baselines(pace: Pace, progress: Progress, title: str) -> Outcome:
    """The collection that this one replaces."""
    work = "PointRobot-v0, 32 slots, Memory agent"
    contenders: list[Contender] = [Collecting("PointRobot-v0", 32), PomdpBaselines()]
    rounds = Rounds("PointRobot-v0, against pomdp-baselines", contenders, pace, progress, title)
    line = rounds.line(work, PomdpBaselines.label, 10.0, "slots-32", PomdpBaselines.key)
    return Outcome([line], rounds.entries())


def inference(pace: Pace, progress: Progress, title: str) -> Outcome:
    """What eight times the slots cost an action."""
    contenders: list[Contender] = [Acting(64), Acting(8)]
    rounds = Rounds("acting, GRU of 128 units", contenders, pace, progress, title)
    work, ceiling = "inference per step, 64 slots", Target(2.5, "x", is_ceiling=True)
    slices = rounds.slices
    ratios = tuple(
        few.steps / few.seconds / (many.steps / many.seconds)
        for few, many in zip(slices["rows-8"], slices["rows-64"], strict=True)
    )
    line = Line(work, "the same of 8 slots", ceiling, (statistics.median(ratios),), (ratios,))
    return Outcome([line], rounds.entries())


# ---- rows that learn -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetaTask:
    """A preset, and how its returns are scaled."""

    preset: str
    random: float
    """The return of an episode with random actions."""
    oracle: float
    """The same with the task known."""
    changes: tuple[str, ...] = ()

    def scaled(self, value: float) -> float:
        """0 for random actions, 1 with the task known."""
        return round((value - self.random) / (self.oracle - self.random), 4)


POINT_ROBOT = MetaTask("point_robot/rl2", -66.8, -5.18)
GRID_NAVI = MetaTask("grid_navi/rl2", -1.15, 11.07)
LEARNING_TASKS = {
    "point-robot-rl2": POINT_ROBOT,
    "grid-navi-rl2": GRID_NAVI,
}
"""By row."""


def point_robot_rl2(pace: Pace, progress: Progress, title: str) -> Outcome:
    """RL² finds a goal by its distance alone."""
    return _learned(POINT_ROBOT, {-1: Target(0.85, "")}, pace, progress, title)


def grid_navi_rl2(pace: Pace, progress: Progress, title: str) -> Outcome:
    """RL² searches first, and then remembers."""
    targets = {-1: Target(0.85, ""), 0: Target(0.45, "", is_ceiling=True)}
    return _learned(GRID_NAVI, targets, pace, progress, title)


ROWS: dict[str, Row] = {
    "ant-dir": ant_dir,
    "half-cheetah-vel": half_cheetah_vel,
    "point-robot": point_robot,
    "pomdp-baselines": pomdp_baselines,
    "inference": inference,
    "point-robot-rl2": point_robot_rl2,
    "grid-navi-rl2": grid_navi_rl2,
}

Points = list[tuple[int, list[float]]]
"""Environment steps, and the return of each episode of a trial."""


def _learned(
    task: MetaTask, targets: dict[int, Target], pace: Pace, progress: Progress, title: str
) -> Outcome:
    """A line for each episode that has a target, and the curves of all episodes."""
    num_iters = max(1, round(load_config(task.preset).train.num_iters * pace.part))
    asked = [(task, seed, num_iters) for seed in range(pace.seeds)]
    found: dict[int, Points] = {}
    work = f"{task.preset}, held-out tasks, {pace.seeds} seed{'s' if pace.seeds > 1 else ''}"
    try:
        with progress.bar(title, len(asked)) as bar:
            for place, points in in_fresh_processes(one_run, asked, pace.jobs):
                found[place] = points
                bar.note(f"seed {place}: {points[-1][1][-1]:.2f}")
                bar.advance()
    except EndedEarly as exc:
        target = next(iter(targets.values()))
        return Outcome([Line(work, "0 random, 1 oracle", target, (), failure=str(exc))])
    lines, curves = [], []
    for number in range(len(found[0][-1][1])):
        runs = {
            seed: tuple((steps, episodes[number], 0.0) for steps, episodes in found[seed])
            for seed in sorted(found)
        }
        curves.append(Curves(f"{task.preset}, episode {number + 1}", runs))
    for number, target in targets.items():
        last = curves[number].last
        what = f"{work}, {'last' if number == -1 else 'first'} episode, mean"
        lines.append(Line(what, "0 random, 1 oracle", target, (statistics.mean(last),), (last,)))
    return Outcome(lines, curves=curves)


def one_run(task: MetaTask, seed: int, num_iters: int) -> Points:
    """Train, and return every evaluation; the last one is of the last policy."""
    seen = _Evaluations(task)
    changes = [f"train.num_iters={num_iters}", "env.num_parallel_workers=1", *task.changes]
    config = load_config(task.preset, changes, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), seen)
    return seen.points


class _Evaluations(RunCallback):
    def __init__(self, task: MetaTask) -> None:
        self._task, self.points = task, Points()

    def evaluated(self, env_steps: int, evaluation: Evaluation) -> None:
        """Keep the return of each episode, scaled."""
        figures: dict[str, Any] = dict(evaluation.figures)
        episodes = [
            self._task.scaled(value)
            for name, value in figures.items()
            if name.startswith("metrics/return_eval_episode_") and not name.endswith("_sto")
        ]
        self.points.append((env_steps, episodes))
