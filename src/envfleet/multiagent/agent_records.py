"""What one slot with several agents sends and gets: one record each way.

    observation   "observation0", "observation1", ...   per group [agent of the group, ...]
                  "mask0", ...                          what each agent may do, if its info may say
                  "reward", "terminated", "truncated", "alive", "present"   by agent
                  "turn"                                whose turn it is, where agents take turns
    action        "action0", "action1", ...             per group [agent of the group, ...]

Where agents take turns, an action is one agent's: of the space that all share, or a record with one
place per group.

An agent is "present" in a step if the step says something about it, and "alive" if it may act next.
The observation of an agent that is not present is zero, or, where agents take turns, its last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envfleet.errors import ActionError, ConfigError
from envfleet.layout import RecordSpace, are_equal
from envfleet.layout.fields import fit
from envfleet.multiagent.bare import MASK_KEY
from envfleet.multiagent.groups import Group, Space

Array = npt.NDArray[Any]
FLAGS = ("terminated", "truncated", "alive", "present")


@dataclass(frozen=True)
class AgentLayout:
    """The agents of a slot and where each of them is in its records."""

    agents: tuple[Any, ...]
    groups: tuple[Group, ...]
    has_turns: bool

    @cached_property
    def places(self) -> dict[Any, tuple[int, int]]:
        """Agent -> the number of its group, and its own number in it."""
        return {
            name: (number, place)
            for number, group in enumerate(self.groups)
            for place, name in enumerate(group.agents)
        }

    @cached_property
    def number_of(self) -> dict[Any, int]:
        """Agent -> its number among all."""
        return {name: number for number, name in enumerate(self.agents)}

    @cached_property
    def place_of(self) -> npt.NDArray[np.intp]:
        """Number of an agent among all -> its number in its group."""
        return np.array([self.places[name][1] for name in self.agents], np.intp)

    @cached_property
    def is_observation_shared(self) -> bool:
        """Whether all agents observe in the same space."""
        first = self.groups[0].observation_space
        return all(are_equal(first, group.observation_space) for group in self.groups)

    @cached_property
    def observation_space(self) -> RecordSpace:
        """The space of a slot's observation."""
        fields: dict[str, Space] = {}
        for number, group in enumerate(self.groups):
            count = len(group.agents)
            fields[f"observation{number}"] = _record_of(group, "observation", count)
            if group.mask_width and not group.has_mask_in_observation:
                shape = (count, group.mask_width)
                fields[f"mask{number}"] = spaces.Box(0, 1, shape, np.bool_)
        return RecordSpace(fields | flag_fields(len(self.agents), self.has_turns))

    @cached_property
    def action_space(self) -> Space:
        """The space of a slot's action."""
        if self.has_turns:
            if (shared := self.shared_action_space) is not None:
                return shared
            forms = enumerate(self.groups)
            return RecordSpace({f"action{n}": _record_form(one.action_space) for n, one in forms})
        return RecordSpace(
            {
                f"action{number}": _record_of(group, "action", len(group.agents))
                for number, group in enumerate(self.groups)
            }
        )

    @cached_property
    def shared_action_space(self) -> Space | None:
        """The action space of all agents, if it is one."""
        first = self.groups[0].action_space
        alike = all(are_equal(first, group.action_space) for group in self.groups)
        return first if alike else None

    # ---- reading batches ------------------------------------------------------------------------

    def observations(self, records: Array, number: int) -> Any:
        """What a group observed: arrays [slot, agent of the group, ...], nested as its space is."""
        return tree_of(self.groups[number].observation_space, records[f"observation{number}"])

    def masks(self, records: Array, number: int) -> npt.NDArray[np.bool_] | None:
        """What each agent of a group may do, [slot, agent of the group, alternative]."""
        group = self.groups[number]
        if group.has_mask_in_observation:
            given = records[f"observation{number}"][MASK_KEY]
            return given.astype(np.bool_)
        return records[f"mask{number}"] if group.mask_width else None

    # ---- writing batches of actions -------------------------------------------------------------

    def put_action(self, records: Array, agent: Any, values: Any) -> None:
        """Put one agent's actions into the action records of all slots."""
        number, place = self.places[agent]
        self._put(records, number, (slice(None), place), (), values, f"the actions of {agent!r}")

    def put_group_action(self, records: Array, number: int, values: Any) -> None:
        """Put the actions of a group, [slot, agent of the group, ...], into the records."""
        group = self.groups[number]
        where = f"the actions of the group {group.name!r}"
        self._put(records, number, (slice(None),), (len(group.agents),), values, where)

    def put_turn_action(self, record: Array, agent: Any, action: Any) -> None:
        """Put the action of the agent to act into an array of one action record."""
        number, _ = self.places[agent]
        where = f"the action of {agent!r}"
        self._put(record, number, (0,), None, action, where)

    def _put(
        self, records: Array, number: int, at: tuple[Any, ...], axes: Any, values: Any, where: str
    ) -> None:
        space = self.groups[number].action_space
        shape = () if axes is None else (len(records), *axes)
        try:
            _fill_record(space, records[f"action{number}"], at, shape, values, where)
        except ValueError as exc:
            raise ActionError(f"{exc}; the space is {space}") from exc


def flag_fields(count: int, has_turns: bool) -> dict[str, Space]:
    """What is said about each of `count` agents apart from what it observes."""
    fields: dict[str, Space] = {"reward": spaces.Box(-np.inf, np.inf, (count,), np.float64)}
    flag: Any = np.bool_
    fields |= {name: spaces.Box(0, 1, (count,), flag) for name in FLAGS}
    return fields | ({"turn": spaces.Discrete(count)} if has_turns else {})


def tree_of(space: Space, records: Array) -> Any:
    """Records as what they stand for: dicts and tuples of arrays, or one array."""
    match space:
        case spaces.Dict():
            return {key: tree_of(part, records[key]) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(tree_of(part, records[str(i)]) for i, part in enumerate(space.spaces))
    return records


def _fill_record(
    space: Space,
    records: Array,
    at: tuple[Any, ...],
    axes: tuple[int, ...],
    values: Any,
    where: str,
) -> None:
    """Write batched values of a space into a part of an array of records."""
    parts: Any = space.spaces if isinstance(space, spaces.Dict | spaces.Tuple) else None
    if parts is None:
        records[at] = fit(values, (*axes, *(space.shape or ())), records.dtype, where)
        return
    for key in parts if isinstance(parts, dict) else range(len(parts)):
        _fill_record(parts[key], records[str(key)], at, axes, values[key], f"{where}[{key!r}]")


def _record_of(group: Group, kind: str, count: int) -> Space:
    try:
        return batch_space(_record_form(getattr(group, f"{kind}_space")), count)
    except TypeError as exc:
        raise ConfigError(
            f"the {kind}s of {group.name} cannot be part of a record: {exc}. Use Box, Discrete, "
            "MultiDiscrete, MultiBinary, or Dict and Tuple of these"
        ) from exc


def _record_form(space: Space) -> Space:
    match space:
        case spaces.Dict():
            return RecordSpace({key: _record_form(part) for key, part in space.spaces.items()})
        case spaces.Tuple():
            parts = enumerate(space.spaces)
            return RecordSpace({str(index): _record_form(part) for index, part in parts})
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return space
    raise TypeError(f"{space} has no fixed size")
