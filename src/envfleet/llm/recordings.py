"""All that can be seen of a rollout, as plain data, and where two of them part first.

Pure but for `record`, which only looks. Law: a recording shares nothing with what it was made of;
what differs first is named by turn, then by environment, then by field, with both values.
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
"""Who was asked by a step, and whose caches it gave back."""
_MOST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Recording:
    """A rollout that has been played."""

    environments: tuple[dict[str, Any], ...]
    """By environment: its cache, its status, and what it renders."""
    calls: tuple[Call, ...] = ()

    @property
    def digest(self) -> str:
        """A number that depends on all of the environments, the same in every process."""
        return f"{digest(self.environments):08x}"


@dataclass(frozen=True, slots=True)
class Parting:
    """The first thing that differs between two rollouts."""

    env_id: int
    tag: str
    turn: int | None
    """From 1; None for what is no turn's: sums, metrics, the status at the end."""
    field: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        where = "at the end" if self.turn is None else f"turn {self.turn}"
        return (
            f"environment {self.env_id} ({self.tag}), {where}: {self.field} is "
            f"{_short(self.expected)} in one loop and {_short(self.got)} here"
        )


def record(manager: EnvStateManager, calls: Sequence[Call]) -> Recording:
    """What a manager shows of a rollout whose metrics have been asked for."""
    shown = manager.render()
    return Recording(
        tuple(
            _plain({**cache, "status": entry["status"], "render": shown[entry["env_id"]]})
            for cache, entry in zip(manager.rollout_cache, manager.envs, strict=True)
        ),
        tuple((list(asked), list(given)) for asked, given in calls),
    )


def first_parting(expected: Recording, got: Recording) -> Parting | None:
    """Where two recordings part first; None if they do not."""
    pairs = list(zip(expected.environments, got.environments, strict=True))
    longest = max((len(one["history"]) for pair in pairs for one in pair), default=0)
    for number in range(longest):
        for left, right in pairs:
            entries = [_entry(one, number) for one in (left, right)]
            found = _parting(left, number + 1, *entries)
            if found is not None:
                return found
    for left, right in pairs:
        rests = [{key: one[key] for key in one if key != "history"} for one in (left, right)]
        found = _parting(left, None, *rests)
        if found is not None:
            return found
    return next(_out_of_order(got), None)


def _entry(environment: Mapping[str, Any], number: int) -> dict[str, Any]:
    history = environment["history"]
    return dict(history[number]) if number < len(history) else {}


def _parting(
    environment: Mapping[str, Any], turn: int | None, expected: Any, got: Any
) -> Parting | None:
    found = value_difference(expected, got)
    if found is None:
        return None
    # ['info']['shake'] reads better as info.shake
    name = re.sub(r"\['([^']*)'\]", r".\1", found.path).lstrip(".")
    return Parting(environment["env_id"], environment["tag"], turn, name, found.expected, found.got)


def _out_of_order(recording: Recording) -> Iterator[Parting]:
    """Caches that a step gave back in another order than it was asked."""
    tag_of = {one["env_id"]: one["tag"] for one in recording.environments}
    for number, (asked, given) in enumerate(recording.calls, start=1):
        wanted = [env_id for env_id in asked if env_id in given]
        for right, wrong in zip_longest(wanted, given):
            if right != wrong:
                who = wrong if right is None else right
                yield Parting(who, tag_of[who], number, "order of results", wanted, given)


def _plain(value: Any) -> Any:
    """A copy of mappings, lists, arrays and leaves alone; pictures are arrays."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "__array_interface__"):
        return np.array(value)
    return snapshot(value)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:50]} ... {text[-20:]}"
