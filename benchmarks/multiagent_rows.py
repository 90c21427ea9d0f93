"""The rows about environments with several agents: contenders, comparisons and targets.

`ROWS` has all rows by name.
"""

from __future__ import annotations

import warnings

from benchmarks import grid_learning, multiagent_selfplay, sb3_rows
from benchmarks import multiagent_contenders as ways
from benchmarks.light_team import LightTeam
from benchmarks.limit import Limit
from benchmarks.peer_agilerl import AgileRL
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.tables import Line, Target
from benchmarks.workload import Workload
from envfleet.cli.measure import Contender
from envfleet.observe.progress import Progress


def light_team(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Three agents whose step takes about 1 us."""
    name = "light three-agent env, 32 envs, 2 workers"
    contenders: list[Contender] = [
        ways.team_on_fleet(LightTeam, 32),
        ways.supersuit_team(LightTeam, 32),
        AgileRL("benchmarks.light_team:LightTeam", 32),
    ]
    rounds = Rounds(name, contenders, pace, progress, title)
    lines = [
        rounds.line(name, AgileRL.label, 5.0, "step", "agilerl"),
        rounds.line(name, ways.SUPERSUIT, 2.5, "step", "supersuit"),
    ]
    return Outcome(lines, rounds.entries())


def simple_spread(pace: Pace, progress: Progress, title: str) -> Outcome:
    """MPE's three agents, whose own step takes about 265 us."""
    from mpe2 import simple_spread_v3

    make = simple_spread_v3.parallel_env
    name = "MPE simple_spread, 32 envs, 2 workers"
    contenders: list[Contender] = [
        ways.team_on_fleet(make, 32),
        Limit(Workload(lambda: ways.TeamAlone(make), 32, num_workers=2)),
        ways.supersuit_team(make, 32),
        AgileRL("mpe2.simple_spread_v3:parallel_env", 32),
    ]
    rounds = Rounds(name, contenders, pace, progress, title)
    lines = [
        rounds.line(name, AgileRL.label, 1.5, "step", "agilerl"),
        rounds.line(name, ways.SUPERSUIT, 1.1, "step", "supersuit"),
        rounds.line(name, "the limit", 0.85, "step", "limit"),
    ]
    return Outcome(lines, rounds.entries())


def connect_four(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Turns of a board game whose wrappers take half of its time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from pettingzoo.classic import connect_four_v3
    name = "connect four, 64 envs, 2 workers, turns"
    contenders: list[Contender] = [
        ways.games_on_fleet(connect_four_v3.env, 64),
        ways.game_in_a_loop(connect_four_v3.env),
    ]
    rounds = Rounds(name, contenders, pace, progress, title)
    return Outcome([rounds.line(name, ways.LOOP, 2.2, "step", "loop")], rounds.entries())


def grid_world(pace: Pace, progress: Progress, title: str) -> Outcome:
    """What PPO learns of the grid world, from chance (0) to the scripted player (1)."""
    steps = max(1, round(grid_learning.STEPS * pace.part))
    lowest, highest = grid_learning.random_return(), grid_learning.scripted_return()
    learned = grid_learning.learned_return(steps, seed=0)
    work = f"GridWorld, joint PPO of SB3, {steps:,} steps"
    against = "chance is 0, the scripted player is 1"
    score = (learned - lowest) / (highest - lowest)
    note = (
        f"{work}: {learned:.0f} per episode; {lowest:.0f} by chance, {highest:.0f} by the "
        "scripted player"
    )
    return Outcome([Line(work, against, Target(0.9, ""), (score,), ((score,),))], notes=[note])


ROWS: dict[str, Row] = {
    **sb3_rows.ROWS,
    "light-team": light_team,
    "simple-spread": simple_spread,
    "connect-four": connect_four,
    "grid-world": grid_world,
    **multiagent_selfplay.ROWS,
}
