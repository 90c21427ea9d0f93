"""The rows about what several agents learn: connect four by self-play, and a team.

`ROWS` has all rows by name. Each seed trains by the recipe of its environment, in a process of its
own, until it has made all steps or `MOST_S` seconds have passed. The last policy counts, not the
best one. Games against chance are played in both seats; a draw is no win.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fresh_process import EndedEarly, in_fresh_processes
from benchmarks.rounds import Outcome, Pace, Row
from benchmarks.tables import Line, Target
from envfleet.learn.agent_options import AgentOptions
from envfleet.learn.recipes import Recipe
from envfleet.learn.train_options import TrainOptions
from envfleet.multiagent.agent_recipes import AGENT_RECIPES
from envfleet.multiagent.agent_train import train_agents
from envfleet.multiagent.match import open_match
from envfleet.observe.progress import Progress
from envfleet.runs.callbacks import RunCallback

CONNECT_FOUR = "pettingzoo.classic.connect_four_v3:env"
SEEDS, MOST_S, GAMES = 3, 480.0, 400


class _UntilTime(RunCallback):
    """Stops a run after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._begun_s = seconds, time.monotonic()

    def begun(self, envs: Any, start_steps: int) -> None:
        """The time of building the environments does not count."""
        self._begun_s = time.monotonic()

    def should_stop(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() - self._begun_s > self._seconds


def one_run(env: str, recipe: Recipe, seed: int, part: float) -> tuple[float, int, float]:
    """Train, and play against chance: share of games won, steps made, seconds taken."""
    warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo's, about its own modules
    steps = max(1, round(recipe.total_steps * part))
    options = TrainOptions(
        env,
        n_envs=recipe.n_envs,
        total_steps=steps,
        seed=seed,
        device="cpu",
        # in a process that may have no children; every backend gives the same policy
        backend="serial",
        save_every=steps,
        eval_every=steps,
        eval_episodes=2,
        tensorboard=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        until = _UntilTime(MOST_S * part)
        made = train_agents(options, AgentOptions(), recipe.options, Path(folder), until)
        games = max(2, round(GAMES * min(1.0, 10 * part)))
        (pairing,) = open_match([folder, "random"]).play(games, backend="serial")
    return pairing.tally.win_rate, made.env_steps, made.seconds


def connect_four_self_play(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Games won against chance, of every seed."""
    recipe = AGENT_RECIPES[CONNECT_FOUR]
    seeds = max(pace.seeds, SEEDS) if pace.part == 1 else pace.seeds
    asked: Sequence[tuple[Any, ...]] = [
        (CONNECT_FOUR, recipe, seed, pace.part) for seed in range(seeds)
    ]
    work = f"connect four by self-play, {MOST_S * pace.part:g} s, {seeds} seeds, each"
    against = f"chance, both seats, share of {GAMES} games won"
    target = Target(0.9, "")
    found: dict[int, tuple[float, int, float]] = {}
    try:
        with progress.bar(title, len(asked)) as bar:
            for place, result in in_fresh_processes(one_run, asked, pace.jobs):
                found[place] = result
                bar.advance()
    except EndedEarly as exc:
        return Outcome([Line(work, against, target, (), failure=str(exc))])
    values = tuple(found[place][0] for place in sorted(found))
    notes = [
        f"connect four, seed {place}: {steps:,} turns in {seconds:.0f} s"
        for place, (_, steps, seconds) in sorted(found.items())
    ]
    return Outcome([Line(work, against, target, values, (values,))], notes=notes)


ROWS: dict[str, Row] = {"connect-four-self-play": connect_four_self_play}
