"""The engine's small value objects: what a caller may ask for, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.messages import read_reset
from envfleet.options import CountOrZero, Seconds, option_class

EnvFn: TypeAlias = Callable[[], Any]
Autoreset: TypeAlias = Literal["next_step", "same_step", "disabled"]
OnFailure: TypeAlias = Literal["raise", "restart", "resume", "fallback"]
BackendName: TypeAlias = Literal["serial", "thread", "process", "ray"]
StartMethod: TypeAlias = Literal["fork", "spawn", "forkserver"]


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long the fleet waits before it presumes that something hangs."""

    step_s: Seconds | None = None
    """Longest one environment may take for one step; None lets it take as long as it takes."""
    reset_s: Seconds | None = None
    """Longest one environment may take for one reset or call."""
    start_s: Seconds = 120.0
    """Longest the environments of one worker may take to be built."""
    close_s: Seconds = 3.0
    """Longest `close` waits for environments to close before their workers are killed."""
    warn_s: Seconds = 30.0
    """With no deadline: after how long a warning says who is waited for, and where it stands."""


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """How many failures of one slot are forgiven."""

    max_restarts: CountOrZero = 5
    """Failures of one slot within the window that are answered by a restart."""
    window_s: Seconds = 600.0
    """Older failures are forgotten, so that a rare crash never ends a long run; but those after
    which the slot has not worked again are not."""


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """Where the workers of backend="ray" live."""

    address: str | None = None
    """host:port of the head, or "auto" for the cluster of which this machine is a node. None takes
    RAY_ADDRESS, or the connection that this process has, or starts a cluster on this machine."""
    placement: Literal["spread", "pack"] = "spread"
    """Workers on as many nodes as possible, or on few."""
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """What each worker takes of a node: "CPU", "GPU", or names that nodes were given."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment of all workers: working_dir, py_modules, pip, env_vars."""


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """How one slot is to be reset: Gymnasium's two arguments."""

    seed: int | None = None
    options: Mapping[str, Any] | None = None

    def apply(self, reset: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
        """Call `reset` by this plan; an empty one calls `reset()`, as Gymnasium's autoreset."""
        if self.seed is None and self.options is None:
            return read_reset(reset())
        # environments change what they are given, and the caller may use these options again
        options = None if self.options is None else detached_copy(dict(self.options))
        return read_reset(reset(seed=self.seed, options=options))

    def detached(self) -> ResetPlan:
        """This plan, with a copy of its options that no other code can change."""
        return (
            self
            if self.options is None
            else ResetPlan(self.seed, detached_copy(dict(self.options)))
        )

    def seeded_like(self, other: ResetPlan | None) -> ResetPlan:
        """This plan, with the other's seed if it has none of its own."""
        if other is None or self.seed is not None:
            return self
        return ResetPlan(other.seed, self.options)


PLAIN_RESET = ResetPlan()
