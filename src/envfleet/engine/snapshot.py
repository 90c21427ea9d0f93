"""The state of one environment, taken and put back by the best way that environment offers.

In this order: the environment's own pair of state methods, MuJoCo's whole data, pickle, and where
none of these is possible a replay: the seed (or generator state) of the running episode and its
actions, driven through a new environment. A `Snapshot` says which way it was taken.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle
import gymnasium
import numpy as np

from envfleet.engine import layers
from envfleet.engine.apart import apart
from envfleet.engine.options import ResetPlan
from envfleet.errors import SnapshotError

Method = Literal["own", "mujoco", "pickle", "replay"]

_OWN_METHODS = (
    ("get_state", "set_state"),
    ("state_dict", "load_state_dict"),
    ("clone_state", "restore_state"),
)
_MUJOCO_PARTS = ("model", "data")


@dataclass(frozen=True, slots=True)
class OwnState:
    """Taken by the environment's own methods or MuJoCo's, plus what its layers hold beside."""

    method: Literal["own", "mujoco"]
    inner: bytes
    around: bytes


@dataclass(frozen=True, slots=True)
class Pickled:
    """The whole environment, wrappers included."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class Replay:
    """How to get there again: the start of the running episode and its actions."""

    seed: int | None
    options: Mapping[str, Any] | None
    rng: dict[str, Any] | None
    actions: Sequence[Any]


Taken = OwnState | Pickled | Replay | None
"""None: this environment can only be replayed; the fleet's journal knows how."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What the seeds of a slot's coming restarts follow from."""

    seed: int | None = None
    """The last one it was given."""
    restarts: int = 0
    pending: ResetPlan | None = None
    """How it begins again, if its environment has been replaced and not been reset yet."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One slot at one moment: enough to go on from there, in this fleet or in another one."""

    taken: OwnState | Pickled | Replay
    obs: Any
    state: int
    queued: tuple[ResetPlan, ...]
    lineage: Lineage = Lineage()

    @property
    def method(self) -> Method:
        """Which way it was taken: own, mujoco, pickle or replay."""
        if isinstance(self.taken, OwnState):
            return self.taken.method
        return "pickle" if isinstance(self.taken, Pickled) else "replay"


def take(env: Any) -> Taken:
    """The state of `env`, or None if only a replay will do."""
    inner = env.unwrapped
    pair = _own_methods(inner)
    try:
        if pair is not None:
            state = cloudpickle.dumps(_call_take(inner, pair[0]))
            return OwnState("own", state, layers.keep(env))
        if _is_mujoco(inner):
            return OwnState("mujoco", pickle.dumps(inner.data), layers.keep(env, _MUJOCO_PARTS))
        if any(isinstance(layer, gymnasium.utils.EzPickle) for layer in layers.layers_of(env)):
            return None  # pickling it works but gives back a freshly constructed environment
        return Pickled(cloudpickle.dumps(env))
    except Exception:  # whatever pickling an unknown environment raises, a replay is still possible
        return None


def put_back(env: Any, taken: OwnState | Pickled) -> Any:
    """Bring `env` to a state; returns what to go on with."""
    if isinstance(taken, Pickled):
        restored = pickle.loads(taken.blob)
        env.close()
        return restored
    inner = env.unwrapped
    if taken.method == "mujoco":
        import mujoco

        kept = pickle.loads(taken.inner)
        _write_model(inner.model, kept.model)
        mujoco.mj_copyData(inner.data, inner.model, kept)
    else:
        pair = _own_methods(inner)
        if pair is None:
            raise SnapshotError(f"{inner} has no method to take back its own state")
        getattr(inner, pair[1])(pickle.loads(taken.inner))
    layers.put_back(env, taken.around)
    return env


def drive(env: Any, replay: Replay) -> Any:
    """Reset a new environment as the episode began and take its actions again.

    Returns what it observes then.
    """
    obs, _ = begin(env, replay)
    for action in replay.actions:
        obs, *_ = env.step(apart(action))  # it may be changed there, and is needed again
    return obs


def are_alike(one: Any, other: Any) -> bool:
    """Whether two observations, read from rows, are the same to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic) and not one.dtype.hasobject:
        is_formed_alike = one.shape == other.shape and one.dtype == other.dtype
        if isinstance(one, np.void) and one.dtype.names is not None:
            # the bytes between its fields are no part of a record
            return is_formed_alike and all(are_alike(one[n], other[n]) for n in one.dtype.names)
        return bool(is_formed_alike and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(are_alike, one, other))
    # things that cannot be compared do not show that anything went wrong
    kind: Any = type(one)
    if kind.__eq__ is object.__eq__:
        return True
    try:
        return bool(one == other or (one != one and other != other))
    except Exception:
        return True


def begin(env: Any, replay: Replay) -> tuple[Any, dict[str, Any]]:
    """The reset that started the episode."""
    if replay.seed is None and replay.rng is not None:
        generator = np.random.PCG64()
        generator.state = replay.rng  # type: ignore[assignment]
        env.unwrapped.np_random = np.random.Generator(generator)
    return ResetPlan(replay.seed, replay.options).apply(env.reset)


def _own_methods(inner: Any) -> tuple[str, str] | None:
    for take_name, put_name in _OWN_METHODS:
        if callable(getattr(inner, take_name, None)) and callable(getattr(inner, put_name, None)):
            return take_name, put_name
    return None


def _call_take(inner: Any, name: str) -> Any:
    if name == "clone_state":  # ALE leaves its generator out unless asked
        try:
            return inner.clone_state(include_rng=True)
        except TypeError:
            pass
    return getattr(inner, name)()


def _write_model(model: Any, kept: Any) -> None:
    """Give a MuJoCo model the numbers it had: masses, frictions and the like may be drawn anew."""
    for name in dir(kept):
        numbers = None if name.startswith("_") else getattr(kept, name)
        if type(numbers) is np.ndarray and numbers.tobytes() != getattr(model, name).tobytes():
            getattr(model, name)[...] = numbers
    for name in dir(kept.opt):
        if not name.startswith("_"):
            number = getattr(kept.opt, name)
            if np.any(number != getattr(model.opt, name)):
                setattr(model.opt, name, number)


def _is_mujoco(inner: Any) -> bool:
    return type(getattr(inner, "data", None)).__name__ == "MjData" and hasattr(inner, "model")
