"""From observations of any space to what networks take in.

A space is cut into leaves, each an array with one row per observation: numbers, pictures, choices.
A Dict's or an info's `action_mask` is no leaf: it says which choices are allowed. Nor is a part
without a number, which says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor, nn

from envfleet.errors import ConfigError

MASK = "action_mask"
"""The key of masks, in Dict observations and in infos."""

Array = npt.NDArray[Any]
Leaves = tuple[Array, ...]
Kind = Literal["numbers", "picture", "choices"]
_KEPT_AS: dict[Kind, type[np.generic]] = {
    "numbers": np.float32,
    "picture": np.uint8,
    "choices": np.int64,
}
_SMALLEST_PICTURE = 36
"""What the convolutions leave at least one pixel of."""
_MOST_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of an observation."""

    path: tuple[Any, ...]
    """Keys and indices that lead to it."""
    kind: Kind
    shape: tuple[int, ...]
    counts: tuple[int, ...] = ()
    """How many there are to choose from, by component."""
    starts: tuple[int, ...] = ()
    """What each component begins with."""
    is_channel_last: bool = False

    @property
    def dtype(self) -> type[np.generic]:
        """As which it is kept."""
        return _KEPT_AS[self.kind]


class Inputs:
    """How observations of one space are taken apart."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.leaves = tuple(leaf for leaf in _leaves(space, ()) if 0 not in leaf.shape)
        if not self.leaves:
            raise ConfigError(f"PPO has nothing to observe in {space}")
        self._is_single = self.leaves[0].path == ()
        self.has_masks = isinstance(space, spaces.Dict) and MASK in space.spaces

    def split(self, obs: Any) -> Leaves:
        """The leaves of a batch of observations, as they are kept."""
        if self._is_single:
            return (np.asarray(obs, self.leaves[0].dtype),)
        return tuple(np.asarray(_input_at(obs, leaf.path), leaf.dtype) for leaf in self.leaves)

    def keeps(self, batch: Array) -> bool:
        """Whether such observations are one leaf that is kept as it is."""
        return self._is_single and batch.dtype == self.leaves[0].dtype

    def refuse_outside(self, leaves: Leaves, slots: Sequence[int]) -> None:
        """Name the first choice that its space does not have, if there is one.

        Called after a network has failed: checking every batch would take too long.
        """
        for leaf, rows in zip(self.leaves, leaves, strict=True):
            if leaf.kind != "choices":
                continue
            found = rows.reshape(len(rows), len(leaf.counts)) - np.asarray(leaf.starts)
            outside = np.argwhere((found < 0) | (found >= np.asarray(leaf.counts)))
            for row, part in outside[:1].tolist():
                start, value = leaf.starts[part], int(found[row, part]) + leaf.starts[part]
                where = f" at {list(leaf.path)}" if leaf.path else ""
                raise ConfigError(
                    f"an observation of slot {slots[row]} is {value}{where}, and its space has "
                    f"{start} to {start + leaf.counts[part] - 1}; correct the environment, or its "
                    "observation_space"
                )

    def masks(self, obs: Any, infos: Mapping[str, Any]) -> npt.NDArray[np.bool_] | None:
        """Which actions are allowed, one row per observation; None if nothing is said of it."""
        if self.has_masks:
            return _joined(obs[MASK])
        said = infos.get(MASK)
        if said is None:
            return None
        are_there = np.asarray(infos.get(f"_{MASK}", np.ones(len(said))), np.bool_)
        if are_there.all() and isinstance(said, np.ndarray) and said.dtype != object:
            return said.astype(np.bool_)
        rows = [
            _joined(one)[0] if there else None for one, there in zip(said, are_there, strict=True)
        ]
        everything = np.ones(max(len(row) for row in rows if row is not None), np.bool_)
        return np.stack([everything if row is None else row for row in rows])


def _joined(mask: Any) -> npt.NDArray[np.bool_]:
    """Masks as rows; those of several choices, which come as a tuple, one behind the other."""
    if isinstance(mask, tuple):
        return np.concatenate([_joined(part) for part in mask], -1)
    return np.atleast_2d(np.asarray(mask)).astype(np.bool_)


def batch_of_one(obs: Any) -> Any:
    """A single observation as a batch."""
    if isinstance(obs, Mapping):
        return {key: batch_of_one(part) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(batch_of_one(part) for part in obs)
    return np.asarray(obs)[None]


def _input_at(obs: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _leaves(space: spaces.Space[Any], path: tuple[Any, ...]) -> Iterator[Leaf]:
    match space:
        case spaces.Dict():
            for key, part in space.spaces.items():
                if path or key != MASK:
                    yield from _leaves(part, (*path, key))
        case spaces.Tuple():
            for index, part in enumerate(space.spaces):
                yield from _leaves(part, (*path, index))
        case spaces.Discrete():
            yield Leaf(path, "choices", (), (int(space.n),), (int(space.start),))
        case spaces.MultiDiscrete():
            counts, starts = space.nvec.reshape(-1), space.start.reshape(-1)
            yield Leaf(path, "choices", space.shape, tuple(counts.tolist()), tuple(starts.tolist()))
        case spaces.Box() if _is_picture(space):
            yield Leaf(path, "picture", space.shape, is_channel_last=_is_channel_last(space.shape))
        case spaces.Box() | spaces.MultiBinary():
            yield Leaf(path, "numbers", space.shape)
        case _:
            where = f" at {list(path)}" if path else ""
            raise ConfigError(
                f"PPO observes Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of "
                f"these, not {space}{where}; wrap the environment to encode it"
            )


def _is_picture(space: spaces.Box) -> bool:
    if space.dtype != np.uint8 or len(space.shape) != 3:
        return False
    channels, *size = sorted(space.shape)
    return channels <= _MOST_CHANNELS and min(size) >= _SMALLEST_PICTURE


def _is_channel_last(shape: tuple[int, ...]) -> bool:
    return shape[-1] == min(shape)


class Encoder(nn.Module):
    """Leaves to one row of features per observation; only pictures have anything to learn."""

    def __init__(self, inputs: Inputs, *, features_per_picture: int = 512) -> None:
        super().__init__()
        self._leaves = inputs.leaves
        self.is_plain = len(self._leaves) == 1 and self._leaves[0].kind == "numbers"
        """Whether features are the numbers of one leaf."""
        self.eyes = nn.ModuleList(
            _eye(leaf, features_per_picture) for leaf in self._leaves if leaf.kind == "picture"
        )
        self.width = sum(_input_width(leaf, features_per_picture) for leaf in self._leaves)

    @property
    def learns(self) -> bool:
        """Whether it has parameters."""
        return bool(self.eyes)

    def forward(self, leaves: tuple[Tensor, ...]) -> Tensor:
        """Features, one row per observation."""
        if self.is_plain:
            return leaves[0].reshape(len(leaves[0]), -1)
        eyes = iter(self.eyes)
        return torch.cat(
            [
                _picture_features(tensor, leaf, next(eyes))
                if leaf.kind == "picture"
                else _number_features(tensor, leaf)
                for leaf, tensor in zip(self._leaves, leaves, strict=True)
            ],
            -1,
        )


def _input_width(leaf: Leaf, features_per_picture: int) -> int:
    if leaf.kind == "picture":
        return features_per_picture
    return sum(leaf.counts) if leaf.kind == "choices" else math.prod(leaf.shape)


def _picture_features(pixels: Tensor, leaf: Leaf, eye: nn.Module) -> Tensor:
    pictures = pixels.movedim(-1, 1) if leaf.is_channel_last else pixels
    features: Tensor = eye(pictures.to(torch.float32) / 255)
    return features


def _number_features(values: Tensor, leaf: Leaf) -> Tensor:
    if leaf.kind == "numbers":
        return values.reshape(len(values), -1)
    columns = torch.split(values.reshape(len(values), len(leaf.counts)), 1, -1)
    hot = [
        nn.functional.one_hot(column[:, 0] - start, count)
        for column, start, count in zip(columns, leaf.starts, leaf.counts, strict=True)
    ]
    return torch.cat(hot, -1).to(torch.float32)


def _eye(leaf: Leaf, features: int) -> nn.Module:
    """The convolutions that DQN made common for pictures of 84 by 84."""
    *size, channels = leaf.shape if leaf.is_channel_last else (*leaf.shape[1:], leaf.shape[0])
    layers = nn.Sequential(
        nn.Conv2d(channels, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1),
        nn.ReLU(),
        nn.Flatten(),
    )
    with torch.no_grad():
        flat = layers(torch.zeros(1, channels, *size)).shape[1]
    layers.extend((nn.Linear(flat, features), nn.ReLU()))
    return layers
