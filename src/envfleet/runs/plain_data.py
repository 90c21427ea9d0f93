"""Nested data and arrays as bytes that cannot run code when they are read. Pure.

``encode`` splits a state into three parts:

    tree     JSON: dicts, lists, tuples, strings, numbers, None, and places in the other two parts
    arrays   the bytes of numpy arrays, numpy scalars, PyTorch tensors and bytes, one after another
    objects  everything else (states of environments), to be pickled by the caller

``decode`` needs the first two only. Where an object belongs it puts what it is given for it, so a
reader who does not open pickles still gets all weights and numbers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["check_structure", "decode", "encode"]

_KIND = "!"
"""The key that marks a JSON object as something else than a dict."""


def encode(state: Any) -> tuple[bytes, list[bytes], list[Any]]:
    """A state as JSON, the bytes of its arrays, and the objects that are neither."""
    writer = _PlainDataWriter()
    tree = writer.tree(state)
    header = {"tree": tree, "arrays": writer.described}
    return json.dumps(header).encode(), writer.arrays, writer.objects


def decode(
    header: bytes,
    data: memoryview,
    *,
    objects: Callable[[int], Any],
    device: str = "cpu",
) -> Any:
    """The state that was encoded.

    Args:
        header: The JSON part.
        data: The arrays' bytes.
        objects: Gives the object with this number, or what stands for it.
        device: Where PyTorch tensors go.

    Raises:
        Exception: Of any type, if the bytes were not made by `encode`.
    """
    found = json.loads(header)
    reader = _PlainDataReader(found["arrays"], data, objects, device)
    return reader.value(found["tree"])


class _PlainDataWriter:
    def __init__(self) -> None:
        self.described: list[Any] = []
        """Of each array: kind, element type, shape, number of bytes."""
        self.arrays: list[bytes] = []
        self.objects: list[Any] = []

    def tree(self, value: Any) -> Any:
        match value:
            case None | bool():
                return value
            case np.ndarray() if not value.dtype.hasobject:
                return self._array("array", value)
            case np.generic() if not value.dtype.hasobject:
                return self._array("scalar", np.asarray(value))
            case bytes():
                return self._array("bytes", np.frombuffer(value, np.uint8))
            case dict() if all(type(key) is str for key in value) and _KIND not in value:
                return {key: self.tree(one) for key, one in value.items()}
        # subclasses (enums, named tuples) are kept as what they are, by pickle
        if type(value) in (str, int, float):
            return value
        if type(value) is list:
            return [self.tree(one) for one in value]
        if type(value) is tuple:
            return {_KIND: "tuple", "of": [self.tree(one) for one in value]}
        if type(value) is dict:
            pairs = [[self.tree(key), self.tree(one)] for key, one in value.items()]
            return {_KIND: "dict", "of": pairs}
        if _is_tensor(value):
            return self._tensor(value)
        self.objects.append(value)
        return {_KIND: "object", "at": len(self.objects) - 1}

    def _array(self, kind: str, array: Any) -> Any:
        descr = np.lib.format.dtype_to_descr(array.dtype)
        return self._add(kind, descr, list(array.shape), array.tobytes())

    def _tensor(self, tensor: Any) -> Any:
        import torch

        there = tensor.detach().cpu().contiguous()
        name = str(there.dtype).removeprefix("torch.")
        content = there.reshape(-1).view(torch.uint8).numpy().tobytes() if there.numel() else b""
        return self._add("tensor", name, list(there.shape), content)

    def _add(self, kind: str, dtype: Any, shape: list[int], content: bytes) -> Any:
        self.described.append([kind, dtype, shape, len(content)])
        self.arrays.append(content)
        return {_KIND: "data", "at": len(self.arrays) - 1}


class _PlainDataReader:
    def __init__(
        self, described: list[Any], data: memoryview, objects: Callable[[int], Any], device: str
    ) -> None:
        self._objects, self._device = objects, device
        self._arrays, end = list[Any](), 0
        for kind, dtype, shape, size in described:
            if type(size) is not int or not 0 <= size <= len(data) - end:
                raise ValueError(f"an array of {size} bytes")
            content = data[end : end + size]
            end += size
            self._arrays.append(self._array(kind, dtype, shape, content))
        if end != len(data):
            raise ValueError(f"{len(data) - end} bytes that belong to no array")

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(one) for one in tree]
        if not isinstance(tree, dict):
            return tree
        match tree.get(_KIND):
            case None:
                return {key: self.value(one) for key, one in tree.items()}
            case "tuple":
                return tuple(self.value(one) for one in tree["of"])
            case "dict":
                return {self.value(key): self.value(one) for key, one in tree["of"]}
            case "data":
                return self._arrays[_index(tree["at"])]
            case "object":
                return self._objects(_index(tree["at"]))
        raise ValueError(f"a value of kind {tree[_KIND]!r}")

    def _array(self, kind: str, dtype: Any, shape: list[int], content: memoryview) -> Any:
        if kind == "tensor":
            return self._tensor(dtype, shape, content)
        if isinstance(dtype, list):  # JSON has no tuples, and numpy describes records by them
            dtype = [tuple(_array_shape(part) for part in field) for field in dtype]
        numbers = np.frombuffer(content, np.lib.format.descr_to_dtype(dtype)).reshape(shape).copy()
        match kind:
            case "array":
                return numbers
            case "scalar":
                return numbers[()]
            case "bytes":
                return numbers.tobytes()
        raise ValueError(f"an array of kind {kind!r}")

    def _tensor(self, name: str, shape: list[int], content: memoryview) -> Any:
        import torch

        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a tensor of type {name!r}")
        if math.prod(shape) * dtype.itemsize != len(content):
            raise ValueError(f"a tensor of shape {shape} with {len(content)} bytes")
        empty = torch.empty(shape, dtype=dtype)
        if len(content):
            empty.copy_(torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape))
        return empty.to(self._device)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # a tensor cannot be there without it
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"number {number!r} of an array or object")
    return number


def _array_shape(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part


def check_structure(expected: Any, found: Any, where: str = "the state") -> None:
    """Refuse a state that is not built like `expected`: keys, types, shapes and element types.

    An expected None fits everything, and a whole number fits a float. Lists may have any length;
    each element is built like the first expected one.

    Raises:
        TypeError: The first place that differs is named.
    """
    if expected is None:
        return
    numpy = np.generic | np.ndarray
    if isinstance(expected, numpy) and isinstance(found, numpy):
        # what was an array without axes may have become a scalar
        expected, found = np.asarray(expected), np.asarray(found)
    if isinstance(expected, dict):
        if not isinstance(found, dict) or expected.keys() != found.keys():
            names = sorted(map(str, found)) if isinstance(found, dict) else _said(found)
            raise TypeError(f"{where} has {sorted(map(str, expected))}, not {names}")
        for key, one in expected.items():
            check_structure(one, found[key], f"{where}[{key!r}]")
    elif type(expected) in (list, tuple):
        is_fixed = type(expected) is tuple
        if type(found) is not type(expected) or (is_fixed and len(found) != len(expected)):
            raise TypeError(f"{where} is {_said(expected)}, not {_said(found)}")
        for number, one in enumerate(found):
            like = expected[number] if is_fixed else (*expected[:1], None)[0]
            check_structure(like, one, f"{where}[{number}]")
    elif _said(expected) != _said(found) and (type(expected), type(found)) != (float, int):
        raise TypeError(f"{where} is {_said(expected)}, not {_said(found)}")


def _said(value: Any) -> str:
    """A type as check_structure compares and names it; arrays with shape and element type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} of {tuple(value.shape)} {value.dtype}"
    return type(value).__name__
