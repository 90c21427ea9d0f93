"""One turn of one environment: which actions count, and what they lead to.

    TurnRequest ─► execute ─► EpisodePlayer ─► environment ─► EpisodeStart or Turn

A turn is played next to its environment, in this process or in a worker, by the same code. A
request and its reply are all that travels; the environment stays where it is.

Law: an environment that raises ends its own episode with an `EnvFailure` and affects nothing else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np

from envfleet.llm.extras import import_extra

State = str | list[Any]
"""What the model sees: text, or a list of images."""
IMAGE_MARK = "<images>"
"""Stands in a history's text for each image."""
_MAX_ERROR = 500
"""Characters of an exception's text that are kept."""
_IMMUTABLE = frozenset((bool, int, float, str, bytes, type(None)))
ENV_ERRORS = (Exception, SystemExit)
"""What counts as the environment's own failure. KeyboardInterrupt does not: the user raised it."""


@dataclass(frozen=True, slots=True)
class EnvFailure:
    """An environment raised, or was lost and could not be brought back."""

    doing: str
    error: str

    @classmethod
    def of(cls, doing: str, exc: BaseException) -> EnvFailure:
        """Describe an exception, in words that do not depend on the process it was raised in."""
        text = " ".join(str(exc).split())[:_MAX_ERROR]
        return cls(doing, f"{type(exc).__name__}: {text}" if text else type(exc).__name__)


@dataclass(slots=True)
class EpisodeStart:
    """How an episode begins."""

    state: State
    answer: Any = None
    """The correct answer, if the environment knows one."""
    failure: EnvFailure | None = None

    def __deepcopy__(self, memo: object) -> EpisodeStart:
        """Itself: the fleet copies what an environment returns, but nothing else holds this."""
        return self

    def __reduce__(self) -> tuple[type[EpisodeStart], tuple[Any, ...]]:
        """By its fields: pickle takes ten times as long to list those of a dataclass."""
        return EpisodeStart, (self.state, self.answer, self.failure)


@dataclass(slots=True)
class Turn:
    """What one turn led to."""

    state: State
    actions: list[Any] = field(default_factory=list)
    """The actions that were carried out, as the environment got them."""
    num_valid: int = 0
    """How many of the named actions exist, carried out or not."""
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    failure: EnvFailure | None = None
    is_success: bool = False

    def __deepcopy__(self, memo: object) -> Turn:
        """Itself, as for `EpisodeStart`."""
        return self

    def __reduce__(self) -> tuple[type[Turn], tuple[Any, ...]]:
        """By its fields, as for `EpisodeStart`."""
        values = (self.state, self.actions, self.num_valid, self.reward, self.info)
        return Turn, (*values, self.is_done, self.failure, self.is_success)


TurnReply = EpisodeStart | Turn
EpisodeSoFar = tuple[Sequence[tuple[Any, ...]], State]
"""The actions of each turn so far, and the state that the environment shows now."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an environment is asked to do."""

    seed: int
    mode: str
    is_new: bool = False
    """First begin the episode of this seed."""
    replay: tuple[tuple[Any, ...], ...] = ()
    """Then play these turns again, whose results are known: the actions of each."""
    names: tuple[Any, ...] | None = None
    """Then play a turn with these actions; None: no turn."""
    num_left: int = 0
    """How many actions the episode still allows."""
    expected: State | None = None
    """The state that the environment must show after `replay`, if known."""

    def __deepcopy__(self, memo: object) -> TurnRequest:
        """Itself: it is never changed."""
        return self

    def __reduce__(self) -> tuple[type[TurnRequest], tuple[Any, ...]]:
        """By its fields, as for `EpisodeStart`."""
        values = (self.seed, self.mode, self.is_new, self.replay, self.names, self.num_left)
        return TurnRequest, (*values, self.expected)

    def with_replay(self, so_far: EpisodeSoFar) -> TurnRequest:
        """The same request to an environment that was rebuilt and has to be brought back first."""
        if self.is_new:
            return self
        turns, state = so_far
        return replace(self, is_new=True, replay=tuple(turns), expected=state)

    def split(self) -> list[TurnRequest]:
        """One request each for the start, every replayed turn, and the turn to play.

        So each takes no longer than it did the first time, and the same deadline holds for it.
        """
        blank = TurnRequest(self.seed, self.mode)
        parts = [replace(blank, is_new=self.is_new)]
        parts += [replace(blank, replay=(turn,)) for turn in self.replay]
        parts[-1] = replace(parts[-1], expected=self.expected)
        if self.names is not None:
            parts.append(replace(blank, names=self.names, num_left=self.num_left))
        return parts

    def failed(self, failure: EnvFailure) -> TurnReply:
        """The reply to this request where the environment failed."""
        if self.names is None:
            return EpisodeStart("", failure=failure)
        return Turn("", failure=failure)


def execute(player: EpisodePlayer, request: TurnRequest) -> TurnReply:
    """Do what a request asks for."""
    start = EpisodeStart("")
    if request.is_new:
        start = player.begin(request.seed, request.mode)
        if start.failure is not None:
            return request.failed(start.failure)
    if request.replay or request.expected is not None:
        failure = player.replay(request.replay, start.state, request.expected)
        if failure is not None:
            return request.failed(failure)
    return start if request.names is None else player.play(request.names, request.num_left)


