"""Who the agents of an environment are, and which of them go into one batch.

A group is made of agents with equal spaces, so that one policy can act for all of them. Without
other wishes, agents whose names differ only in the number at their end are a group: `wolf_0` and
`wolf_1` are the group `wolf`. If their spaces differ, each of them is a group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import spaces

from envfleet.errors import ConfigError
from envfleet.layout import are_equal
from envfleet.multiagent.bare import MASK_KEY

Space = spaces.Space[Any]
Groups = Mapping[str, Sequence[Any]]
"""The agents of each group, as a caller names them."""


@dataclass(frozen=True, slots=True)
class Group:
    """Agents with equal spaces."""

    name: Any
    agents: tuple[Any, ...]
    numbers: tuple[int, ...]
    """Where these agents are among all."""
    observation_space: Space
    action_space: Space

    @property
    def has_mask_in_observation(self) -> bool:
        """Whether the observations say what is allowed."""
        space = self.observation_space
        return isinstance(space, spaces.Dict) and MASK_KEY in space.spaces

    @property
    def mask_width(self) -> int:
        """How many alternatives all choices of an action have together; 0 if it is no choice."""
        match self.action_space:
            case spaces.Discrete() as one:
                return int(one.n)
            case spaces.MultiDiscrete() as several:
                return int(several.nvec.sum())
        return 0


def make_groups(env: Any, agents: Sequence[Any], wanted: Groups | None) -> tuple[Group, ...]:
    """The groups of all agents of an environment, in the order of their first members.

    Raises:
        ConfigError: A wanted group cannot be, or an agent is in none or in two.
    """
    observed = {name: env.observation_space(name) for name in agents}
    acting = {name: env.action_space(name) for name in agents}
    if wanted is None:
        members = _by_prefix(agents)
        for prefix, names in list(members.items()):
            if not _are_alike(names, observed) or not _are_alike(names, acting):
                members = {key: value for key, value in members.items() if key != prefix}
                members |= {name: [name] for name in names}
    else:
        members = _checked(wanted, agents, observed, acting)
    number_of = {name: number for number, name in enumerate(agents)}
    made = [
        Group(
            prefix,
            tuple(names),
            tuple(number_of[name] for name in names),
            observed[names[0]],
            acting[names[0]],
        )
        for prefix, names in members.items()
    ]
    return tuple(sorted(made, key=lambda group: group.numbers[0]))


def _by_prefix(agents: Sequence[Any]) -> dict[Any, list[Any]]:
    members: dict[Any, list[Any]] = {}
    for name in agents:
        head, _, tail = str(name).rpartition("_")
        prefix = head if isinstance(name, str) and head and tail.isdigit() else name
        members.setdefault(prefix, []).append(name)
    return members


def _checked(
    wanted: Groups, agents: Sequence[Any], observed: dict[Any, Space], acting: dict[Any, Space]
) -> dict[Any, list[Any]]:
    members = {prefix: list(names) for prefix, names in wanted.items()}
    named = [name for names in members.values() for name in names]
    if sorted(map(str, named)) != sorted(map(str, agents)) or not all(members.values()):
        raise ConfigError(
            f"groups must hold every agent once and none may be empty: the agents are "
            f"{list(agents)}, the groups {members}"
        )
    for prefix, names in members.items():
        for kind, found in (("observation", observed), ("action", acting)):
            if not _are_alike(names, found):
                each = ", ".join(f"{name}: {found[name]}" for name in names)
                raise ConfigError(
                    f"the agents of the group {prefix!r} have different {kind} spaces, which "
                    f"cannot be one batch: {each}"
                )
    return members


def _are_alike(names: Sequence[Any], found: dict[Any, Space]) -> bool:
    return all(are_equal(found[names[0]], found[name]) for name in names[1:])
