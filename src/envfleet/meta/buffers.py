"""Replay of rollouts: each observation is stored once, and windows of rollouts are sampled.

A rollout is one trial: L steps, L + 1 observations. A window is T steps of it; one that is longer
than what is left of its rollout is masked from there on. Windows of one step are what agents
without memory learn from. A rollout of L steps has n = max(1, L - T + 1) places where a window may
start; each place is as likely as any other of the rollout, and the rollout itself has the weight
n + baseline. The oldest rollouts make room for new ones.

On disk it is a file that only grows: saving writes the rollouts added since the last time.

Shapes: T steps of B windows are [T, B, number].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.errors import CheckpointError, ConfigError
from envfleet.options import Count, NotNegative, check
from envfleet.runs.growing_file import GrowingFile

__all__ = ["ReplayBuffer", "Rollout", "Windows"]

Array = npt.NDArray[np.float32]
FILE_NAME = "replay.bin"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trial."""

    obs: npt.NDArray[Any]
    """[L + 1, number], the last of them after the last step."""
    actions: npt.NDArray[Any]
    """[L, number], or the numbers of discrete actions, [L] or [L, 1]."""
    rewards: npt.NDArray[Any]
    """[L]."""
    terms: npt.NDArray[Any]
    """[L]: whether nothing may be expected after the step."""

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, slots=True)
class Windows:
    """Sampled windows; what is masked (0) is of no rollout."""

    obs: Array
    """[T + 1, B, number]."""
    actions: Array
    """[T, B, number]; of discrete ones the number."""
    rewards: Array
    """[T, B]."""
    terms: Array
    """[T, B]."""
    mask: Array
    """[T, B]."""


