"""Where a run's time went, and what could be done about it, in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REMEDIES = {
    "environments": "the environments themselves take it; more workers, if there are cores for "
    "them, or a faster environment",
    "waiting": "slots wait for the slowest of them; more environments per worker even it out "
    "(`envfleet tune ENV` finds the best split)",
    "transport": "steps are short against the way to the workers; use fewer workers, or none "
    "(backend='serial')",
    "inference": "more environments would share each forward pass",
    "learning": "more environments will not help; try fewer epochs, larger minibatches or a GPU",
    "evaluation": "evaluate less often (eval_every) or in fewer episodes",
    "start-up": "a longer run would not feel it",
    "the rest": "checkpoints and notes take long; save less often (save_every)",
}
"""What helps, by where the time goes."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One part of the time, and what could be had by doing something about it."""

    name: str
    share: float
    remedy: str
    most_gain: float | None
    """How many times as fast a run could be without it; None if it is all there is."""

    def __str__(self) -> str:
        most = "" if self.most_gain is None else f", at most {self.most_gain:.1f} times as fast"
        return f"{self.share:.0%} {self.name}: {self.remedy}{most}"


def fleet_seconds(
    timings: Mapping[str, float], num_workers: int, spent_s: float
) -> dict[str, float]:
    """What the time spent in a fleet was spent on.

    Args:
        timings: The fleet's own: workers in environments (all together), this process waiting.
        num_workers: Who shares that work.
        spent_s: From the caller's side, in `send` and `recv`.
    """
    waited_s = min(timings["wait_s"], spent_s)
    stepping_s = min(timings["env_s"] / num_workers, waited_s)
    return {
        "environments": stepping_s,
        "waiting": waited_s - stepping_s,
        "transport": spent_s - waited_s,
    }


def shares(seconds: Mapping[str, float], total_s: float) -> dict[str, float]:
    """Parts of 1; what was not measured is "the rest"."""
    if total_s <= 0:
        return {}
    parts = {name: spent_s / total_s for name, spent_s in seconds.items()}
    return parts | {"the rest": max(0.0, 1.0 - sum(parts.values()))}


def advice(parts: Mapping[str, float]) -> list[Advice]:
    """What helps most first."""
    return [
        Advice(name, share, REMEDIES[name], 1 / (1 - share) if share < 0.99 else None)
        for name, share in sorted(parts.items(), key=lambda item: -item[1])
    ]


def verdict(parts: Mapping[str, float]) -> str:
    """What took most, what to do about it, and what that could gain at most."""
    return str(advice(parts)[0]) if parts else "nothing was measured"


def verdict_so_far(seconds: Mapping[str, float]) -> str:
    """The same of a run that goes on, by what was measured; empty before anything was."""
    total_s = sum(seconds.values())
    return verdict(shares(seconds, total_s)) if total_s > 0 else ""
