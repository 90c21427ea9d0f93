"""Both vectorisers in one form for learners: whose turn it is, and what a step brought.

A lane is one agent of one slot: number `slot * agents + place` among the lanes of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from envfleet.engine import Snapshot
from envfleet.multiagent.aec_vec import AECVecEnv, TurnBatch
from envfleet.multiagent.agent_fleet import AgentBatch
from envfleet.multiagent.agent_records import AgentLayout
from envfleet.multiagent.groups import Group
from envfleet.multiagent.parallel_vec import AsyncPettingZooVecEnv, ParallelBatch

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Wanted = Mapping[Any, tuple[Numbers, Array]]
"""Group -> the lanes that act, and their actions."""
ToAct = tuple[Numbers, Any, Flags | None]
"""The lanes that act next, what they observe, and what they may do if that is numbered."""


class Stepping(Protocol):
    """A fleet of environments with several agents, for a learner."""

    layout: Any
    envs: Any
    num_envs: int

    def begin(self, seed: int) -> AgentBatch:
        """Reset all slots."""

    def advance(self, wanted: Wanted) -> AgentBatch:
        """One step of every slot."""

    def to_act(self, batch: Any, group: Group) -> ToAct:
        """Who of a group acts next."""

    def last_seen(self, batch: Any, group: Group, lanes: Numbers) -> Any:
        """What agents observed last, in the lanes in which they died in this step."""

    def draws(self, group: Group, lanes: Numbers | None = None) -> Any:
        """How many draws a step needs for a group, or which of them are for these lanes."""

    def restore(self, snapshots: Sequence[Snapshot]) -> AgentBatch:
        """Bring all slots to these states."""


class TurnStepping(AECVecEnv):
    """Agents that act in turn: one lane of each slot acts."""

    def begin(self, seed: int) -> TurnBatch:
        """Reset all slots."""
        return self.reset(seed=seed)

    def advance(self, wanted: Wanted) -> TurnBatch:
        """One turn in every slot."""
        if len(self.groups) == 1:
            ((_, actions),) = wanted.values()
            return self.step(actions)
        return self.step({name: actions for name, (_, actions) in wanted.items()})

    def to_act(self, batch: TurnBatch, group: Group) -> ToAct:
        """Who of a group acts next."""
        assert isinstance(self.layout, AgentLayout)
        rows = batch.rows_of(group.name)
        places = self.layout.place_of[batch.turns[rows]]
        lanes = rows * len(group.agents) + places
        return lanes, batch.obs_of(group.name), batch.masks_of(group.name)

    def last_seen(self, batch: TurnBatch, group: Group, lanes: Numbers) -> Any:
        """What agents observed last."""
        slots, places = np.divmod(lanes, len(group.agents))
        each = [batch.final_obs_of(name) for name in group.agents]
        return _picked(each, slots, places)

    def draws(self, group: Group, lanes: Numbers | None = None) -> Any:
        """One draw for each slot."""
        return self.num_envs if lanes is None else lanes // len(group.agents)


class TeamStepping(AsyncPettingZooVecEnv):
    """Agents that act at the same time: all living lanes act."""

    def __init__(self, env_fns: Any, **options: Any) -> None:
        """Build the environments; options are those of `AgentFleet`."""
        super().__init__(env_fns, by_group=True, **options)

    def begin(self, seed: int) -> ParallelBatch:
        """Reset all slots."""
        self.reset(seed=seed)
        return self.last_batch

    def advance(self, wanted: Wanted) -> ParallelBatch:
        """One step of every slot."""
        actions = {}
        for name, (lanes, some) in wanted.items():
            count = len(self.groups[name])
            every = np.zeros((self.num_envs * count, *some.shape[1:]), some.dtype)
            every[lanes] = some
            actions[name] = every.reshape(self.num_envs, count, *some.shape[1:])
        self.send(actions)
        return self.recv()

    def to_act(self, batch: ParallelBatch, group: Group) -> ToAct:
        """Who of a group acts next."""
        lanes = np.flatnonzero(batch.alive[group.name])
        masks = batch.masks.get(group.name)
        allowed = None if masks is None else masks.reshape(-1, masks.shape[-1])[lanes]
        return lanes, _in_lanes(batch.obs[group.name], lanes), allowed

    def last_seen(self, batch: ParallelBatch, group: Group, lanes: Numbers) -> Any:
        """What agents observed last."""
        return _in_lanes(batch.final_obs[group.name], lanes)

    def draws(self, group: Group, lanes: Numbers | None = None) -> Any:
        """One draw for each lane."""
        return self.num_envs * len(group.agents) if lanes is None else lanes


def _in_lanes(tree: Any, lanes: Numbers) -> Any:
    """[slot, agent, ...] arrays as the rows of these lanes."""
    if isinstance(tree, dict):
        return {key: _in_lanes(part, lanes) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_in_lanes(part, lanes) for part in tree)
    return tree.reshape(-1, *tree.shape[2:])[lanes]


def _picked(each: Sequence[Any], slots: Numbers, places: Numbers) -> Any:
    """Of observations by agent, those of these agents in these slots."""
    first = each[0]
    if isinstance(first, dict):
        return {key: _picked([one[key] for one in each], slots, places) for key in first}
    if isinstance(first, tuple):
        return tuple(
            _picked([one[index] for one in each], slots, places) for index in range(len(first))
        )
    return np.stack(each)[places, slots]
