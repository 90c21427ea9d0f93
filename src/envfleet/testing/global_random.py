"""Finds environments that draw from random state which the whole process shares.

Such an environment gives another stream as soon as it shares a process with others. There are two
signs of it: the shared states changed while the environment ran, or its stream changed although
only those states were seeded differently. The states are left as they were found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from envfleet.testing.streams import (
    EnvLike,
    Streams,
    build_env,
    first_difference,
    hand_driven_stream,
    slot_actions,
)

_REMEDY = "draw from self.np_random instead, which reset(seed=...) seeds"


def uses_global_random(env: EnvLike, num_steps: int = 100, seed: int = 0) -> str | None:
    """Say in one sentence how an environment uses shared random state, or None if it does not.

    Args:
        env: the environment.
        num_steps: steps to watch it for; episodes that end are reset as usual.
        seed: seed of its first reset.
    """
    with untouched_states():
        moved, first = _watched(env, num_steps, seed, global_seed=1)
        if moved is not None:
            return moved
        _, again = _watched(env, num_steps, seed, global_seed=1)
        # an environment that differs from run to run by itself proves nothing about shared state
        if first_difference(first, again) is not None:
            return None
        _, other = _watched(env, num_steps, seed, global_seed=2)
        difference = first_difference(first, other)
    if difference is None:
        return None
    return (
        f"the stream depends on the global random state although nothing drew from it: in step "
        f"{difference.step} {difference.field} changes with np.random.seed and random.seed; "
        f"{_REMEDY}."
    )


def _watched(
    env: EnvLike, num_steps: int, seed: int, global_seed: int
) -> tuple[str | None, Streams]:
    np.random.seed(global_seed)
    random.seed(global_seed)
    before = shared_states()
    where: str | None = None

    def look(doing: str) -> str | None:
        for name, state in shared_states().items():
            if before[name] != state:
                return f"the environment draws from {name} in {doing}; {_REMEDY}."
        return None

    with closing(build_env(env)) as one:
        where = look("its constructor")
        events = []
        actions = slot_actions(one.action_space, 0)
        for event in hand_driven_stream(one, actions, num_steps, seed, "next_step"):
            events.append(event)
            doing = "reset" if event.kind == "reset" else "step"
            where = where or look(f"{doing}, first seen at step {event.step}")
    where = where or look("close")
    source = f"a run after np.random.seed({global_seed}) and random.seed({global_seed})"
    return where, Streams(source=source, autoreset="next_step", slots=(tuple(events),))


def shared_states() -> dict[str, Any]:
    """The random state that a whole process shares, by its name."""
    _, key, *place = np.random.get_state(legacy=True)
    return {
        "numpy's global state (np.random.*)": (np.asarray(key).tobytes(), *place),
        "Python's global state (random.*)": random.getstate(),
    }


@contextmanager
def untouched_states() -> Iterator[None]:
    """What happens inside leaves the random state that a process shares as it was."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
