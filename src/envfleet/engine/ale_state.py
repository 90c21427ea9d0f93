"""The state of an Atari emulator with sticky actions: its own, and the action that is in effect.

A sticky action is repeated with some probability, and neither the emulator's state nor any of its
methods says which one that is. It is found by trying: up to the first moment at which the emulator
does not repeat, which its generator has decided already, it is all that the coming frames depend
on. So an action is the right one, or as good as it, if the emulator comes by it to the same state.
That is done in a child of this process, since it uses up the very action that is looked for.
"""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Iterator
from typing import Any

from envfleet.engine.child_trial import Say, in_child

_UNLIKELY = 1e-12
"""How likely it may be that an emulator repeats an action for the whole of `_patience`."""
_MOST_PATIENCE = 300
_NOOP = 0


def has_sticky_actions(env: Any) -> bool:
    """Whether this is an environment of ale-py that may repeat actions."""
    ale = getattr(env, "ale", None)
    return hasattr(ale, "cloneState") and _probability(ale) > 0


def read_state(env: Any) -> tuple[Any, int] | None:
    """The state of the emulator and the number of the action in effect; None if that is not known.

    The actions of continuous ones have strengths beside, of which there are too many to try.
    """
    ale = env.ale
    if getattr(env, "continuous", False) or _patience(ale) > _MOST_PATIENCE:
        return None
    heard = in_child(lambda say: _find(ale, say))
    if heard is None or not heard.said:
        return None
    return ale.cloneState(include_rng=True), heard.said[0]


def write_state(env: Any, kept: tuple[Any, int]) -> None:
    """Give the emulator this state and this action in effect."""
    state, number = kept
    _begin(env.ale, state, env.ale.getLegalActionSet()[number])


def _find(ale: Any, say: Say) -> None:
    """In the child: say the number of an action by which the same happens, frame by frame."""
    here = ale.cloneState(include_rng=True)
    wanted = list(_coming(ale))
    for number, action in enumerate(ale.getLegalActionSet()):
        _begin(ale, here, action)
        if all(map(operator.eq, wanted, _coming(ale))):
            say(bytes([number]))
            return


def _begin(ale: Any, state: Any, action: Any) -> None:
    """Bring the emulator to this state with this action in effect."""
    ale.restoreState(state)
    place = ale.cloneState(include_rng=False)
    for _ in range(_patience(ale)):
        ale.restoreState(place)  # so that the game does not end
        ale.act(action)
    ale.restoreState(state)


def _coming(ale: Any) -> Iterator[Any]:
    """What the emulator makes of pressing nothing: all frames, for they may part and meet again."""
    for _ in range(_patience(ale)):
        reward = ale.act(_NOOP)
        yield reward, pickle.dumps(ale.cloneState(include_rng=True))


def _patience(ale: Any) -> int:
    """After so many frames an action is in effect that was asked for."""
    probability = _probability(ale)
    return math.ceil(math.log(_UNLIKELY) / math.log(probability)) if probability < 1 else 10**9


def _probability(ale: Any) -> float:
    return float(ale.getFloat("repeat_action_probability"))
