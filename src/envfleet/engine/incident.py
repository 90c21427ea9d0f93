"""A failure as a record: what happened, to whom, and how to make it happen again.

An incident can be saved to a file and replayed in one process, under a debugger. The file holds
pickled code: replay only files from people you trust.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from envfleet.engine import snapshot
from envfleet.errors import ConfigError

_MAGIC = b"envfleet incident 1\n"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What came of replaying an incident."""

    reproduced: bool
    """The environment failed again, in the same way."""
    steps: int
    """How many actions were taken."""
    exception: str | None
    """The traceback, if the environment raised."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One failure of one slot; `slots` are all that were lost with it."""

    kind: Literal["exception", "death", "timeout"]
    slot: int
    slots: tuple[int, ...]
    worker: int
    doing: str
    reason: str
    traceback: str
    exitcode: int | None
    seed: int | None
    options: Mapping[str, Any] | None
    actions: tuple[Any, ...] = field(repr=False)
    """Since the reset, the one that failed included."""
    rng: dict[str, Any] | None = field(repr=False)
    """The generator's state before the reset, if the reset was not seeded."""
    is_complete: bool
    """False if a replay cannot be the same: the episode was too long for all of its actions to be
    kept, or it began without a seed from a generator that is none of numpy's PCG64."""
    env_fn: bytes | None = field(repr=False)

    def __str__(self) -> str:
        """One sentence."""
        return (
            f"{self.kind} in slot {self.slot} (worker {self.worker}) during {self.doing}, "
            f"{len(self.actions)} actions after a reset with seed {self.seed}: {self.reason}"
        )

    def save(self, path: str | Path) -> Path:
        """Write everything that `envfleet doctor replay` needs."""
        target = Path(path)
        target.write_bytes(_MAGIC + cloudpickle.dumps(self))
        return target

    @classmethod
    def load(cls, path: str | Path) -> Incident:
        """Read what `save` wrote. Runs code from the file."""
        blob = Path(path).read_bytes()
        if not blob.startswith(_MAGIC):
            raise ConfigError(f"{path} is not an incident file written by envfleet")
        incident: Incident = pickle.loads(blob[len(_MAGIC) :])
        return incident

    def replay(self) -> ReplayResult:
        """Build the environment here and do to it what was done before the failure."""
        if self.env_fn is None:
            raise ConfigError(
                "this incident has no environment in it: the function that builds it cannot be "
                "pickled"
            )
        steps = 0
        try:
            env = pickle.loads(self.env_fn)()
            try:
                replay = snapshot.Replay(self.seed, self.options, self.rng, self.actions)
                snapshot.begin(env, replay)
                for action in self.actions:
                    steps += 1
                    env.step(action)
            finally:
                env.close()
        except Exception as exc:
            reason = "".join(traceback.format_exception_only(exc)).strip()
            text = "".join(traceback.format_exception(exc))
            return ReplayResult(reason == self.reason, steps, text)
        return ReplayResult(False, steps, None)
