"""A rollout as plain data, and the first difference between two of them.

Law: a record shares nothing with the manager that it was made from. The first difference is the
first by turn, then by environment, then by field, with both values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from envfleet.testing.values import digest, snapshot, value_difference

if TYPE_CHECKING:
    from envfleet.llm.manager import EnvStateManager

Call = tuple[list[int], list[int]]
"""Environments that a step was given, and those whose caches it returned."""
_MOST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A rollout that has been played."""

    environments: tuple[dict[str, Any], ...]
    """The cache, the status and the rendered state of each environment."""
    calls: tuple[Call, ...] = ()

    @property
    def digest(self) -> str:
        """A checksum of all environments, the same in every process."""
        return f"{digest(self.environments):08x}"


@dataclass(frozen=True, slots=True)
class RolloutDifference:
    """The first difference between two rollouts."""

    env_id: int
    tag: str
    turn: int | None
    """From 1; None for a field that belongs to no turn, such as a metric or the final status."""
    field: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        where = "at the end" if self.turn is None else f"turn {self.turn}"
        return (
            f"environment {self.env_id} ({self.tag}), {where}: {self.field} is "
            f"{_short_difference(self.expected)} in one loop and {_short_difference(self.got)} here"
        )


def record_rollout(manager: EnvStateManager, calls: Sequence[Call]) -> RolloutRecord:
    """Record a rollout after `get_rollout_states`; `calls` are those of `step`."""
    states = manager.render()
    return RolloutRecord(
        tuple(
            _comparable({**cache, "status": entry["status"], "render": states[entry["env_id"]]})
            for cache, entry in zip(manager.rollout_cache, manager.envs, strict=True)
        ),
        tuple((list(given), list(returned)) for given, returned in calls),
    )


def recorded_difference(expected: RolloutRecord, got: RolloutRecord) -> RolloutDifference | None:
    """The first difference between two records; None if they are equal."""
    pairs = list(zip(expected.environments, got.environments, strict=True))
    longest = max((len(one["history"]) for pair in pairs for one in pair), default=0)
    for number in range(longest):
        for left, right in pairs:
            entries = [_history_entry(one, number) for one in (left, right)]
            found = _difference(left, number + 1, *entries)
            if found is not None:
                return found
    for left, right in pairs:
        rests = [{key: one[key] for key in one if key != "history"} for one in (left, right)]
        found = _difference(left, None, *rests)
        if found is not None:
            return found
    return next(_wrong_orders(got), None)


def _history_entry(environment: Mapping[str, Any], number: int) -> dict[str, Any]:
    history = environment["history"]
    return dict(history[number]) if number < len(history) else {}


def _difference(
    environment: Mapping[str, Any], turn: int | None, expected: Any, got: Any
) -> RolloutDifference | None:
    found = value_difference(expected, got)
    if found is None:
        return None
    # ['info']['shake'] reads better as info.shake
    name = re.sub(r"\['([^']*)'\]", r".\1", found.path).lstrip(".")
    env_id, tag = environment["env_id"], environment["tag"]
    return RolloutDifference(env_id, tag, turn, name, found.expected, found.got)


def _wrong_orders(record: RolloutRecord) -> Iterator[RolloutDifference]:
    """Caches that a step returned in another order than it was given."""
    tag_of = {one["env_id"]: one["tag"] for one in record.environments}
    for number, (given, returned) in enumerate(record.calls, start=1):
        wanted = [env_id for env_id in given if env_id in returned]
        for right, wrong in zip_longest(wanted, returned):
            if right != wrong:
                env_id = wrong if right is None else right
                yield RolloutDifference(
                    env_id, tag_of[env_id], number, "order of results", wanted, returned
                )


def _comparable(value: Any) -> Any:
    """A copy made of mappings, lists, arrays and leaves; images become arrays."""
    if is_dataclass(value) and not isinstance(value, type):
        return _comparable(asdict(value))
    if isinstance(value, Mapping):
        return {key: _comparable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(one) for one in value]
    if hasattr(value, "__array_interface__"):
        return np.array(value)
    return snapshot(value)


def _short_difference(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:50]} ... {text[-20:]}"
