"""The rows of ppo.py's table: returns, training speed, and the trainer's own time.

The published returns are the RL zoo's: mean and deviation over the episodes of one trained policy.
Here the mean over seeds must be at most that deviation below. The deviation of the zoo's Hopper is
10, because the episodes of that one policy hardly differ. It says nothing about other seeds, so
Hopper uses the deviation over seeds that CleanRL publishes, 272. `ROWS` has all rows by name.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.fresh_process import EndedEarly
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.tables import Line, Target
from benchmarks.trainers import FleetTraining, TrainerOverhead, Training, sb3_ways
from benchmarks.training_runs import TrainingTask, learn
from benchmarks.workload import Workload
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.recipes import RECIPES, Recipe
from envfleet.observe.progress import Progress

CARTPOLE = Training(Workload("CartPole-v1", 8), RECIPES["CartPole-v1"].options)
REMEMBERING = Recipe(
    8,
    100_000,
    PPOOptions(
        n_steps=128,
        batch_size=256,
        n_epochs=10,
        learning_rate=1e-3,
        anneal_clip_range=True,
        gamma=0.98,
        gae_lambda=0.8,
        normalise_obs=True,
        normalise_rewards=True,
        hidden=(64,),
        memory="lstm",
    ),
)
TRAINING_TASKS = {
    "cartpole": TrainingTask("CartPole-v1", RECIPES["CartPole-v1"]),
    "acrobot": TrainingTask("Acrobot-v1", RECIPES["Acrobot-v1"]),
    "pendulum": TrainingTask("Pendulum-v1", RECIPES["Pendulum-v1"]),
    "mountaincar": TrainingTask("MountainCar-v0", RECIPES["MountainCar-v0"]),
    "halfcheetah": TrainingTask("HalfCheetah-v5", RECIPES["HalfCheetah-v5"]),
    "hopper": TrainingTask("Hopper-v5", RECIPES["Hopper-v5"]),
    "memory": TrainingTask("benchmarks.cartpole_no_velocity:CartPoleNoVel-v1", REMEMBERING),
}
"""By row. docs/ppo.md has a command for each that trains the same."""
LEAST_SEEDS = 5
"""At least this many seeds where every single one must reach the target."""
HALF_CHEETAH = Training(
    Workload("HalfCheetah-v5", 16),
    PPOOptions(n_steps=128, batch_size=512, n_epochs=10, learning_rate=3e-4),
)


def cartpole(pace: Pace, progress: Progress, title: str) -> Outcome:
    """The highest possible return, with every seed."""
    if pace.part == 1:
        pace = replace(pace, seeds=max(pace.seeds, LEAST_SEEDS))
    return _learned(
        TRAINING_TASKS["cartpole"],
        "RL zoo, 500 ± 0",
        500.0,
        pace,
        progress,
        title,
        is_for_each=True,
    )


def acrobot(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Swing up two links in few steps."""
    return _learned(
        TRAINING_TASKS["acrobot"], "RL zoo, -73.5 ± 18", -73.5 - 18, pace, progress, title
    )


def pendulum(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Swing up and balance with continuous actions."""
    return _learned(
        TRAINING_TASKS["pendulum"], "RL zoo, -172 ± 104", -172.0 - 104, pace, progress, title
    )


def mountaincar(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Reach a goal that gives no reward on the way."""
    return _learned(
        TRAINING_TASKS["mountaincar"], "RL zoo, -110 ± 19", -110.0 - 19, pace, progress, title
    )


def halfcheetah(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Run with six joints."""
    return _learned(
        TRAINING_TASKS["halfcheetah"], "RL zoo, 5819 ± 664", 5819.0 - 664, pace, progress, title
    )


def hopper(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Hop on one leg without falling."""
    against = "RL zoo, 2410; ± 272 over CleanRL's seeds"
    return _learned(TRAINING_TASKS["hopper"], against, 2410.0 - 272, pace, progress, title)


def memory(pace: Pace, progress: Progress, title: str) -> Outcome:
    """CartPole without velocities, which needs a memory."""
    return _learned(TRAINING_TASKS["memory"], "RL zoo, 500 ± 0", 450.0, pace, progress, title)


def cartpole_speed(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Cheap environments and small minibatches, so that overhead matters most."""
    return _raced(CARTPOLE, 3.0, pace, progress, title)


def halfcheetah_speed(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Stepping takes about as long as learning."""
    return _raced(HALF_CHEETAH, 1.7, pace, progress, title)


def overhead(pace: Pace, progress: Progress, title: str) -> Outcome:
    """The trainer's time besides stepping, acting and learning."""
    trainers = [TrainerOverhead(CARTPOLE), TrainerOverhead(HALF_CHEETAH)]
    rounds = Rounds("iterations", trainers, pace, progress, title)
    ceiling = Target(10.0, "%", is_ceiling=True)
    against = "wall time, beyond fleet, acting and minibatches"
    lines = []
    for one in trainers:
        work, shares = f"{one.training}, what the trainer adds", tuple(one.percents_added)
        failure = rounds.failures.get(one.key)
        values = () if failure else (statistics.median(shares),)
        lines.append(Line(work, against, ceiling, values, (shares,), failure))
    return Outcome(lines)


ROWS: dict[str, Row] = {
    "cartpole": cartpole,
    "acrobot": acrobot,
    "pendulum": pendulum,
    "mountaincar": mountaincar,
    "halfcheetah": halfcheetah,
    "hopper": hopper,
    "memory": memory,
    "cartpole-speed": cartpole_speed,
    "halfcheetah-speed": halfcheetah_speed,
    "overhead": overhead,
}


def _learned(
    task: TrainingTask,
    against: str,
    target: float,
    pace: Pace,
    progress: Progress,
    title: str,
    *,
    is_for_each: bool = False,
) -> Outcome:
    """A line with the mean over all seeds, or with one value per seed, and the curves."""
    bound, work = Target(target, ""), task.title(pace.part)
    named = f"{work}, {pace.seeds} seed{'s' if pace.seeds > 1 else ''}"
    try:
        curves = learn(task, pace, progress, title)
    except EndedEarly as exc:
        return Outcome([Line(named, against, bound, (), failure=str(exc))])
    values = curves.last if is_for_each else (statistics.mean(curves.last),)
    said = f"{named}, {'each' if is_for_each else 'mean'}"
    return Outcome([Line(said, against, bound, values, (curves.last,))], curves=[curves])


def _raced(
    training: Training, target: float, pace: Pace, progress: Progress, title: str
) -> Outcome:
    """A line against SB3 in its fastest setup here."""
    own, others = FleetTraining(training), sb3_ways(training)
    rounds = Rounds(str(training), [own, *others], pace, progress, title)
    keys = [other.key for other in others]
    line = rounds.line(f"{training}", "SB3 PPO, its best way here", target, own.key, keys)
    return Outcome([line], rounds.entries(), own.notes)
