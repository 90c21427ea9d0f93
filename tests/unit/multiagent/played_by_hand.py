"""Rows of experience made by hand: one environment at a time, with the actions of a collector."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.learn.agent import Agent
from envfleet.learn.inputs import batch_of_one
from envfleet.testing.values import snapshot as copied
from tests.unit.multiagent.by_hand import seeds_of


@dataclass
class Row:
    """From one turn of an agent to its next."""

    obs: Any
    action: Any
    reward: float = 0.0
    then: Any = None
    """What the agent saw next."""
    is_ended: bool = False
    is_terminated: bool = False


def turns_by_hand(env, seed, actions, num_turns):
    """An AEC environment for so many turns; the complete rows of each agent."""
    seeds, open_rows = seeds_of(seed), dict[Any, Row]()
    rows: dict[Any, list[Row]] = {name: [] for name in env.possible_agents}
    env.reset(seed=next(seeds))
    made = 0
    while True:
        name = env.agent_selection
        obs, reward, is_terminated, is_truncated, _ = env.last()
        if name in open_rows:
            row = open_rows.pop(name)
            row.reward, row.then = float(reward), copied(obs)
            row.is_ended, row.is_terminated = is_terminated or is_truncated, is_terminated
            rows[name].append(row)
        if is_terminated or is_truncated:
            env.step(None)
            if not env.agents:
                env.reset(seed=next(seeds))
                open_rows.clear()
        elif made == num_turns:
            return rows
        else:
            action = next(actions[name])
            open_rows[name] = Row(copied(obs), action)
            env.step(action)
            made += 1


def steps_by_hand(env, seed, actions, num_steps):
    """A Parallel environment for so many steps; the rows of each agent."""
    seeds = seeds_of(seed)
    rows: dict[Any, list[Row]] = {name: [] for name in env.possible_agents}
    seen, _ = env.reset(seed=next(seeds))
    for _ in range(num_steps):
        taken = {name: next(actions[name]) for name in env.agents}
        before = copied(seen)
        seen, rewards, terminated, truncated, _ = env.step(taken)
        for name, action in taken.items():
            is_ended = terminated[name] or truncated[name]
            then = copied(seen[name])
            row = Row(before[name], action, rewards[name], then, is_ended, terminated[name])
            rows[name].append(row)
        if not env.agents:
            seen, _ = env.reset(seed=next(seeds))
    return rows


@dataclass
class Collected:
    """The lanes of several rollouts, one behind the other."""

    trainer: Any
    rollouts: list[Any]

    def lane(self, slot, agent):
        """(experience, row, lane) of every complete row of an agent of a slot."""
        group, place = self._place(agent)
        number = slot * len(group.agents) + place
        return [
            (rollout[group.name], row, number)
            for rollout in self.rollouts
            for row in np.flatnonzero(rollout[group.name].valid[:, number])
        ]

    def actions(self, slot, agent):
        """What the agent did, complete or not, as the environment got it."""
        group, place = self._place(agent)
        policy: Agent = self.trainer.agents[group.name]
        drawn = [made.actions[row, lane] for made, row, lane in self.lane(slot, agent)]
        kept = self.trainer.state()["collector"]["lanes"][str(group.name)]
        lane = slot * len(group.agents) + place
        if kept["open"][lane]:
            drawn.append(kept["actions"][lane])
        return iter([policy.fit(np.asarray(one)[None])[0] for one in drawn])

    def worth(self, agent, obs):
        """What the agent's policy expects of an observation."""
        policy = self.trainer.agents[self._place(agent)[0].name]
        leaves = policy.tensors(policy.look(batch_of_one(obs)))
        return float(policy.policy.value(leaves, policy.fresh_states(1)).detach())

    def _place(self, agent):
        layout = self.trainer.vec.layout
        number, place = layout.places[agent]
        return layout.groups[number], place


def assert_rows_as_by_hand(collected, slot, rows):
    """Compare what was collected of a slot with rows made by hand."""
    for agent, expected in rows.items():
        lane = collected.lane(slot, agent)
        assert len(lane) == len(expected)
        policy = collected.trainer.agents[collected._place(agent)[0].name]
        for (made, at, number), row in zip(lane, expected, strict=True):
            for leaf, wanted in zip(made.obs, policy.look(batch_of_one(row.obs)), strict=True):
                np.testing.assert_array_equal(leaf[at, number], wanted[0])
            assert made.rewards[at, number] == np.float32(row.reward)
            assert made.ended[at, number] == row.is_ended
            then = 0.0 if row.is_terminated else collected.worth(agent, row.then)
            np.testing.assert_allclose(made.successors[at, number], then, atol=1e-5)
