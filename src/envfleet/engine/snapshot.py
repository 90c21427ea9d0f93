"""The state of one environment, taken and put back by the best way that environment offers.

In this order: the environment's own pair of state methods, MuJoCo's whole data, pickle, and where
none of these is possible a replay: the seed (or generator state) of the running episode and its
actions, driven through a new environment. A `Snapshot` says which way it was taken.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
import socket
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from envfleet.engine import ale_state, mujoco_state
from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.options import ResetPlan
from envfleet.errors import SnapshotError

_GENERATOR = ("_np_random", "_np_random_seed")
_ARGUMENTS = {"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}
"""What Gymnasium keeps of how a layer was made."""
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    type(functools.lru_cache(len)),
)
_TOOLS = (
    EnvSpec,
    types.ModuleType,
    io.IOBase,
    logging.Logger,
    socket.socket,
    weakref.ref,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
    threading.Thread,
    threading.local,
)
_RENDERER = "gymnasium.envs.mujoco.mujoco_rendering"
_WINDOWS = {"OpenGL", "cv2", "glfw", "matplotlib", "moviepy", "pygame", "pyglet"}
"""Packages that open windows: of their objects only those that can be pickled are state."""
_FIXED = (bool, int, float, complex, str, bytes, tuple, frozenset, np.generic, np.dtype, Enum)


def layers_of(env: Any) -> Iterator[Any]:
    """The wrappers from the outermost on, then the environment inside."""
    while env is not env.unwrapped:
        yield env
        env = env.env
    yield env


def save_layers(env: Any, parts: Collection[str] | None = None) -> bytes:
    """The attributes of all layers of `env`.

    Args:
        env: Whose they are.
        parts: Attributes of the environment inside that are put back by other means. None: all
            but its generator are.
    """
    layers = list(layers_of(env))
    inner = vars(layers[-1])
    names = [name for name in inner if name not in _GENERATOR] if parts is None else parts
    links: dict[int, int | str] = {
        id(part): name for name in names if _can_change(part := getattr(layers[-1], name, None))
    }
    links |= {id(layer): index for index, layer in enumerate(layers)}
    views = () if parts is None else tuple(parts)
    kept, left = [], []
    for layer in layers:
        own = dict(vars(layer))
        if layer is layers[-1] and parts is None:
            own = {name: inner[name] for name in _GENERATOR if name in inner}
        stay = {name for name, value in own.items() if _stays(name, value)}
        kept.append({name: value for name, value in own.items() if name not in stay})
        left.append(stay)
    try:
        return _dumps((kept, left, parts is None), layers[-1], links, views)
    except Exception:
        for own, stay in zip(kept, left, strict=True):
            for name, value in list(own.items()):
                if isinstance(value, _CODE) or _package(value) in _WINDOWS:
                    try:
                        _dumps(value, layers[-1], links, views)
                    except Exception:
                        stay.add(name)
                        del own[name]
        return _dumps((kept, left, parts is None), layers[-1], links, views)


def load_layers(env: Any, kept: bytes) -> None:
    """Put the attributes of all layers of `env` back."""
    layers = list(layers_of(env))
    attributes, left, is_inner_another_matter = _Unpickler(kept, layers).load()
    for layer, own, stay in zip(layers, attributes, left, strict=True):
        now = vars(layer)
        is_whole = layer is not layers[-1] or not is_inner_another_matter
        for name, value in list(now.items()):
            if name in stay or _stays(name, value):
                own.pop(name, None)
            elif _package(value) in _WINDOWS and own.get(name) is None:
                own.pop(name, None)  # a window that was opened since then
            elif name not in own and is_whole:
                del now[name]
        now.update(own)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, file: io.BytesIO, inner: Any, links: dict[int, int | str], views: tuple[str, ...]
    ) -> None:
        super().__init__(file)
        self._inner, self._links, self._views = inner, links, views

    def persistent_id(self, obj: Any) -> Any:
        link = self._links.get(id(obj))
        if link is None and type(obj) is np.ndarray and obj.base is not None and self._views:
            return self._view(obj)
        if link is None and isinstance(obj, gymnasium.utils.EzPickle):
            raise pickle.PicklingError(f"{type(obj)} is pickled as it was when it was made")
        return link

    def _view(self, array: Any) -> tuple[Any, ...] | None:
        """Where in the memory of which part this array lies, if it does."""
        root = array
        while isinstance(root, np.ndarray) and root.base is not None:
            root = root.base
        if isinstance(root, np.ndarray):
            return None
        for part_name in self._views:
            part = getattr(self._inner, part_name)
            for name in dir(part):
                whole = None if name.startswith("_") else getattr(part, name, None)
                if type(whole) is np.ndarray and np.may_share_memory(array, whole):
                    offset = array.ctypes.data - whole.ctypes.data
                    return part_name, name, offset, array.shape, array.strides, array.dtype
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, layers: list[Any]) -> None:
        super().__init__(io.BytesIO(blob))
        self._layers = layers

    def persistent_load(self, link: Any) -> Any:
        inner = self._layers[-1]
        if isinstance(link, int):
            return self._layers[link]
        if isinstance(link, str):
            return getattr(inner, link)
        part_name, name, offset, shape, strides, dtype = link
        memory = getattr(getattr(inner, part_name), name)
        return np.ndarray(shape, dtype, memory, offset, strides)


def _dumps(value: Any, inner: Any, links: dict[int, int | str], views: tuple[str, ...]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, inner, links, views).dump(value)
    return file.getvalue()


def _stays(name: str, value: Any) -> bool:
    """Whether an attribute is not part of the state."""
    if name in _ARGUMENTS or isinstance(value, _TOOLS):
        return True
    if isinstance(value, types.FunctionType | type):
        return "<" in value.__qualname__
    kind = type(value)
    is_of_mujoco = _package(value) == "mujoco" and kind.__name__ not in ("MjData", "MjModel")
    return is_of_mujoco or kind.__module__ == _RENDERER


def _can_change(value: Any) -> bool:
    """Whether a copy of `value` could come to differ from it."""
    return value is not None and not isinstance(value, (*_FIXED, *_CODE))


def _package(value: Any) -> str:
    """The package that the type of `value` is from."""
    return type(value).__module__.partition(".")[0]


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
    kind: tuple[str, ...]
    """Of what environment, as `kind_of` says."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """The whole environment, wrappers included."""

    blob: bytes
    kind: tuple[str, ...]
    """Of what environment, as `kind_of` says."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How to get there again: the start of the running episode and its actions."""

    seed: int | None
    options: Mapping[str, Any] | None
    rng: dict[str, Any] | None
    actions: Sequence[Any]
    base: OwnState | Pickled | None = None
    """The state that the actions start from, if that is not the start of an episode."""


