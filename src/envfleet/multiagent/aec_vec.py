"""Turn-based environments in parallel: each slot says whose turn it is and waits for that agent.

The slots of a batch may be at the turns of different agents. If all agents have the same spaces,
one policy acts on the whole batch; otherwise each group, or each agent, has its part of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.engine import Batch
from envfleet.errors import ActionError, ConfigError
from envfleet.multiagent.agent_fleet import AgentBatch, AgentFleet, Array, Bools, Floats
from envfleet.multiagent.agent_records import AgentLayout
from envfleet.multiagent.groups import Space
from envfleet.multiagent.seats import SeatLayout
from envfleet.multiagent.slot_envs import TurnSlot

Rows = npt.NDArray[np.intp]


class TurnBatch(AgentBatch):
    """Whose turn it is in some slots, and what the last turns brought.

    An agent gets its reward when its own turn comes: all of it since its last turn. An agent that
    died gets the rest at once. `all_rewards`, `all_terminated` and `all_truncated` are what was
    given out by this step, [slot, agent].
    """

    @cached_property
    def turns(self) -> Rows:
        """The number of the agent to act in each slot."""
        return self._now["turn"].astype(np.intp)

    @cached_property
    def agents(self) -> list[Any]:
        """The agent to act in each slot; with seats, its name."""
        if isinstance(self._layout, SeatLayout):
            return [seen[seat][0] for seen, seat in zip(self._seen, self.turns, strict=True)]
        return [self._layout.agents[number] for number in self.turns]

    @cached_property
    def rewards(self) -> Floats:
        """What the agent to act has earned since its last turn; 0 in a new episode."""
        return self._now["reward"][np.arange(len(self)), self.turns]

    @cached_property
    def obs(self) -> Any:
        """What the agents to act observe, if all agents have the same observation space.

        With seats: a list with one observation per slot.
        """
        layout = self._layout
        if isinstance(layout, SeatLayout):
            return [seen[seat][1] for seen, seat in zip(self._seen, self.turns, strict=True)]
        if not layout.is_observation_shared:
            raise ConfigError(
                "agents observe in different spaces, which are not one batch: use rows_of and "
                f"obs_of for each of {[group.name for group in layout.groups]}"
            )
        parts = [(self.rows_of(one.name), self.obs_of(one.name)) for one in layout.groups]
        return _merged(len(self), parts)

    @cached_property
    def masks(self) -> Bools:
        """What the agents to act may do, if all have the same numbered actions."""
        layout = self._layout
        if (
            isinstance(layout, SeatLayout)
            or layout.shared_action_space is None
            or not layout.groups[0].mask_width
        ):
            raise ConfigError(
                "agents do not all have the same numbered actions, so their masks are not one "
                "batch: use masks_of for each group (with seats, what the environment says)"
            )
        parts = [(self.rows_of(one.name), self.masks_of(one.name)) for one in layout.groups]
        masks: Bools = _merged(len(self), parts)
        return masks

    def rows_of(self, name: Any) -> Rows:
        """The rows in which it is the turn of this agent, or of an agent of this group."""
        numbers = self._members(name)[1]
        if len(numbers) == len(self._layout.agents):
            return np.arange(len(self))
        return np.flatnonzero(np.isin(self.turns, numbers))

    def obs_of(self, name: Any) -> Any:
        """What this agent, or the agents of this group, observe in those rows."""
        layout = self._layout
        assert isinstance(layout, AgentLayout)
        number, _ = self._members(name)
        return _picked(layout.observations(self._now, number), *self._where(name))

    def masks_of(self, name: Any) -> Bools | None:
        """What they may do; None if their actions are not numbered."""
        layout = self._layout
        assert isinstance(layout, AgentLayout)
        given = layout.masks(self._now, self._members(name)[0])
        return None if given is None else _picked(given, *self._where(name))

    def final_obs_of(self, agent: Any) -> Any:
        """What this agent observed last, for the rows in which it died or its episode ended.

        All rows are there; those where `all_present` is False for this agent mean nothing.
        """
        layout = self._layout
        assert isinstance(layout, AgentLayout)
        number, place = layout.places[agent]
        every = np.arange(len(self))
        return _picked(layout.observations(self._step, number), every, np.full(len(self), place))

    @cached_property
    def final_seen(self) -> list[dict[int, Any]]:
        """With seats: for each slot seat -> (name, observation) of those present in this step."""
        return list(self._last_seen)

    def _members(self, name: Any) -> tuple[int, tuple[int, ...]]:
        """The number of a group, and the numbers of the agents that are meant."""
        layout = self._layout
        if isinstance(layout, AgentLayout):
            for number, group in enumerate(layout.groups):
                if group.name == name:
                    return number, group.numbers
            if name in layout.places:
                return layout.places[name][0], (layout.number_of[name],)
        raise ConfigError(f"there is neither an agent nor a group {name!r}")

    def _where(self, name: Any) -> tuple[Rows, Rows]:
        """The rows of a group or agent, and who in its group acts there."""
        layout, rows = self._layout, self.rows_of(name)
        assert isinstance(layout, AgentLayout)
        return rows, layout.place_of[self.turns[rows]]


class AECVecEnv(AgentFleet):
    """Turn-based environments on a fleet.

    `reset`, `step` and `recv` return a `TurnBatch`; `step` and `send` take one action per slot, of
    the agent whose turn it is there. Dead agents are stepped where their environment lives.
    """

    _slot_kind = TurnSlot

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **options: Any) -> None:
        """Build the environments.

        Args:
            env_fns: One function per slot that builds its AEC environment.
            **options: Those of `AgentFleet`.
        """
        super().__init__(env_fns, **options)
        self._turns: Rows = np.zeros(self.num_envs, np.intp)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    ) -> TurnBatch:
        """Reset all slots; slot i gets `seed + i`, or the i-th of a list."""
        self.envs.fleet.drop()
        self.send_reset(seed=seed, options=options)
        return self.recv(slots=range(self.num_envs))

    def step(self, actions: Any) -> TurnBatch:
        """One turn in every slot."""
        return self._read(self.envs.fleet.step(self._actions(actions, None)))

    def send_reset(
        self, *, seed: Any = None, options: Any = None, slots: Sequence[int] | None = None
    ) -> None:
        """Start a reset of these slots (None: all)."""
        self.envs.send_reset(seed=seed, options=options, slots=slots)

    def send(self, actions: Any, slots: Sequence[int] | None = None) -> None:
        """Start a turn in these slots (None: all); actions are in their order.

        If agents act in different spaces, `actions` is a list with one action per slot, or a dict
        of group -> actions for the rows in which it is that group's turn, in their order.
        """
        self.envs.send(self._actions(actions, slots), slots)

    def recv(
        self,
        min_slots: int | None = None,
        timeout_s: float | None = None,
        slots: Sequence[int] | None = None,
    ) -> TurnBatch:
        """Wait for at least `min_slots` (None: all in flight) and return what is ready."""
        return self._read(self.envs.recv(min_slots, timeout_s, slots))

    @property
    def shared_action_space(self) -> Space | None:
        """The action space of all agents, if it is one."""
        return None if isinstance(self.layout, SeatLayout) else self.layout.shared_action_space

    def _read(self, found: Batch) -> TurnBatch:
        batch = TurnBatch(self.layout, found)
        self._turns[batch.slots] = batch.turns
        return batch

    def _actions(self, actions: Any, slots: Sequence[int] | None) -> Any:
        layout = self.layout
        if isinstance(layout, SeatLayout):
            return tuple(actions)
        if layout.shared_action_space is not None and not isinstance(actions, Mapping):
            return actions
        turns = self._turns if slots is None else self._turns[np.asarray(slots, np.intp)]
        each = self._one_each(actions, turns) if isinstance(actions, Mapping) else list(actions)
        if len(each) != len(turns):
            raise ActionError(f"{len(turns)} slots need {len(turns)} actions, got {len(each)}")
        if layout.shared_action_space is not None:
            return each
        records = np.zeros(len(turns), layout.action_space.dtype)
        for row, (turn, action) in enumerate(zip(turns.tolist(), each, strict=True)):
            layout.put_turn_action(records[row : row + 1], layout.agents[turn], action)
        return records

    def _one_each(self, actions: Mapping[Any, Any], turns: Rows) -> list[Any]:
        """Actions of groups as one action per row."""
        layout, each = self.layout, [None] * len(turns)
        assert isinstance(layout, AgentLayout)
        for group in layout.groups:
            rows = np.flatnonzero(np.isin(turns, group.numbers)).tolist()
            given = actions.get(group.name, ())
            if len(given) != len(rows):
                raise ActionError(
                    f"it is the turn of the group {group.name!r} in {len(rows)} slots, but it has "
                    f"{len(given)} actions"
                )
            for row, action in zip(rows, given, strict=True):
                each[row] = action
        return each


def _picked(tree: Any, rows: Rows, places: Rows) -> Any:
    """Of each row the part of one agent."""
    if isinstance(tree, dict):
        return {key: _picked(part, rows, places) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_picked(part, rows, places) for part in tree)
    return tree[rows, places]


def _merged(count: int, parts: list[tuple[Rows, Any]]) -> Any:
    """The rows of all parts as one batch."""
    first = parts[0][1]
    if isinstance(first, dict):
        return {key: _merged(count, [(rows, one[key]) for rows, one in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(
            _merged(count, [(rows, one[index]) for rows, one in parts])
            for index in range(len(first))
        )
    if len(parts) == 1:
        return first
    merged: Array = np.zeros((count, *first.shape[1:]), first.dtype)
    for rows, values in parts:
        merged[rows] = values
    return merged
