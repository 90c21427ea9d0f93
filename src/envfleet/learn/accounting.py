"""Where a run's time went, and what could be done about it, in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping

REMEDIES = {
    "environments": "a faster setting may help (`envfleet tune ENV` finds it), more learning will "
    "not",
    "inference": "more environments would share each forward pass",
    "learning": "more environments will not help; try fewer epochs, larger minibatches or a GPU",
    "evaluation": "evaluate less often (eval_every) or in fewer episodes",
    "start-up": "a longer run would not feel it",
    "the rest": "checkpoints and notes take long; save less often (save_every)",
}
"""What helps, by where the time goes."""


def shares(seconds: Mapping[str, float], total_s: float) -> dict[str, float]:
    """Parts of 1; what was not measured is "the rest"."""
    if total_s <= 0:
        return {}
    parts = {name: spent_s / total_s for name, spent_s in seconds.items()}
    return parts | {"the rest": max(0.0, 1.0 - sum(parts.values()))}


def verdict(parts: Mapping[str, float]) -> str:
    """What took most, what to do about it, and what that could gain at most."""
    if not parts:
        return "nothing was measured"
    name = max(parts, key=lambda key: parts[key])
    share = parts[name]
    most = f", at most {1 / (1 - share):.1f} times as fast" if share < 0.99 else ""
    return f"{share:.0%} {name}: {REMEDIES[name]}{most}"
