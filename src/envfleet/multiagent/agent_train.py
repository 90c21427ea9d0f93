"""Self-play and teams as a run: `envfleet.runs` does the rest.

Where agents act in turn it is a game: the policies play against chance and against an earlier
checkpoint of their own, in every seat. Where they act at the same time it is a team: episodes are
played by all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.engine.incident import Incident
from envfleet.errors import CheckpointError, NothingCollected
from envfleet.learn.agent import Agent
from envfleet.learn.agent_options import AGENT_FREE, AGENT_JOB, AgentOptions
from envfleet.learn.environments import packages
from envfleet.learn.evaluate import EVALUATION_SEED
from envfleet.learn.options import PPOOptions
from envfleet.learn.torch_setup import usable_device
from envfleet.learn.train import MOST_LOST, PATIENCE_S, run_settings
from envfleet.learn.train_options import LENGTHS, TrainOptions
from envfleet.multiagent.agent_environments import AgentEnv, opened_agents
from envfleet.multiagent.agent_report import agent_page
from envfleet.multiagent.agent_trainer import AgentTrainer, joined
from envfleet.multiagent.filming import film_game
from envfleet.multiagent.games import (
    Game,
    Player,
    PolicyPlayer,
    RandomPlayer,
    Seating,
    Tally,
    all_seatings,
    in_turn,
    play_games,
)
from envfleet.observe.video import FilmedEpisode
from envfleet.runs.callbacks import Evaluation, RunCallback, RunOutcome
from envfleet.runs.checkpoint import load
from envfleet.runs.job import Iterated, Job, JobKind
from envfleet.runs.record import INCIDENTS_FILE
from envfleet.runs.run import run
from envfleet.runs.time_report import Setup

__all__ = ["AGENT_KIND", "AgentOptions", "train_agents"]

AGENT_KIND = JobKind(
    name=AGENT_JOB,
    options={"options": TrainOptions, "agents": AgentOptions, "ppo": PPOOptions},
    titles={"options": "Run", "agents": "Agents", "ppo": "PPO"},
    flags=("--no-recipe",),
    free=AGENT_FREE,
    lengths=LENGTHS,
    page=agent_page,
)


def train_agents(
    options: TrainOptions,
    agents: AgentOptions,
    ppo: PPOOptions,
    run_dir: Path,
    callback: RunCallback | None = None,
    *,
    is_resumed: bool = False,
    is_trusted: bool = False,
) -> RunOutcome:
    """Train in `run_dir`, from the start or from its newest checkpoint.

    The arguments are those of `learn.train.train`, and `agents`.
    """
    usable_device(options.device)
    run_dir = Path(run_dir)

    @contextmanager
    def open_job(is_wary: bool) -> Iterator[Job]:
        with opened_agents(options, agents, ppo, is_wary=is_wary) as (env, trainer):
            yield _AgentJob(options, agents, ppo, env, trainer, run_dir)

    return run(
        AGENT_KIND,
        {"options": options, "agents": agents, "ppo": ppo},
        run_settings(options, ppo),
        run_dir,
        open_job,
        callback,
        is_resumed=is_resumed,
        is_trusted=is_trusted,
    )


class _AgentJob(Job):
    """PPO for several agents on a fleet."""

    can_evaluate = True

    def __init__(
        self,
        options: TrainOptions,
        agents: AgentOptions,
        ppo: PPOOptions,
        env: AgentEnv,
        trainer: AgentTrainer,
        run_dir: Path,
    ) -> None:
        self._options, self._agents, self._ppo = options, agents, ppo
        self._env, self._trainer, self._run_dir = env, trainer, run_dir
        self.envs = trainer.vec
        self._lost_steps = 0
        """Steps in a row in which every environment failed."""

    @property
    def env_steps(self) -> int:  # type: ignore[override]
        return self._trainer.env_steps

    @property
    def packages(self) -> Sequence[str]:
        return [*packages(self._options.env), "pettingzoo"]

    @property
    def incidents(self) -> Sequence[Incident]:
        return self.envs.envs.incidents  # type: ignore[no-any-return]

    @property
    def seconds(self) -> Mapping[str, float]:
        return self._trainer.seconds

    @property
    def setup(self) -> Setup:
        return self._trainer.setup

    def state(self) -> dict[str, Any]:
        return self._trainer.state()

    def load(self, state: dict[str, Any]) -> None:
        self._trainer.load(state)

    @property
    def begins_anew(self) -> bool:  # type: ignore[override]
        return self._trainer.begins_anew

    def kept_by(self, state: dict[str, Any]) -> tuple[str, ...]:
        return tuple(sorted({one.method for one in state["slots"] or ()}))

    def iterate(self, progress: float) -> Iterated:
        trainer = self._trainer
        rollouts = trainer.collect()
        has_any = any(rollout.valid.any() for rollout in rollouts.values())
        made = self._ppo.n_steps * self._options.n_envs
        self._lost_steps = 0 if has_any or not self.incidents else self._lost_steps + made
        if self._lost_steps >= MOST_LOST:
            last = self.incidents[-1].reason
            raise NothingCollected(self._lost_steps, last, str(self._run_dir / INCIDENTS_FILE))
        figures = joined(trainer.learn(rollouts, progress)) | self._self_play()
        return Iterated(episodes=next(iter(rollouts.values())).episodes, figures=figures)

    def _self_play(self) -> dict[str, float | None]:
        """What became of the games that the policies played against themselves."""
        if self._env.form != "turns":
            return {}
        ended = np.array(self._trainer.ended_returns)
        if not len(ended):
            return {"first_agent_wins": None, "draws": None}
        best = ended == ended.max(1, keepdims=True)
        is_alone = best.sum(1) == 1
        return {
            "first_agent_wins": float((best[:, 0] & is_alone).mean()),
            "draws": float((~is_alone).mean()),
        }

    # ---- evaluation ------------------------------------------------------------------------------

    def evaluate(self, *, is_wary: bool, should_stop: Callable[[], bool]) -> Evaluation:
        me = self._player("this policy", self._trainer.agents)
        play = partial(self._play, is_wary=is_wary, should_stop=should_stop)
        count = len(self._env.agents)
        if self._env.form == "team":
            episodes = play([me], [(0,) * count], self._options.eval_episodes, opening=0)
            return Evaluation(tuple(float(np.mean(one.returns)) for one in episodes))
        opponent = RandomPlayer(self._env.action_spaces)
        seatings = all_seatings(count)
        games = play([me, opponent], seatings, self._options.eval_episodes)
        figures = _against("random", games, self._env.agents)
        if (found := self._earlier()) is not None:
            steps, earlier = found
            games_against = play([me, earlier], seatings, self._options.eval_episodes)
            figures |= _against("earlier", games_against) | {"earlier_steps": steps}
        returns = tuple(_mean_return(game) for game in games)
        return Evaluation(returns, figures=figures)

    def _play(
        self,
        players: Sequence[Player],
        seatings: Sequence[Seating],
        games: int,
        *,
        is_wary: bool,
        should_stop: Callable[[], bool],
        opening: int | None = None,
    ) -> list[Game]:
        options = self._options
        patience_s = PATIENCE_S if is_wary else None
        return play_games(
            partial(in_turn, self._env.env_fn),
            players,
            seatings,
            games,
            seed=EVALUATION_SEED,
            opening=self._agents.opening if opening is None else opening,
            max_turns=options.eval_max_steps,
            should_stop=should_stop,
            backend="process" if options.has_deadlines or is_wary else "serial",
            start_method=options.parallel_start_method,
            step_timeout_s=options.step_timeout_s or patience_s,
            reset_timeout_s=options.reset_timeout_s or patience_s,
        )

    def _player(self, name: str, policies: Mapping[Any, Agent]) -> PolicyPlayer:
        group_of = self._env.group_of
        return PolicyPlayer(name, {agent: policies[group_of[agent]] for agent in group_of})

    def _earlier(self) -> tuple[int, PolicyPlayer] | None:
        """The oldest checkpoint that is kept, as a player, and its steps."""
        for path in sorted(self._run_dir.glob("step_*.pt")):
            steps = int(path.stem.removeprefix("step_"))
            if steps >= self.env_steps:
                return None
            try:
                kept = load(path, trust="none")["job"]["policies"]
            except CheckpointError:
                continue  # damaged: resuming would warn of it, and others are there
            policies = {}
            for group in self._env.groups:
                mine = self._trainer.agents[group.name]
                spaces = group.observation_space, group.action_space
                policies[group.name] = Agent(*spaces, self._ppo, mine.device, 0)
                policies[group.name].load(kept[str(group.name)])
            return steps, self._player(path.stem, policies)
        return None

    def film(self, path: Path) -> FilmedEpisode:
        """Record a game that the policies play against themselves."""
        me = self._player("this policy", self._trainer.agents)
        drawn = partial(in_turn, partial(self._env.env_fn, render_mode="rgb_array"))
        seating = (0,) * len(self._env.agents)
        opening = self._agents.opening if self._env.form == "turns" else 0
        return film_game(drawn, [me], seating, path, seed=EVALUATION_SEED, opening=opening)


def _against(whom: str, games: Sequence[Game], agents: Sequence[Any] = ()) -> dict[str, Any]:
    """How the first player did, in all and in each seat where it sat alone."""
    tally = Tally.of(games, 0)
    figures: dict[str, Any] = {
        f"games_{whom}": tally.games,
        f"win_rate_{whom}": tally.win_rate,
        f"draw_rate_{whom}": tally.draws / tally.games,
    }
    for number, agent in enumerate(agents):
        seat = [game for game in games if game.seating[number] == 0 == game.seating.count(0) - 1]
        if seat:
            figures[f"win_rate_as_{agent}"] = Tally.of(seat, 0).win_rate
    return figures


def _mean_return(game: Game) -> float:
    """Of the agents that the first player played."""
    own = [value for who, value in zip(game.seating, game.returns, strict=True) if who == 0]
    return float(np.mean(own))