Taken = OwnState | Pickled | Replay | None
"""None: this environment can only be replayed; the fleet's action log knows how."""


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

    taken: Taken
    """None: a new environment, as it was built."""
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


def kind_of(env: Any) -> tuple[str, ...]:
    """What an environment is: its wrappers, itself, and what its observations look like."""
    names = [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers_of(env)]
    space = env.observation_space
    # not all of it: texts of spaces differ from process to process
    names[-1] += f" ({type(space).__name__}, {space.shape}, {space.dtype})"
    return tuple(names)


def take(env: Any) -> Taken:
    """The state of `env`, or None if only a replay will do."""
    inner = env.unwrapped
    pair = _own_methods(inner)
    try:
        if ale_state.has_sticky_actions(inner):
            sticky = ale_state.read_state(inner)
            if sticky is None:
                return None
            return OwnState("own", pickle.dumps(sticky), save_layers(env), kind_of(env))
        if pair is not None:
            state = cloudpickle.dumps(_call_take(inner, pair[0]))
            return OwnState("own", state, save_layers(env), kind_of(env))
        if mujoco_state.has_mujoco_data(inner):
            data, around = pickle.dumps(inner.data), save_layers(env, _MUJOCO_PARTS)
            return OwnState("mujoco", data, around, kind_of(env))
        return Pickled(_dumps(env, inner, {}, ()), kind_of(env))
    except Exception:  # pickling may raise anything; a replay is still possible
        return None


