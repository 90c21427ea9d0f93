"""The engine's small value objects: what a caller may ask for, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.messages import read_reset
from envfleet.errors import ConfigError

EnvFn: TypeAlias = Callable[[], Any]
Autoreset: TypeAlias = Literal["next_step", "same_step", "disabled"]
OnFailure: TypeAlias = Literal["raise", "restart", "resume", "fallback"]
BackendName: TypeAlias = Literal["serial", "thread", "process"]
StartMethod: TypeAlias = Literal["fork", "spawn", "forkserver"]


def one_of(name: str, value: object, kind: Any) -> Any:
    """Return `value` if the Literal `kind` lists it, else say what it may be."""
    choices = get_args(kind)
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
    return value


def check_seconds(name: str, value: float | None, *, may_be_zero: bool = False) -> None:
    """Refuse a limit that is not a positive number of seconds (or zero, if it may be) or None."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if value is not None and not (is_number and (value > 0 or (may_be_zero and value == 0))):
        seconds = "seconds, 0 or more" if may_be_zero else "positive seconds"
        raise ConfigError(f"{name} must be {seconds}, or None to wait for ever; got {value!r}")


def check_count(name: str, value: object) -> None:
    """Refuse what is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long the fleet waits before it presumes that something hangs."""

    step_s: float | None = None
    """Longest one environment may take for one step; None lets it take as long as it takes."""
    reset_s: float | None = None
    """Longest one environment may take for one reset or call."""
    start_s: float = 120.0
    """Longest the environments of one worker may take to be built."""
    close_s: float = 3.0
    """Longest `close` waits for environments to close before their workers are killed."""
    warn_s: float = 30.0
    """With no deadline: after how long a warning says who is waited for, and where it stands."""

    def __post_init__(self) -> None:
        for name in ("step_s", "reset_s", "start_s", "close_s", "warn_s"):
            check_seconds(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """How many failures of one slot are forgiven."""

    max_restarts: int = 5
    """Failures of one slot within the window that are answered by a restart."""
    window_s: float = 600.0
    """Older failures are forgotten, so that a rare crash never ends a long run."""

    def __post_init__(self) -> None:
        count: object = self.max_restarts
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
            raise ConfigError(f"max_restarts must be a whole number, 0 or more, got {count!r}")
        check_seconds("window_s", self.window_s)


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """How one slot is to be reset: Gymnasium's two arguments."""

    seed: int | None = None
    options: Mapping[str, Any] | None = None

    def apply(self, reset: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
        """Call `reset` by this plan; an empty one calls `reset()`, as Gymnasium's autoreset."""
        if self.seed is None and self.options is None:
            return read_reset(reset())
        # environments change what they are given, and this may be somebody else's too
        options = None if self.options is None else detached_copy(dict(self.options))
        return read_reset(reset(seed=self.seed, options=options))

    def detached(self) -> ResetPlan:
        """This plan, with options that nobody else can change."""
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
