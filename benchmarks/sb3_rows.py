"""The rows about Stable-Baselines3: contenders, comparisons and targets, by name in `ROWS`."""

from __future__ import annotations

from benchmarks import contenders as ways
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.sb3_contenders import (
    Learning,
    fleet_subproc,
    fleet_vec_env,
    grid_world,
    sb3_dummy,
)
from benchmarks.workload import Workload
from envfleet.observe.progress import Progress

SUBPROC, DUMMY = "SB3 SubprocVecEnv", "SB3 DummyVecEnv"
BETTER = "the better of SB3's two"


def sb3_many(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Many small environments for Stable-Baselines3: the cost of the vector environment counts."""
    work = Workload("CartPole-v1", 64)
    name = "SB3 adapter, SubprocVecEnv, CartPole-v1, 64 envs"
    decides = fleet_vec_env(work)
    contenders = [fleet_subproc(work), decides, sb3_dummy(work), ways.sb3_subproc(work)]
    rounds = Rounds(name, contenders, pace, progress, title)
    lines = [
        rounds.line(name, SUBPROC, 10.0, "subproc", "sb3"),
        rounds.line(name, DUMMY, 1.1, "subproc", "sb3-dummy"),
    ]
    return Outcome(lines, rounds.entries(), _plans(decides))


def sb3_few(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Few small environments: worker processes do not pay, and `FleetVecEnv` must notice."""
    work = Workload("CartPole-v1", 8)
    name = "SB3 adapter, FleetVecEnv, CartPole-v1, 8 envs"
    own = fleet_vec_env(work)
    contenders = [own, sb3_dummy(work), ways.sb3_subproc(work)]
    rounds = Rounds(name, contenders, pace, progress, title)
    line = rounds.line(name, BETTER, 0.95, "auto", ["sb3-dummy", "sb3"])
    return Outcome([line], rounds.entries(), _plans(own))


def sb3_ppo(pace: Pace, progress: Progress, title: str) -> Outcome:
    """PPO of Stable-Baselines3 from end to end: acting and learning are the same for both."""
    outcome = Outcome()
    for num_envs, target in ((64, 2.0), (8, 1.2)):
        work = Workload(grid_world, num_envs)
        name = f"SB3 PPO end to end, GridWorld, {num_envs} envs"
        own = fleet_vec_env(work)
        contenders = [Learning(own, work), Learning(ways.sb3_subproc(work), work)]
        rounds = Rounds(name, contenders, pace.scaled(rounds=1 / 5, seconds=8), progress, title)
        outcome.lines.append(rounds.line(name, f"the same with {SUBPROC}", target, "auto", "sb3"))
        outcome.entries += rounds.entries()
        outcome.notes += _plans(own)
    return outcome


def _plans(fleet: ways.Stepped) -> list[str]:
    return [] if fleet.envs is None else [f"auto chose: {fleet.envs.plan}"]


ROWS: dict[str, Row] = {"sb3-64": sb3_many, "sb3-8": sb3_few, "sb3-ppo": sb3_ppo}
