"""Seats for agents that an environment names as it goes.

An agent that is born takes the first free seat and leaves it after the step in which it died. What
is known by seat has a fixed size; what an agent observes has not, because nothing is known of the
spaces of agents to come. So observations and actions of such agents travel as they are, pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.errors import ConfigError
from envfleet.layout import RecordSpace
from envfleet.multiagent.agent_records import flag_fields
from envfleet.multiagent.record_writers import FlagWriter
from envfleet.multiagent.turns import Outcome


class AnyValue(spaces.Space[Any]):
    """The space of all values; a fleet sends them as they are."""

    def __init__(self) -> None:
        super().__init__(None, None)

    @property
    def is_np_flattenable(self) -> bool:
        """False: a value has no fixed size."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> None:
        """None, which is a value."""

    def contains(self, x: Any) -> bool:
        """True."""
        return True

    def __eq__(self, other: object) -> bool:
        """Whether the other is the space of all values as well."""
        return isinstance(other, AnyValue)

    def __repr__(self) -> str:
        """The name."""
        return "AnyValue()"


@dataclass(frozen=True)
class SeatLayout:
    """A fixed number of seats, whose agents come and go."""

    num_seats: int
    has_turns: bool

    @property
    def agents(self) -> tuple[int, ...]:
        """The seats."""
        return tuple(range(self.num_seats))

    @property
    def records(self) -> RecordSpace:
        """What is known by seat."""
        return RecordSpace(flag_fields(self.num_seats, self.has_turns))

    @property
    def observation_space(self) -> spaces.Dict:
        """What is known by seat, and seat -> (name, observation) of agents that are present."""
        return spaces.Dict(record=self.records, seen=AnyValue())

    @property
    def action_space(self) -> AnyValue:
        """Seat -> action, or the action of the agent to act."""
        return AnyValue()


class SeatWriter:
    """Gives agents seats and fills a slot's observation."""

    def __init__(self, layout: SeatLayout) -> None:
        self._layout = layout
        self._record: npt.NDArray[Any] = layout.records.zeros()
        self._flags = FlagWriter(self._record, layout.num_seats)
        self.number_of: dict[Any, int] = {}
        """Agent -> its seat."""
        self._leaving: list[Any] = []
        """Agents that died in the last step."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_flags": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # its arrays were views of the record
        self._flags = FlagWriter(self._record, self._layout.num_seats)

    def clear(self) -> None:
        """Forget everything, at the start of an episode."""
        self._record[...] = np.zeros((), self._record.dtype)
        self._flags.forget()
        self.number_of, self._leaving = {}, []

    def write(self, outcome: Outcome, turn: Any = None) -> dict[str, Any]:
        """Write what a step brought and return the observation of the slot."""
        self._seat(outcome)
        count, live = self._layout.num_seats, set(outcome.live)
        rewards = [0.0] * count
        flags = [[False] * count for _ in range(4)]
        for name, number in self.number_of.items():
            rewards[number] = float(outcome.rewards.get(name, 0.0))
            flags[0][number] = bool(outcome.terminated.get(name))
            flags[1][number] = bool(outcome.truncated.get(name))
            flags[2][number] = name in live
            flags[3][number] = name in outcome.seen
        terminated, truncated, alive, present = flags
        number = 0 if turn is None else self.number_of[turn]
        self._flags.put(rewards, terminated, truncated, alive, present, number)
        seen = {self.number_of[name]: (name, value) for name, value in outcome.seen.items()}
        return {"record": self._record, "seen": seen}

    def write_all(self, live: list[Any], seen: Any, rewards: Any, infos: Any) -> None:
        """None: agents may have come, who need seats."""

    def write_turn(
        self, live: list[Any], turn: Any, seen: Any, reward: float, info: Any
    ) -> dict[str, Any]:
        """Write what a turn brought to the agent that acts next; all others live on."""
        return self.write(Outcome(live=live, seen={turn: seen}, rewards={turn: reward}), turn)

    def actions_of(self, action: Any, names: Sequence[Any]) -> dict[Any, Any]:
        """The actions of these agents out of a slot's action."""
        return {name: action[self.number_of[name]] for name in names}

    def action_of_turn(self, action: Any, name: Any) -> Any:
        """The action of the agent to act."""
        return action

    def _seat(self, outcome: Outcome) -> None:
        for name in self._leaving:
            self.number_of.pop(name, None)
        known = [*outcome.live, *outcome.seen, *outcome.rewards]
        for name in dict.fromkeys(known):
            if name not in self.number_of:
                free = set(range(self._layout.num_seats)).difference(self.number_of.values())
                if not free:
                    raise ConfigError(
                        f"{name} finds no free seat: {self._layout.num_seats} agents are there at "
                        "the same time already. Give more seats, seats="
                    )
                self.number_of[name] = min(free)
        live = set(outcome.live)
        self._leaving = [name for name in self.number_of if name not in live]
