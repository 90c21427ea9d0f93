"""Games between players, many at once.

A player is a policy or chance. A seating says who plays which agent. Law: results follow from the
seed, the seatings and the number of games alone; backends and workers change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo.utils import parallel_to_aec

from envfleet.errors import ConfigError
from envfleet.learn.agent import Agent
from envfleet.learn.heads import Choices, make_head
from envfleet.learn.torch_setup import threads
from envfleet.multiagent.aec_vec import AECVecEnv, TurnBatch
from envfleet.runs.callbacks import EvaluationStopped

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]
Seating = tuple[int, ...]
"""Agent -> the number of the player that plays it."""

SLOTS = 32
"""Games that are played side by side. The results depend on it, so it is not an option."""
OPENING = 4
"""Turns at the start of a game that are drawn, unless the caller says otherwise."""


class Player(Protocol):
    """Chooses moves."""

    name: str

    def begin(self, num_slots: int, seed: int) -> None:
        """New games begin in all slots."""

    def choose(
        self, agent: Any, slots: Numbers, obs: Any, masks: Flags | None, is_drawn: Flags
    ) -> Array:
        """The moves of an agent in some slots.

        Args:
            agent: Whose turn it is there.
            slots: Where.
            obs: What it observes, one row per slot.
            masks: What it may do, if that is numbered.
            is_drawn: Where the move is to be drawn; elsewhere it is the likeliest.
        """

    def forget(self, slot: int) -> None:
        """A game is over, and another one begins."""


class RandomPlayer:
    """Plays any move that is allowed."""

    def __init__(
        self, action_spaces: Mapping[Any, spaces.Space[Any]], name: str = "random"
    ) -> None:
        """Play in these spaces, by agent."""
        self.name, self._spaces = name, deepcopy(dict(action_spaces))
        self._heads = {agent: make_head(space, 0.0) for agent, space in action_spaces.items()}
        self.begin(0, 0)

    def begin(self, num_slots: int, seed: int) -> None:
        """New games begin."""
        self._generator = torch.Generator().manual_seed(seed)
        for number, space in enumerate(self._spaces.values()):
            space.seed(seed + number)

    def choose(
        self, agent: Any, slots: Numbers, obs: Any, masks: Flags | None, is_drawn: Flags
    ) -> Array:
        """Any moves that are allowed."""
        space, head = self._spaces[agent], self._heads[agent]
        if not isinstance(head, Choices):
            return np.stack([space.sample() for _ in slots])
        alike = torch.zeros((len(slots), head.size))
        if masks is not None:
            alike = head.masked(alike, torch.from_numpy(np.ascontiguousarray(masks)))
        drawn: Array = head.sample(alike, head.noise((len(slots),), self._generator)).numpy()
        moves: Array = drawn + np.asarray(getattr(space, "start", 0), drawn.dtype)
        return moves

    def forget(self, slot: int) -> None:
        """There is nothing to forget."""


class PolicyPlayer:
    """Plays by policies: the likeliest moves, or drawn ones."""

    def __init__(self, name: str, policies: Mapping[Any, Agent]) -> None:
        """Play each agent by its policy."""
        self.name, self._policies = name, dict(policies)
        self.begin(0, 0)

    def begin(self, num_slots: int, seed: int) -> None:
        """New games begin."""
        self._generator = torch.Generator().manual_seed(seed)
        self._states = {
            agent: policy.fresh_states(num_slots) for agent, policy in self._policies.items()
        }

    @torch.inference_mode()
    def choose(
        self, agent: Any, slots: Numbers, obs: Any, masks: Flags | None, is_drawn: Flags
    ) -> Array:
        """What the policy says."""
        policy, states = self._policies[agent], self._states[agent]
        head = policy.policy.head
        allowed = None if masks is None else policy.tensor(np.ascontiguousarray(masks))
        leaves = policy.tensors(policy.look(obs))
        said, after = policy.policy.respond(leaves, states[slots], allowed)
        if policy.policy.state_size:
            self._states[agent] = states.index_copy(0, policy.tensor(slots), after)
        noise = head.noise((len(slots),), self._generator).to(said.device)
        chosen: Array = head.mode(said).cpu().numpy()
        if is_drawn.any():
            chosen = chosen.copy()
            chosen[is_drawn] = head.sample(said, noise).cpu().numpy()[is_drawn]
        moves: Array = policy.fit(chosen)
        return moves

    def forget(self, slot: int) -> None:
        """Forget what was remembered of the game that is over."""
        for agent, states in self._states.items():
            if states.shape[1]:
                self._states[agent] = states.clone()
                self._states[agent][slot] = 0.0


@dataclass(frozen=True, slots=True)
class Game:
    """One game that was played."""

    seating: Seating
    returns: tuple[float, ...]
    """What each agent got."""
    turns: int

    def margin(self, player: int) -> float:
        """By how much the agents of a player got more than the others, in the mean."""
        own = [
            value for who, value in zip(self.seating, self.returns, strict=True) if who == player
        ]
        others = [one for who, one in zip(self.seating, self.returns, strict=True) if who != player]
        return float(np.mean(own) - np.mean(others)) if own and others else 0.0


@dataclass(frozen=True, slots=True)
class Tally:
    """Wins, draws and losses of one player."""

    wins: int
    draws: int
    losses: int

    @classmethod
    def of(cls, games: Sequence[Game], player: int) -> Tally:
        """Count them."""
        margins = np.array([game.margin(player) for game in games])
        wins, losses = int((margins > 0).sum()), int((margins < 0).sum())
        return cls(wins, len(games) - wins - losses, losses)

    @property
    def games(self) -> int:
        """All of them."""
        return self.wins + self.draws + self.losses

    @property
    def win_rate(self) -> float:
        """The share of games that were won."""
        return self.wins / self.games

    @property
    def score(self) -> float:
        """Wins and half of the draws."""
        return self.wins + 0.5 * self.draws


def in_turn(env_fn: Callable[[], Any]) -> AECEnv[Any, Any, Any]:
    """Build an environment; if its agents act at the same time, they are asked in turn."""
    env = env_fn()
    return env if isinstance(env, AECEnv) else parallel_to_aec(env)


def all_seatings(num_agents: int, one: int = 0, other: int = 1) -> list[Seating]:
    """Every way to seat one player at one agent and the other player at the rest."""
    found = [
        tuple(alone if agent == seat else rest for agent in range(num_agents))
        for alone, rest in ((one, other), (other, one))
        for seat in range(num_agents)
    ]
    return list(dict.fromkeys(found))


def play_games(
    env_fn: Callable[[], Any],
    players: Sequence[Player],
    seatings: Sequence[Seating],
    games: int,
    *,
    seed: int,
    opening: int = OPENING,
    max_turns: int,
    should_stop: Callable[[], bool] = lambda: False,
    **fleet: Any,
) -> list[Game]:
    """Play this many games in all, the seatings taking turns.

    Args:
        env_fn: Builds an AEC environment.
        players: Who plays.
        seatings: Which player plays which agent.
        games: How many.
        seed: Of environments and of draws.
        opening: So many turns at the start of each game are drawn, so that games differ.
        max_turns: A game that takes longer is an error.
        should_stop: Asked before every turn; True raises `EvaluationStopped`.
        **fleet: Options of `AECVecEnv`.
    """
    num_slots = min(SLOTS, games)
    queues = [list(range(slot, games, num_slots)) for slot in range(num_slots)]
    played: dict[int, Game] = {}
    for number, player in enumerate(players):
        player.begin(num_slots, seed + number)
    with AECVecEnv([env_fn] * num_slots, copy=False, **fleet) as vec, threads():
        batch = vec.reset(seed=seed)
        returns = np.zeros((num_slots, vec.num_agents))
        turns = np.zeros(num_slots, np.intp)
        # slots whose games are all played go on, unseen, until the last one is done
        now = [queue.pop(0) for queue in queues]
        while len(played) < games:
            if should_stop():
                raise EvaluationStopped
            seated = np.array([seatings[number % len(seatings)] for number in now])
            batch = vec.step(_moves(vec, batch, players, seated, turns < opening))
            returns += batch.all_rewards
            turns += 1
            if turns.max() > max_turns:
                raise ConfigError(
                    f"a game has not ended after {max_turns:,} turns; give the environment a limit"
                )
            for slot in np.flatnonzero(batch.ended).tolist():
                number, taken = now[slot], tuple(returns[slot].tolist())
                if number not in played:
                    played[number] = Game(tuple(seated[slot].tolist()), taken, int(turns[slot]))
                now[slot] = queues[slot].pop(0) if queues[slot] else number
                returns[slot], turns[slot] = 0.0, 0
                for player in players:
                    player.forget(slot)
    return [played[number] for number in range(games)]


def _moves(
    vec: AECVecEnv, batch: TurnBatch, players: Sequence[Player], seated: Array, is_opening: Flags
) -> Any:
    """One move for each slot."""
    moves: list[Any] = [None] * len(batch)
    for number, agent in enumerate(vec.agents):
        rows = batch.rows_of(agent)
        if not len(rows):
            continue
        obs, masks = batch.obs_of(agent), batch.masks_of(agent)
        for player in np.unique(seated[rows, number]).tolist():
            mine = seated[rows, number] == player
            slots = rows[mine]
            allowed = None if masks is None else masks[mine]
            chosen = players[player].choose(
                agent, slots, _rows(obs, mine), allowed, is_opening[slots]
            )
            for slot, move in zip(slots.tolist(), chosen, strict=True):
                moves[slot] = move
    return moves if vec.shared_action_space is None else np.stack(moves)


def _rows(tree: Any, rows: Flags) -> Any:
    if isinstance(tree, dict):
        return {key: _rows(part, rows) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_rows(part, rows) for part in tree)
    return tree[rows]
