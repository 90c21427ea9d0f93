"""Where figures go. A sink gets figures, and is closed once.

    run ─► Sinks ─┬─► JsonLines            metrics.jsonl
                  ├─► TensorBoard          events.out.tfevents.*
                  └─► WeightsAndBiases     wandb/

Law: a sink that fails costs a warning and its own figures, never the run nor the other sinks'.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Protocol

from envfleet.observe.figures import Figures

__all__ = ["Sink", "Sinks"]


class Sink(Protocol):
    """Something that keeps figures."""

    def note(self, env_steps: int, figures: Figures) -> None:
        """Keep what was measured when the run had made so many environment steps."""

    def close(self) -> None:
        """Write what is not written yet."""


class Sinks:
    """Several sinks as one, none of which can hurt the others."""

    def __init__(self, wanted: Iterable[Callable[[], Sink]] = ()) -> None:
        """Open them; one that cannot be opened is warned of and left out."""
        self._sinks: list[Sink] = []
        self._failing: set[Sink] = set()
        for open_sink in wanted:
            try:
                self._sinks.append(open_sink())
            except Exception as exc:
                _warn(f"figures are kept in one place less: {_reason(exc)}")

    def note(self, env_steps: int, figures: Figures) -> None:
        """Tell every sink; one that fails is warned of once, and tried again next time."""
        for sink in self._sinks:
            try:
                sink.note(env_steps, figures)
                self._failing.discard(sink)
            except Exception as exc:
                if sink not in self._failing:
                    self._failing.add(sink)
                    _warn(
                        f"{_name(sink)} could not note the figures at {env_steps:,} steps "
                        f"({_reason(exc)}); the run goes on without them, and it is tried again "
                        "at the next ones"
                    )

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as exc:
                _warn(f"{_name(sink)} could not be closed ({_reason(exc)}); figures may be missing")


def _name(sink: Sink) -> str:
    return type(sink).__name__


def _reason(exc: Exception) -> str:
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