class ReplayBuffer:
    """The last rollouts, up to a number of steps."""

    def __init__(
        self,
        max_steps: int,
        obs_dim: int,
        action_dim: int = 1,
        *,
        window: int = 1,
        weight_baseline: float = 0.0,
    ) -> None:
        """An empty buffer.

        Args:
            max_steps: How many steps it holds at most.
            obs_dim: Numbers of an observation.
            action_dim: Numbers of an action; 1 if actions are discrete.
            window: How many steps of a rollout are sampled; 1 for agents without memory.
            weight_baseline: What is added to each rollout's weight. With much of it all rollouts
                are as likely; lengths do not matter.
        """
        check("max_steps", max_steps, Count)
        check("window", window, Count)
        check("weight_baseline", weight_baseline, NotNegative)
        self.max_steps, self.window, self._baseline = max_steps, window, weight_baseline
        # the last observation of a rollout takes a row of its own
        self._num_rows = 2 * max_steps
        self._obs = np.zeros((self._num_rows, obs_dim), np.float32)
        self._actions = np.zeros((self._num_rows, action_dim), np.float32)
        self._rewards = np.zeros(self._num_rows, np.float32)
        self._terms = np.zeros(self._num_rows, np.float32)
        self._kept: deque[tuple[int, int]] = deque()  # first row and length of each rollout
        self._table: tuple[npt.NDArray[np.int64], ...] | None = None
        self._next_row = 0
        self.num_steps = 0
        """Steps in the buffer."""
        self.num_added = 0
        """Rollouts ever added."""
        self._file: GrowingFile | None = None
        self._num_written = 0  # rollouts, of those ever added

    def __len__(self) -> int:
        """Rollouts in the buffer."""
        return len(self._kept)

    def add_rollout(self, rollout: Rollout) -> None:
        """Add a trial; the oldest ones go if there is no room for it.

        Raises:
            ConfigError: It has no step, too many, or arrays that do not fit.
        """
        length = len(rollout)
        actions = np.asarray(rollout.actions, np.float32).reshape(length, -1)
        shapes = {
            "obs": (np.shape(rollout.obs), (length + 1, self._obs.shape[1])),
            "actions": (actions.shape, (length, self._actions.shape[1])),
            "terms": (np.shape(rollout.terms), (length,)),
        }
        for name, (shape, wanted) in shapes.items():
            if shape != wanted:
                raise ConfigError(f"a rollout of {length} steps has {name} {wanted}, got {shape}")
        if not 1 <= length <= self.max_steps:
            raise ConfigError(
                f"a rollout of {length} steps does not fit into a buffer of {self.max_steps}; "
                "raise buffer_size"
            )
        while self.num_steps + length > self.max_steps:
            self.num_steps -= self._kept.popleft()[1]
        rows = (self._next_row + np.arange(length + 1)) % self._num_rows
        self._obs[rows] = rollout.obs
        steps = rows[:-1]
        self._actions[steps], self._rewards[steps] = actions, rollout.rewards
        self._terms[steps] = rollout.terms
        # what windows show after the end, masked
        self._actions[rows[-1]] = self._rewards[rows[-1]] = self._terms[rows[-1]] = 0
        self._kept.append((self._next_row, length))
        self._next_row = (self._next_row + length + 1) % self._num_rows
        self.num_steps += length
        self.num_added += 1
        self._table = None

    def sample(self, batch_size: int, rng: np.random.Generator) -> Windows:
        """Windows with replacement; steps that are masked in all of them are left out."""
        if not self._kept:
            raise ConfigError("there is nothing to sample: add a rollout first")
        first_rows, lengths, places, until = self._tables()
        # the baseline may be any number, so weights are not whole
        weights = rng.random(batch_size) * until[-1]
        which = np.minimum(np.searchsorted(until, weights, side="right"), len(until) - 1)
        starts = (rng.random(batch_size) * places[which]).astype(np.int64)
        left = lengths[which] - starts
        longest = int(min(left.max(), self.window))
        steps = np.arange(longest + 1)[:, None]
        rows = (first_rows[which] + starts + np.minimum(steps, left)) % self._num_rows
        before = rows[:-1]
        return Windows(
            obs=self._obs[rows],
            actions=self._actions[before],
            rewards=self._rewards[before],
            terms=self._terms[before],
            mask=(steps[:-1] < left).astype(np.float32),
        )

    def _tables(self) -> tuple[Any, ...]:
        """First row, length, places to start and summed weight of each rollout."""
        if self._table is None:
            first_rows, lengths = np.array(self._kept, np.int64).T
            places = np.maximum(1, lengths - self.window + 1)
            self._table = first_rows, lengths, places, np.cumsum(places + self._baseline)
        return self._table

    # ---- on disk --------------------------------------------------------------------------------

    def save(self, folder: Path) -> dict[str, Any]:
        """Write what is new to the buffer's file in `folder`; what a checkpoint keeps."""
        path = folder / FILE_NAME
        if self._file is None or self._file.path != path:
            self._file, self._num_written = GrowingFile(path), 0
        num_new = min(self.num_added - self._num_written, len(self._kept))
        new = list(self._kept)[len(self._kept) - num_new :]
        if new:
            self._file.append(b"".join(self._bytes_of(*one) for one in new))
        self._num_written = self.num_added
        return {
            "file": self._file.mark(),
            "lengths": np.array([length for _, length in self._kept], np.int64),
            "widths": self._widths,
            "num_added": self.num_added,
        }

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Become the buffer that was saved, and go on with its file.

        Raises:
            CheckpointError: The file is damaged, or of another kind of rollouts.
        """
        file = GrowingFile(folder / FILE_NAME)
        file.go_on(state["file"])
        lengths = [int(length) for length in state["lengths"]]
        if list(state["widths"]) != self._widths or sum(lengths) > self.max_steps:
            raise CheckpointError(
                str(file.path), "holds rollouts of another shape, or more than fit into this buffer"
            )
        sizes = [self._floats_of(length) for length in lengths]
        data = np.frombuffer(file.read(file.length - 4 * sum(sizes)) if sizes else b"", np.float32)
        self._kept.clear()
        self._next_row = self.num_steps = 0
        width, end = self._obs.shape[1], 0
        for length, size in zip(lengths, sizes, strict=True):
            start, end = end, end + size
            cuts = np.cumsum(
                [(length + 1) * width, size - (length + 1) * width - 2 * length, length]
            )
            obs, actions, rewards, terms = np.split(data[start:end], cuts)
            self.add_rollout(Rollout(obs.reshape(-1, width), actions, rewards, terms))
        self._file, self._num_written = file, state["num_added"]
        self.num_added = state["num_added"]

    @property
    def _widths(self) -> list[int]:
        return [self._obs.shape[1], self._actions.shape[1]]

    def _floats_of(self, length: int) -> int:
        return (length + 1) * self._obs.shape[1] + length * (self._actions.shape[1] + 2)

    def _bytes_of(self, first_row: int, length: int) -> bytes:
        rows = (first_row + np.arange(length + 1)) % self._num_rows
        steps = rows[:-1]
        parts = self._obs[rows], self._actions[steps], self._rewards[steps], self._terms[steps]
        return b"".join(part.tobytes() for part in parts)