class EpisodePlayer:
    """Plays the episodes of one environment, turn by turn."""

    def __init__(self, env: Any) -> None:
        self.env = env
        reset = env.reset
        by_default = "options" if isinstance(env, gymnasium.Env) else "mode"
        self._accepts = _parameters(getattr(reset, "__func__", reset), by_default)

    def begin(self, seed: int, mode: str) -> EpisodeStart:
        """Begin the episode of this seed."""
        arguments: dict[str, Any] = {"seed": seed}
        if "mode" in self._accepts:
            arguments["mode"] = mode
        elif "options" in self._accepts:
            arguments["options"] = {"mode": mode}
        try:
            self.env.reset(**arguments)
            return EpisodeStart(self._state(), getattr(self.env, "correct_answer", None))
        except ENV_ERRORS as exc:
            return EpisodeStart("", failure=EnvFailure.of("reset", exc))

    def replay(
        self, turns: Sequence[Sequence[Any]], shown: State, expected: State | None
    ) -> EnvFailure | None:
        """Play turns again whose results are known; a failure if they lead somewhere else.

        Args:
            turns: The actions of each.
            shown: The state before.
            expected: The state that must be shown afterwards, if known.
        """
        try:
            for actions in turns:
                for action in actions:
                    self.env.step(action)
                shown = self._state()  # render may depend on when it was called last
            problem = "it shows something else now"
            if expected is None or is_same_state(shown, expected):
                return None
        except ENV_ERRORS as exc:
            problem = EnvFailure.of("step", exc).error
        return EnvFailure(
            "step", f"it was lost, and its seed and actions do not bring it back ({problem})"
        )

    def play(self, names: Sequence[Any], num_left: int) -> Turn:
        """Carry out the named actions, at most `num_left` of them, until the episode ends."""
        turn = Turn("")
        try:
            lookup = getattr(getattr(self.env, "config", None), "action_lookup", None)
            valid = known_actions(lookup, names)
            turn.num_valid = len(valid)
            for action in valid[: max(0, num_left)]:
                reward, turn.is_done, info = _step_result(self.env.step(action))
                turn.reward += reward
                turn.info.update(_unchanging(info))
                turn.actions.append(action)
                if turn.is_done:
                    break
            turn.is_success = bool(turn.info.get("success", False))
            turn.state = self._state()
        except ENV_ERRORS as exc:
            turn.failure, turn.is_done = EnvFailure.of("step", exc), True
        return turn

    def _state(self) -> State:
        shown = self.env.render()
        if isinstance(shown, str):
            return shown
        images = shown if isinstance(shown, list | tuple) else [shown]
        for one in images:
            if not isinstance(one, np.ndarray) or one.dtype != np.uint8 or one.ndim not in (2, 3):
                raise TypeError(f"render() must give text or pictures of uint8, got {shown!r:.60}")
        return [one.copy() for one in images]  # an environment may draw into the same array again


def history_state(state: State) -> dict[str, Any]:
    """The fields of a history entry that show a state: text, or a mark for each image."""
    if isinstance(state, str):
        return {"state": state}
    image = import_extra("PIL.Image", wanted_by="an image as a state", install="pip install pillow")
    images = [image.fromarray(pixels).convert("RGB") for pixels in state]
    return {"state": IMAGE_MARK * len(state), "images": images}


def is_same_state(one: State, other: State) -> bool:
    """Whether two states show the same."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def known_actions(lookup: Mapping[Any, str] | None, names: Sequence[Any]) -> list[Any]:
    """The actions with these names, ignoring case; without a lookup, the names themselves.

    A name that is not text names no action.
    """
    texts = [name for name in names if isinstance(name, str)]
    if lookup is None:
        return texts
    number_of = {name.lower(): number for number, name in lookup.items()}
    longest = max(map(len, number_of), default=0)
    return [
        number_of[name.lower()]
        for name in texts
        if len(name) <= 4 * longest and name.lower() in number_of
    ]


def _unchanging(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The info, copied if it holds something that the environment could change later."""
    if all(type(value) in _IMMUTABLE for value in info.values()):
        return info
    return deepcopy(info)


@lru_cache(maxsize=64)
def _parameters(function: Any, by_default: str) -> frozenset[str]:
    """Names of a function's parameters, with `by_default` for one that takes any keyword."""
    found = inspect.signature(function).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in found.values())
    return frozenset(found) | ({by_default} if takes_any and "options" not in found else set())


def _step_result(result: Any) -> tuple[float, bool, Mapping[str, Any]]:
    """Reward, end and info of a step, given as Gymnasium's five values or as the older four."""
    if len(result) == 5:
        _, reward, is_terminated, is_truncated, info = result
        is_done = bool(is_terminated) or bool(is_truncated)
    else:
        _, reward, is_done, info = result
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward must be a finite number, got {reward!r}")
    return number, bool(is_done), info or {}
