"""What a finished rollout is summed up by: per environment, per turn, per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envfleet.llm.entries import Cache, Entry
from envfleet.llm.turns import as_number


def sum_up(entries: Sequence[Entry], caches: Sequence[Cache], group_size: int) -> None:
    """Write the metrics of a rollout into its caches; doing it twice changes nothing."""
    solved: set[tuple[str, int]] = set()
    for entry, cache in zip(entries, caches, strict=True):
        per_turn = _per_turn(cache)
        turns = len(cache["history"]) - 1
        status = entry["status"]
        is_success = status.terminated and not status.truncated
        if is_success:
            solved.add((entry["tag"], entry["group_id"]))
        metrics = {"success": float(is_success), "num_actions": status.num_actions}
        metrics |= {key: sum(values) / turns for key, values in per_turn.items()}
        cache["history"][-1]["metrics"] = per_turn
        cache["metrics"] = {f"{entry['tag']}/{key}": value for key, value in metrics.items()}
    for entry, cache in zip(entries, caches, strict=True):
        is_any = (entry["tag"], entry["group_id"]) in solved
        cache["metrics"][f"{entry['tag']}/pass@{group_size}"] = float(is_any)


def _per_turn(cache: Cache) -> dict[str, list[float]]:
    """Every number that infos held, turn by turn; success is told by the status."""
    found: dict[str, list[float]] = {}
    for turn in cache["history"]:
        info: dict[str, Any] = turn.get("info", {})
        for key, value in info.items():
            number = None if key == "success" else as_number(value)
            if number is not None:
                found.setdefault(key, []).append(number)
    return found
