"""The rows of meta.py's table: collection of trials, and returns of meta-RL.

`ROWS` has all rows by name.
"""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks import meta_learning
from benchmarks.peer_pomdp import PomdpBaselines
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.tables import Line, Target
from benchmarks.workload import timed
from envfleet.cli.measure import Contender, Slice
from envfleet.learn.torch_setup import threads
from envfleet.meta import Learner
from envfleet.observe.progress import Progress

SEQUENTIAL = "collect_rollouts, one environment"
ROLLOUTS_PER_SLOT = 3
"""Of one call, as in the presets: 25 rollouts of an iteration on 8 workers."""


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
        """Collect some rollouts for every slot, again and again."""
        learner = self._learner
        assert learner is not None
        parallel = learner.train_env_parallel
        rollouts = ROLLOUTS_PER_SLOT * self._num_slots

        def step() -> int:
            return learner.collect_rollouts_parallel(rollouts, parallel_env=parallel)

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


ROWS: dict[str, Row] = {
    "ant-dir": ant_dir,
    "half-cheetah-vel": half_cheetah_vel,
    "point-robot": point_robot,
    "pomdp-baselines": pomdp_baselines,
    "inference": inference,
    **meta_learning.ROWS,
}
