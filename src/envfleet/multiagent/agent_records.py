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

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from envfleet.multiagent.turns import Outcome

Array = npt.NDArray[Any]
Leaf = tuple[tuple[Any, ...], Array, tuple[int, ...], "np.dtype[Any]", str]
"""An array of an observation: how to get it, where it goes, its shape, its type and its name."""
_NO_INFO: Mapping[str, Any] = {}
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
            _fill(space, records[f"action{number}"], at, shape, values, where)
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


def _fill(
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
        _fill(parts[key], records[str(key)], at, axes, values[key], f"{where}[{key!r}]")


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


# ---- one slot -----------------------------------------------------------------------------------


class RecordWriter:
    """Fills a slot's record; the same array again and again."""

    def __init__(self, layout: AgentLayout) -> None:
        self._layout = layout
        self.record = layout.observation_space.zeros()
        self._bind()

    def _bind(self) -> None:
        record, layout = self.record, self._layout
        self._flags = FlagWriter(record, len(layout.agents))
        self._writers: dict[Any, list[Leaf]] = {}
        self._masks: dict[Any, Array] = {}
        for name, (number, place) in layout.places.items():
            space = layout.groups[number].observation_space
            field = record[f"observation{number}"]
            where = f"the observation of {name!r}"
            self._writers[name] = list(_leaves(space, field, place, (), where))
            if f"mask{number}" in layout.observation_space.fields:
                self._masks[name] = record[f"mask{number}"][place]
        self._action_fields = [f"action{number}" for number in range(len(layout.groups))]
        self._readers: dict[Any, tuple[int, int, Callable[[Any], Any]]] = {}
        """Where an agent's action is, and what makes of it what the agent is given."""
        for name, (number, place) in layout.places.items():
            self._readers[name] = number, place, _reader(layout.groups[number].action_space)
        self._is_action_shared = layout.has_turns and layout.shared_action_space is not None
        self._forget()

    def _forget(self) -> None:
        """Take nothing for known of what the record says."""
        self._shown: list[Any] = []
        self._live: list[Any] = []
        self._alive = self._present = [False] * len(self._layout.agents)
        self._flags.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"_layout": self._layout, "record": self.record, "_shown": self._shown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # arrays that were views of the record are pickled as arrays of their own
        self._layout, self.record = state["_layout"], state["record"]
        self._bind()
        self._shown = state["_shown"]
        self._present = [name in self._shown for name in self._layout.agents]

    def clear(self) -> None:
        """Forget everything, at the start of an episode."""
        self.record[...] = np.zeros((), self.record.dtype)
        for mask in self._masks.values():
            mask[:] = True
        self._forget()

    def write(self, outcome: Outcome, turn: Any = None) -> Array:
        """Write what a step brought and return the record."""
        names, rewards = self._layout.agents, outcome.rewards
        self._show(outcome.seen, outcome.infos)
        if outcome.live != self._live:
            self._live = list(outcome.live)
            live = set(self._live)
            self._alive = [name in live for name in names]
        self._flags.put(
            [rewards.get(name, 0.0) for name in names],
            _flags_of(names, outcome.terminated),
            _flags_of(names, outcome.truncated),
            self._alive,
            self._present,
            0 if turn is None else self._layout.number_of[turn],
        )
        return self.record

    def write_turn(
        self, live: list[Any], turn: Any, seen: Any, reward: float, info: Mapping[str, Any]
    ) -> Array:
        """Write what a turn brought to the agent that acts next; all others live on."""
        if live != self._live:
            outcome = Outcome(
                live=live, seen={turn: seen}, rewards={turn: reward}, infos={turn: dict(info)}
            )
            return self.write(outcome, turn)
        self._put(turn, seen, info)
        self._flags.put_turn(self._alive, self._layout.number_of[turn], reward)
        return self.record

    def actions_of(self, action: Any, names: Sequence[Any]) -> dict[Any, Any]:
        """The actions of these agents out of a slot's action."""
        rows = [action[field] for field in self._action_fields]
        actions = {}
        for name in names:
            number, place, read = self._readers[name]
            actions[name] = read(rows[number][place])
        return actions

    def action_of_turn(self, action: Any, name: Any) -> Any:
        """The action of the agent to act out of a slot's action."""
        number, _, read = self._readers[name]
        if not self._is_action_shared:
            return read(action[self._action_fields[number]])
        return int(action) if read is int else action

    def _show(self, seen: Mapping[Any, Any], infos: Mapping[Any, Any]) -> None:
        """Write what agents observe."""
        if self._shown != (shown := list(seen)):
            for name in () if self._layout.has_turns else self._shown:
                if name not in seen:
                    for _, view, *_ in self._writers[name]:
                        view[...] = 0
            self._shown = shown
            self._present = [name in seen for name in self._layout.agents]
        for name, value in seen.items():
            self._put(name, value, infos.get(name, _NO_INFO))

    def _put(self, name: Any, value: Any, info: Mapping[str, Any]) -> None:
        """Write what one agent observes and may do."""
        for path, view, shape, dtype, where in self._writers[name]:
            part = value
            for key in path:
                part = part[key]
            if type(part) is not np.ndarray or part.shape != shape or part.dtype != dtype:
                part = fit(part, shape, dtype, where)
            view[...] = part
        if MASK_KEY in info and name in self._masks:
            given = info[MASK_KEY]
            parts = given if isinstance(given, tuple | list) else [given]
            flat = np.concatenate([np.asarray(one, np.bool_).ravel() for one in parts])
            mask = self._masks[name]
            mask[...] = fit(flat, mask.shape, mask.dtype, f"the action mask of {name!r}")


class FlagWriter:
    """Fills what a record says about each agent apart from what it observes."""

    def __init__(self, record: Array, count: int) -> None:
        self._rewards = record["reward"]
        self._flags = [record[name] for name in FLAGS]
        self._turn = record["turn"] if "turn" in (record.dtype.names or ()) else None
        self._none: list[Any] = [False] * count
        # all of it lies together, at the end of the record; numpy is slow to write single numbers
        starts: Any = record.dtype.fields
        self._tail = record.reshape(1).view(np.uint8).data[starts["reward"][1] :]
        self._reward_of: Any = self._rewards.data
        self._tails: dict[int, bytes] = {}
        """The turn of an agent -> the tail of the record, but for its reward; see `put_turn`."""
        self._tails_alive: list[bool] = []
        self.forget()

    def put(
        self,
        rewards: Sequence[float],
        terminated: list[bool] | None,
        truncated: list[bool] | None,
        alive: list[bool],
        present: list[bool],
        turn: int = 0,
    ) -> None:
        """Write them all, by the numbers of the agents; None stands for no one."""
        if self._is_stale:
            self.forget()
        self._rewards[:] = rewards
        new = (terminated or self._none, truncated or self._none, alive, present)
        for index, values in enumerate(new):
            if values != self._last[index]:  # they seldom change, and numpy is slow to write few
                self._flags[index][:] = values
                self._last[index] = values
        if self._turn is not None:
            self._turn[...] = turn

    def put_turn(self, alive: list[bool], number: int, reward: float) -> None:
        """Write that this agent is to act and has earned a reward; those alive live on."""
        if alive is not self._tails_alive:
            self._tails, self._tails_alive = {}, alive
        tail = self._tails.get(number)
        if tail is None:
            count = len(alive)
            only = [other == number for other in range(count)]
            self.put([0.0] * count, None, None, alive, only, number)
            self._tails[number] = bytes(self._tail)
        else:
            self._tail[:] = tail
            self._is_stale = True
        self._reward_of[number] = reward

    def forget(self) -> None:
        """Write everything anew: the record was cleared, or written by `put_turn`."""
        self._last: list[list[Any]] = [[None] for _ in FLAGS]
        self._is_stale = False


def _flags_of(names: Sequence[Any], flags: Mapping[Any, bool]) -> list[bool] | None:
    if not any(flags.values()):
        return None
    return [bool(flags.get(name)) for name in names]


def _reader(space: Space) -> Callable[[Any], Any]:
    """What makes an agent's action of a part of a record."""
    if isinstance(space, spaces.Discrete):
        return int  # environments reckon with Python's numbers several times as fast
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return functools.partial(tree_of, space)
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _leaves(
    space: Space, field: Array, place: int, path: tuple[Any, ...], where: str
) -> Iterator[Leaf]:
    """The arrays of one agent's observation."""
    parts: Any = space.spaces if isinstance(space, spaces.Dict | spaces.Tuple) else None
    if parts is None:
        view = field[place, ...]
        yield path, view, view.shape, view.dtype, where
        return
    for key in parts if isinstance(parts, dict) else range(len(parts)):
        inner = f"{where}[{key!r}]"
        yield from _leaves(parts[key], field[str(key)], place, (*path, key), inner)
