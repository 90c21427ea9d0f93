"""What the layers of an environment hold, kept as bytes and put back into the same layers.

A layer is a wrapper, or the environment inside. The attributes of all layers are pickled together:
what two of them share they share afterwards too. A reference to a layer, or to one of the *parts*
of the environment that are put back by other means, is kept as such, and leads to the layer or part
that is there when it is put back. Tools are no state and stay as they are: windows, locks, files,
functions that were made on the spot. Whatever else cannot be pickled is an error: without it the
environment would not go on as it was.
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
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

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
"""Of these things those are state that can be pickled."""
_FIXED = (bool, int, float, complex, str, bytes, tuple, frozenset, np.generic, np.dtype, Enum)


def layers_of(env: Any) -> Iterator[Any]:
    """From the outermost wrapper to the environment inside."""
    while env is not env.unwrapped:
        yield env
        env = env.env
    yield env


def keep(env: Any, parts: Collection[str] | None = None) -> bytes:
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
                if isinstance(value, _CODE) or _room(value) in _WINDOWS:
                    try:
                        _dumps(value, layers[-1], links, views)
                    except Exception:
                        stay.add(name)
                        del own[name]
        return _dumps((kept, left, parts is None), layers[-1], links, views)


def put_back(env: Any, kept: bytes) -> None:
    """Give all layers of `env` the attributes they had."""
    layers = list(layers_of(env))
    attributes, left, is_inner_another_matter = _Unpickler(kept, layers).load()
    for layer, own, stay in zip(layers, attributes, left, strict=True):
        now = vars(layer)
        is_whole = layer is not layers[-1] or not is_inner_another_matter
        for name, value in list(now.items()):
            if name in stay or _stays(name, value):
                own.pop(name, None)
            elif _room(value) in _WINDOWS and own.get(name) is None:
                own.pop(name, None)  # opened since then
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
    """Whether an attribute is none of the state, whatever it is."""
    if name in _ARGUMENTS or isinstance(value, _TOOLS):
        return True
    if isinstance(value, types.FunctionType | type):
        return "<" in value.__qualname__
    kind = type(value)
    is_of_mujoco = _room(value) == "mujoco" and kind.__name__ not in ("MjData", "MjModel")
    return is_of_mujoco or kind.__module__ == _RENDERER


def _can_change(value: Any) -> bool:
    """Whether it makes a difference if something is this very object or one like it."""
    return value is not None and not isinstance(value, (*_FIXED, *_CODE))


def _room(value: Any) -> str:
    """The package that a thing is from."""
    return type(value).__module__.partition(".")[0]
