"""One turn of one environment: which actions count, and what they lead to.

    EpisodeRequest ─► TurnPlayer ─► environment ─► EpisodeStart
    TurnRequest    ─► TurnPlayer ─► environment ─► Turn

A turn is played next to its environment, in this process or in a worker, by the same code. A
request and its reply are all that travels; the environment stays where it is.

Law: an environment that raises ends its own episode with an `EpisodeFailure` and affects nothing
else.
"""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import gymnasium
import numpy as np

from envfleet.engine.backends.encoding import dumps
from envfleet.llm.extras import import_extra

State = str | list[Any]
"""What the model sees: text, or a list of images."""
IMAGE_MARK = "<images>"
"""Stands in a history's text for each image."""
_MAX_ERROR = 500
"""Characters of an exception's text that are kept."""
_IMMUTABLE = frozenset((bool, int, float, str, bytes, type(None)))
NOT_REPEATED = "it was lost, and its seed and actions do not bring it back ({})"
"""The error of an environment that does not come back; in the braces, what happened instead."""
ENV_ERRORS = (Exception, SystemExit)
"""What counts as the environment's own failure. KeyboardInterrupt does not: the user raised it."""


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """An environment raised, or was lost and could not be brought back."""

    doing: str
    error: str

    @classmethod
    def of(cls, doing: str, exc: BaseException) -> EpisodeFailure:
        """Describe an exception, in words that do not depend on the process it was raised in."""
        text = " ".join(str(exc).split())[:_MAX_ERROR]
        return cls(doing, f"{type(exc).__name__}: {text}" if text else type(exc).__name__)


@dataclass(slots=True)
class EpisodeStart:
    """How an episode begins."""

    state: State
    answer: Any = None
    """The correct answer, if the environment knows one."""
    failure: EpisodeFailure | None = None


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
    failure: EpisodeFailure | None = None
    is_success: bool = False


TurnReply = EpisodeStart | Turn


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """Asks an environment to begin an episode."""

    seed: int
    mode: str

    doing: ClassVar[str] = "reset"

    def execute(self, player: TurnPlayer) -> EpisodeStart:
        """Begin the episode."""
        return player.begin(self.seed, self.mode)

    def failed(self, failure: EpisodeFailure) -> EpisodeStart:
        """The reply of an environment that failed."""
        return EpisodeStart("", failure=failure)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Asks an environment to play a turn."""

    names: tuple[Any, ...]
    """The actions, by name."""
    num_left: int
    """How many actions the episode still allows."""

    doing: ClassVar[str] = "step"

    def execute(self, player: TurnPlayer) -> Turn:
        """Play the turn."""
        return player.play(self.names, self.num_left)

    def failed(self, failure: EpisodeFailure) -> Turn:
        """The reply of an environment that failed."""
        return Turn("", failure=failure)


Request = EpisodeRequest | TurnRequest


@dataclass(frozen=True, slots=True)
class EpisodeSoFar:
    """What brings a new environment to where another one stands."""

    seed: int
    mode: str
    turns: Sequence[tuple[Any, ...]]
    """The actions of each turn."""
    state: State
    """What it must show then."""


class TurnPlayer:
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
            answer = getattr(self.env, "correct_answer", None)
            return EpisodeStart(self._state(), _unchanging({"answer": answer})["answer"])
        except ENV_ERRORS as exc:
            return EpisodeStart("", failure=EpisodeFailure.of("reset", exc))

    def replay(self, episode: EpisodeSoFar) -> EpisodeFailure | None:
        """Play an episode again as far as it is known; a failure if it leads somewhere else."""
        start = self.begin(episode.seed, episode.mode)
        if start.failure is not None:
            return start.failure
        shown, problem = start.state, "it shows something else now"
        try:
            for actions in episode.turns:
                for action in actions:
                    self.env.step(action)
                shown = self._state()  # render may depend on when it was called last
            if is_same_state(shown, episode.state):
                return None
        except ENV_ERRORS as exc:
            problem = EpisodeFailure.of("step", exc).error
        return EpisodeFailure("step", NOT_REPEATED.format(problem))

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
            turn.failure, turn.is_done = EpisodeFailure.of("step", exc), True
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
    """The info, copied if it holds something that the environment could change later.

    It is pickled even if the environment lives in this process, so that an info which cannot reach
    another process fails alike everywhere.
    """
    if all(type(value) in _IMMUTABLE for value in info.values()):
        return info
    copy: Mapping[str, Any] = pickle.loads(dumps(info))
    return copy


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