def put_back(env: Any, taken: OwnState | Pickled) -> Any:
    """Bring `env` to a state; returns what to go on with."""
    if taken.kind != (kind := kind_of(env)):
        raise SnapshotError(
            f"a snapshot of {' around '.join(taken.kind)} cannot be restored to a slot that holds "
            f"{' around '.join(kind)}; the environment and its wrappers must be the same"
        )
    if isinstance(taken, Pickled):
        restored = pickle.loads(taken.blob)
        env.close()
        return restored
    inner = env.unwrapped
    if taken.method == "mujoco":
        mujoco_state.write_state(inner, pickle.loads(taken.inner))
    elif ale_state.has_sticky_actions(inner):
        ale_state.write_state(inner, pickle.loads(taken.inner))
    else:
        pair = _own_methods(inner)
        if pair is None:
            raise SnapshotError(f"{inner} has no method to take back its own state")
        getattr(inner, pair[1])(pickle.loads(taken.inner))
    load_layers(env, taken.around)
    return env


def drive(
    env: Any,
    replay: Replay,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    at_step: Callable[[int], None],
) -> tuple[Any, Any]:
    """Bring a new environment to where a replay leads.

    Args:
        env: The environment.
        replay: How its episode began, and its actions.
        wrap: Wraps the environment's methods before they are called.
        at_step: Told the number of each action before it is taken, from 1.

    Returns:
        What to go on with, and what it observes; `UNSEEN` if that cannot be told.
    """
    obs: Any = UNSEEN
    if replay.base is None:
        obs, _ = begin(env, replay, wrap)
    else:
        env = put_back(env, replay.base)
    step = wrap(env.step)
    for number, action in enumerate(replay.actions, 1):
        at_step(number)
        obs, *_ = step(detached_copy(action))  # it may be changed there, and is needed again
    return env, obs


UNSEEN = object()
"""In the place of an observation."""


def are_alike(one: Any, other: Any) -> bool:
    """Whether two observations, read from rows, are the same to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic) and not one.dtype.hasobject:
        is_formed_alike = one.shape == other.shape and one.dtype == other.dtype
        if one.dtype.names is not None:
            # the bytes between its fields are no part of a record
            fields: Any = one
            names = one.dtype.names
            return is_formed_alike and all(are_alike(fields[n], other[n]) for n in names)
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


def begin(
    env: Any,
    replay: Replay,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda method: method,
) -> tuple[Any, dict[str, Any]]:
    """The reset that started the episode."""
    if replay.seed is None and ale_state.has_sticky_actions(env.unwrapped):
        raise SnapshotError(
            "an Atari game draws its sticky actions from a generator of its own, which only a "
            "reset with a seed sets: later episodes cannot be replayed. Use on_failure='restart', "
            "or build it with repeat_action_probability=0"
        )
    if replay.seed is None and replay.rng is not None:
        generator = np.random.PCG64()
        generator.state = replay.rng  # type: ignore[assignment]
        env.unwrapped.np_random = np.random.Generator(generator)
    return ResetPlan(replay.seed, replay.options).apply(wrap(env.reset))


def does_not_repeat(slot: int) -> SnapshotError:
    """The error of a replay that led elsewhere."""
    return SnapshotError(
        f"the environment of slot {slot} does not repeat itself: after the same reset and the same "
        "actions it observes something else. Let it draw everything random from its np_random, or "
        "give it the methods get_state and set_state"
    )


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
