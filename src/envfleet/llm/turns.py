"""One turn of one environment: which actions count, and what they bring.

A turn is played next to its environment, here or in a worker, by the same code. What comes back is
all that anybody needs to know of it, so the environment itself never has to travel.

Law: an environment that raises ends its episode by a `Failure`; nothing else is touched by it.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np

State = str | list[Any]
"""What a player sees: text, or pictures."""
_MAX_ERROR = 500
"""Characters of an exception's text that are kept."""
_NEVER_CHANGE = frozenset((bool, int, float, str, bytes, type(None)))
ITS_OWN = (Exception, SystemExit)
"""What an environment is to blame for; Ctrl-C is somebody else's."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An environment raised, or could not be brought to an answer."""

    doing: str
    error: str

    @classmethod
    def of(cls, doing: str, exc: BaseException) -> Failure:
        """What went wrong, in words that do not depend on where it did."""
        said = " ".join(str(exc).split())[:_MAX_ERROR]
        return cls(doing, f"{type(exc).__name__}: {said}" if said else type(exc).__name__)


@dataclass(slots=True)
class Opening:
    """How an episode begins."""

    state: State
    answer: Any = None
    """What would have been right, where an environment knows."""
    failure: Failure | None = None

    def __deepcopy__(self, memo: object) -> Opening:
        """Itself: a fleet copies what it may be changed under, and this is nobody else's."""
        return self

    def __reduce__(self) -> tuple[type[Opening], tuple[Any, ...]]:
        """By its fields: a dataclass takes ten times as long to list them."""
        return Opening, (self.state, self.answer, self.failure)


@dataclass(slots=True)
class Turn:
    """What one turn brought."""

    state: State
    actions: list[Any] = field(default_factory=list)
    """As the environment got them, only those that were carried out."""
    num_valid: int = 0
    """How many of the named actions exist, carried out or not."""
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    failure: Failure | None = None
    is_success: bool = False

    def __deepcopy__(self, memo: object) -> Turn:
        """Itself, as an opening."""
        return self

    def __reduce__(self) -> tuple[type[Turn], tuple[Any, ...]]:
        """By its fields, as an opening."""
        values = (self.state, self.actions, self.num_valid, self.reward, self.info)
        return Turn, (*values, self.is_done, self.failure, self.is_success)


class Player:
    """Plays the episodes of one environment, turn by turn."""

    def __init__(self, env: Any) -> None:
        self.env = env
        reset = env.reset
        rest = "options" if isinstance(env, gymnasium.Env) else "mode"
        self._takes = _parameters(getattr(reset, "__func__", reset), rest)

    def begin(self, seed: int, mode: str) -> Opening:
        """Begin the episode of this seed."""
        asked: dict[str, Any] = {"seed": seed}
        if "mode" in self._takes:
            asked["mode"] = mode
        elif "options" in self._takes:
            asked["options"] = {"mode": mode}
        try:
            self.env.reset(**asked)
            return Opening(self._state(), getattr(self.env, "correct_answer", None))
        except ITS_OWN as exc:
            return Opening("", failure=Failure.of("reset", exc))

    def repeat(
        self, turns: Sequence[Sequence[Any]], shown: State, expected: State | None
    ) -> Failure | None:
        """Play turns whose answers are known; what went wrong if they do not lead there again.

        Args:
            turns: The actions of each.
            shown: What the environment shows before.
            expected: What it must show then, if that is known.
        """
        try:
            for actions in turns:
                for action in actions:
                    self.env.step(action)
                shown = self._state()  # it may show what is new since it was looked at last
            problem = "it shows something else now"
            if expected is None or is_same_state(shown, expected):
                return None
        except ITS_OWN as exc:
            problem = Failure.of("step", exc).error
        return Failure(
            "step", f"it was lost, and its seed and actions do not bring it back ({problem})"
        )

    def play(self, named: Sequence[Any], left: int) -> Turn:
        """Carry out the named actions, at most `left` of them, until the episode ends."""
        turn = Turn("")
        try:
            lookup = getattr(getattr(self.env, "config", None), "action_lookup", None)
            valid = known_actions(lookup, named)
            turn.num_valid = len(valid)
            for action in valid[: max(0, left)]:
                reward, turn.is_done, info = _outcome(self.env.step(action))
                turn.reward += reward
                turn.info.update(_snapshot(info))
                turn.actions.append(action)
                if turn.is_done:
                    break
            turn.is_success = bool(turn.info.get("success", False))
            turn.state = self._state()
        except ITS_OWN as exc:
            turn.failure, turn.is_done = Failure.of("step", exc), True
        return turn

    def _state(self) -> State:
        seen = self.env.render()
        if isinstance(seen, str):
            return seen
        pictures = seen if isinstance(seen, list | tuple) else [seen]
        for one in pictures:
            if not isinstance(one, np.ndarray) or one.dtype != np.uint8 or one.ndim not in (2, 3):
                raise TypeError(f"render() must give text or pictures of uint8, got {seen!r:.60}")
        return [one.copy() for one in pictures]  # an environment may draw into the same again


def is_same_state(one: State, other: State) -> bool:
    """Whether two states show the same."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def known_actions(lookup: Mapping[Any, str] | None, named: Sequence[Any]) -> list[Any]:
    """The actions of these names, without regard to case; without a lookup, the names themselves.

    What is no text is no name.
    """
    names = [name for name in named if isinstance(name, str)]
    if lookup is None:
        return names
    numbers_of = {name.lower(): number for number, name in lookup.items()}
    longest = max(map(len, numbers_of), default=0)
    return [
        numbers_of[name.lower()]
        for name in names
        if len(name) <= 4 * longest and name.lower() in numbers_of
    ]


def _snapshot(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """An info that stays as it is, whatever the environment does to its lists later."""
    if all(type(value) in _NEVER_CHANGE for value in info.values()):
        return info
    return deepcopy(info)


@lru_cache(maxsize=64)
def _parameters(function: Any, rest: str) -> frozenset[str]:
    """What a function can be told by name; `rest` too if it takes whatever it is told."""
    found = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in found.values())
    return frozenset(found) | ({rest} if takes_all and "options" not in found else set())


def _outcome(result: Any) -> tuple[float, bool, Mapping[str, Any]]:
    """Reward, end and info of a step in Gymnasium's form, or in the older one of four."""
    if len(result) == 5:
        _, reward, is_terminated, is_truncated, info = result
        is_done = bool(is_terminated) or bool(is_truncated)
    else:
        _, reward, is_done, info = result
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward must be a finite number, got {reward!r}")
    return number, bool(is_done), info or {}


def as_number(value: Any) -> float | None:
    """What a value of an info counts in a mean; None if it is no number."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, numbers.Real | np.bool_):
        with suppress(OverflowError):
            return float(value)
    return None
