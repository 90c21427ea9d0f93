"""Metrics of a rollout: written into its caches, and summed up per tag."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.llm.manager_types import Cache, EnvEntry


@dataclass(frozen=True, slots=True)
class TagSummary:
    """Means over the environments of one tag."""

    tag: str
    num_envs: int
    success: float
    reward: float
    """Of all turns of an episode together, without the penalty."""
    penalty: float
    num_actions: float
    num_turns: float
    num_failures: int
    """How many environments failed; a count, not a mean."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The summary as text, in the order of `TAG_COLUMNS`."""
        return (
            self.tag,
            str(self.num_envs),
            f"{self.success:.0%}",
            f"{self.reward:.3f}",
            f"{self.num_actions:.1f}",
            f"{self.num_turns:.1f}",
            f"{self.penalty:.3f}",
        )


TAG_COLUMNS = ("tag", "environments", "success", "mean reward", "actions", "turns", "penalty")
"""The headings of tables with a row for each tag."""


def add_metrics(entries: Sequence[EnvEntry], caches: Sequence[Cache], group_size: int) -> None:
    """Write the metrics of a rollout into its caches; calling it twice changes nothing."""
    solved: set[tuple[str, int]] = set()
    for entry, cache in zip(entries, caches, strict=True):
        per_turn = numbers_per_turn(cache["history"])
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


def numbers_per_turn(history: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Every number in the infos, turn by turn, but for success, which the status tells."""
    found: dict[str, list[float]] = {}
    for turn in history:
        info: Mapping[str, Any] = turn.get("info", {})
        for key, value in info.items():
            number = None if key == "success" else _as_number(value)
            if number is not None:
                found.setdefault(key, []).append(number)
    return found


def _as_number(value: Any) -> float | None:
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, float | int | numbers.Real | np.bool_):
        with suppress(OverflowError):
            return float(value)
    return None


def tag_summaries(caches: Sequence[Cache]) -> Iterator[TagSummary]:
    """One summary per tag, in the order in which tags first appear."""
    by_tag: dict[str, list[Cache]] = {}
    for cache in caches:
        by_tag.setdefault(cache["tag"], []).append(cache)
    for tag, alike in by_tag.items():
        yield TagSummary(
            tag,
            len(alike),
            success=_metric_mean(cache["metrics"][f"{tag}/success"] for cache in alike),
            reward=_metric_mean(
                sum(turn.get("reward", 0.0) for turn in cache["history"]) for cache in alike
            ),
            penalty=_metric_mean(cache["penalty"] for cache in alike),
            num_actions=_metric_mean(cache["metrics"][f"{tag}/num_actions"] for cache in alike),
            num_turns=_metric_mean(len(cache["history"]) - 1 for cache in alike),
            num_failures=sum("failure" in cache for cache in alike),
        )


def mean_metrics(caches: Sequence[Cache]) -> dict[str, float]:
    """Every metric, as a mean over all environments of its tag; one without it counts as zero."""
    sums: dict[str, float] = {}
    num_envs: dict[str, int] = {}
    tag_of: dict[str, str] = {}
    for cache in caches:
        num_envs[cache["tag"]] = num_envs.get(cache["tag"], 0) + 1
        for key, value in cache["metrics"].items():
            sums[key] = sums.get(key, 0.0) + value
            tag_of[key] = cache["tag"]
    return {key: total / num_envs[tag_of[key]] for key, total in sums.items()}


def _metric_mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
