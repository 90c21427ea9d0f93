"""The rows of ppo.py's table: what is learned, who is faster, and what the trainer costs.

The published returns are the RL zoo's, each of one trained policy: mean and deviation of its
episodes. What is reached here is a mean over seeds, and must lie no more than that deviation below;
better is welcome. The episodes of the zoo's Hopper hardly differ (a deviation of 10), which says
nothing about how far the policies of several seeds lie apart: there the deviation over seeds that
CleanRL publishes for Hopper, 272, is taken. `ROWS` names them all.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.apart import EndedEarly
from benchmarks.learning import Lesson, learn
from benchmarks.outcome import Outcome, Pace, Rounds, Row
from benchmarks.tables import Floor, Line
from benchmarks.trainers import FleetTraining, TakenApart, Training, sb3_ways
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
LESSONS = {
    "cartpole": Lesson("CartPole-v1", RECIPES["CartPole-v1"]),
    "acrobot": Lesson("Acrobot-v1", RECIPES["Acrobot-v1"]),
    "pendulum": Lesson("Pendulum-v1", RECIPES["Pendulum-v1"]),
    "mountaincar": Lesson("MountainCar-v0", RECIPES["MountainCar-v0"]),
    "halfcheetah": Lesson("HalfCheetah-v5", RECIPES["HalfCheetah-v5"]),
    "hopper": Lesson("Hopper-v5", RECIPES["Hopper-v5"]),
    "memory": Lesson("benchmarks.partial:CartPoleNoVel-v1", REMEMBERING),
}
"""By row; docs/ppo.md has for each the command that trains the same."""
LEAST_SEEDS = 5
"""Where every single seed must reach the figure, a few prove nothing."""
HALF_CHEETAH = Training(
    Workload("HalfCheetah-v5", 16),
    PPOOptions(n_steps=128, batch_size=512, n_epochs=10, learning_rate=3e-4),
)


def cartpole(pace: Pace, progress: Progress, title: str) -> Outcome:
    """The highest return there is, for every seed."""
    if pace.part == 1:
        pace = replace(pace, seeds=max(pace.seeds, LEAST_SEEDS))
    return _learned(
        LESSONS["cartpole"], "RL zoo, 500 ± 0", 500.0, pace, progress, title, is_for_each=True
    )


def acrobot(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Swing up two links, in few steps."""
    return _learned(LESSONS["acrobot"], "RL zoo, -73.5 ± 18", -73.5 - 18, pace, progress, title)


def pendulum(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Swing up and balance, by continuous actions."""
    return _learned(LESSONS["pendulum"], "RL zoo, -172 ± 104", -172.0 - 104, pace, progress, title)


def mountaincar(pace: Pace, progress: Progress, title: str) -> Outcome:
    """No reward tells the way: it has to be found."""
    return _learned(LESSONS["mountaincar"], "RL zoo, -110 ± 19", -110.0 - 19, pace, progress, title)


def halfcheetah(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Run, with six joints."""
    return _learned(
        LESSONS["halfcheetah"], "RL zoo, 5819 ± 664", 5819.0 - 664, pace, progress, title
    )


def hopper(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Hop on one leg without falling."""
    against = "RL zoo, 2410; ± 272 over CleanRL's seeds"
    return _learned(LESSONS["hopper"], against, 2410.0 - 272, pace, progress, title)


def memory(pace: Pace, progress: Progress, title: str) -> Outcome:
    """What an observation lacks has to be remembered: CartPole without its velocities."""
    return _learned(LESSONS["memory"], "RL zoo, 500 ± 0", 450.0, pace, progress, title)


def cartpole_speed(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Cheap environments and small minibatches: everything around the arithmetic shows."""
    return _raced(CARTPOLE, 3.0, pace, progress, title)


def halfcheetah_speed(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Environments that take as long as learning from them."""
    return _raced(HALF_CHEETAH, 1.7, pace, progress, title)


def overhead(pace: Pace, progress: Progress, title: str) -> Outcome:
    """What a trainer takes besides stepping, acting and learning."""
    trainers = [TakenApart(CARTPOLE), TakenApart(HALF_CHEETAH)]
    rounds = Rounds("iterations", trainers, pace, progress, title)
    ceiling = Floor(10.0, "%", is_ceiling=True)
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
    lesson: Lesson,
    against: str,
    floor: float,
    pace: Pace,
    progress: Progress,
    title: str,
    *,
    is_for_each: bool = False,
) -> Outcome:
    """A line for the mean over all seeds, or one value per seed, and the curves."""
    bound, work = Floor(floor, ""), lesson.title(pace.part)
    named = f"{work}, {pace.seeds} seed{'s' if pace.seeds > 1 else ''}"
    try:
        curves = learn(lesson, pace, progress, title)
    except EndedEarly as exc:
        return Outcome([Line(named, against, bound, (), failure=str(exc))])
    values = curves.last if is_for_each else (statistics.mean(curves.last),)
    said = f"{named}, {'each' if is_for_each else 'mean'}"
    return Outcome([Line(said, against, bound, values, (curves.last,))], curves=[curves])


def _raced(training: Training, floor: float, pace: Pace, progress: Progress, title: str) -> Outcome:
    """A line against the best of the ways SB3 can be run here."""
    own, others = FleetTraining(training), sb3_ways(training)
    rounds = Rounds(str(training), [own, *others], pace, progress, title)
    keys = [other.key for other in others]
    line = rounds.line(f"{training}", "SB3 PPO, its best way here", floor, own.key, keys)
    return Outcome([line], rounds.entries(), own.notes)
