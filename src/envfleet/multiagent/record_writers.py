"""Fills the record of one slot with what a step of its environment brought.

Law: the record says the same whichever way it was written. `write` can do all of it. `write_all`
and `write_turn` are for steps in which no agent dies or is born, and take a fraction of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.errors import ConfigError
from envfleet.layout.fields import fit
from envfleet.multiagent.agent_records import FLAGS, AgentLayout, tree_of
from envfleet.multiagent.bare import MASK_KEY
from envfleet.multiagent.groups import Space
from envfleet.multiagent.turns import Outcome

Array = npt.NDArray[Any]
Leaf = tuple[tuple[Any, ...], Array, tuple[int, ...], "np.dtype[Any]", str]
"""An array of an observation: how to get it, where it goes, its shape, its type and its name."""
_NO_INFO: Mapping[str, Any] = {}


class RecordWriter:
    """Fills a slot's record; the same array again and again."""

    def __init__(self, layout: AgentLayout) -> None:
        self._layout = layout
        self.record = layout.observation_space.zeros()
        self._bind()

    def _bind(self) -> None:
        record, layout = self.record, self._layout
        self._flags = FlagWriter(record, len(layout.agents))
        self._writers: dict[Any, list[Leaf]] = _OfAgents()
        self._masks: dict[Any, Array] = {}
        for name, (number, place) in layout.places.items():
            space = layout.groups[number].observation_space
            field = record[f"observation{number}"]
            where = f"the observation of {name!r}"
            self._writers[name] = list(_leaves(space, field, place, (), where))
            if f"mask{number}" in layout.observation_space.fields:
                self._masks[name] = record[f"mask{number}"][place]
        self._action_fields = [f"action{number}" for number in range(len(layout.groups))]
        self._readers: dict[Any, tuple[int, int, Callable[[Any], Any]]] = _OfAgents()
        """Where an agent's action is, and what makes of it what the agent is given."""
        for name, (number, place) in layout.places.items():
            self._readers[name] = number, place, _record_reader(layout.groups[number].action_space)
        self._is_action_shared = layout.has_turns and layout.shared_action_space is not None
        self._forget()

    def _forget(self) -> None:
        """Take nothing for known of what the record says."""
        self._shown: list[Any] = []
        self._live: list[Any] = []
        self._live_set: set[Any] = set()
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
            self._live_set = set(self._live)
            self._alive = [name in self._live_set for name in names]
        self._flags.put(
            [rewards.get(name, 0.0) for name in names],
            _flags_of(names, outcome.terminated),
            _flags_of(names, outcome.truncated),
            self._alive,
            self._present,
            0 if turn is None else self._layout.number_of[turn],
        )
        return self.record

    def write_all(
        self, live: list[Any], seen: Mapping[Any, Any], rewards: Mapping[Any, Any], infos: Any
    ) -> Array | None:
        """Write a step that all living agents have survived; None if it is not that simple."""
        if live != self._live or seen.keys() != self._live_set or rewards.keys() != self._live_set:
            return None
        for name, value in seen.items():
            self._put(name, value, infos.get(name, _NO_INFO))
        self._shown, self._present = live, self._alive
        number_of = self._layout.number_of
        self._flags.put_all(
            self._alive, [(number_of[name], reward) for name, reward in rewards.items()]
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
        if info and MASK_KEY in info and name in self._masks:
            given = info[MASK_KEY]
            parts = given if isinstance(given, tuple | list) else [given]
            flat = np.concatenate([np.asarray(one, np.bool_).ravel() for one in parts])
            mask = self._masks[name]
            mask[...] = fit(flat, mask.shape, mask.dtype, f"the action mask of {name!r}")


class _OfAgents(dict[Any, Any]):
    """By agent; one that no one knew of is an error that says what to do."""

    def __missing__(self, name: Any) -> Any:
        raise ConfigError(
            f"the environment has an agent {name!r}, who is not among its possible_agents "
            f"{list(self)}: name all that there can be, or give seats= for agents that it makes up "
            "as it goes"
        )


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
        self._all_alive: list[bool] | None = None
        """Who is alive, if the record says so and that nothing else has happened."""
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
        self._all_alive = None
        self._rewards[:] = rewards
        new = (terminated or self._none, truncated or self._none, alive, present)
        for index, values in enumerate(new):
            if values != self._last[index]:  # they seldom change, and numpy is slow to write few
                self._flags[index][:] = values
                self._last[index] = values
        if self._turn is not None:
            self._turn[...] = turn

    def put_all(self, alive: list[bool], rewards: Sequence[tuple[int, float]]) -> None:
        """Write that those alive have got rewards, by their numbers, and live on."""
        if alive is not self._all_alive:
            self.put([0.0] * len(alive), None, None, alive, alive)
            self._all_alive = alive
        for number, reward in rewards:
            self._reward_of[number] = reward

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
        self._all_alive = None


def _flags_of(names: Sequence[Any], flags: Mapping[Any, bool]) -> list[bool] | None:
    if not any(flags.values()):
        return None
    return [bool(flags.get(name)) for name in names]


def _record_reader(space: Space) -> Callable[[Any], Any]:
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
