"""Where a trajectory starts, as text that trainers carry in their data sets.

    "FrozenLake, seed 10003"

All rows of a group have the same text, so they begin in the same state.
"""

from __future__ import annotations

from typing import Any

from envfleet.errors import ConfigError
from envfleet.llm.config import plain_config
from envfleet.llm.play_rules import PlayRules
from envfleet.llm.settings import read_settings

_BETWEEN = ", seed "


def start_texts(config: Any, number: int, *, mode: str = "train", seed: int | None) -> list[str]:
    """So many starts: tags take turns as often as `n_groups` says, and seeds count up."""
    settings = read_settings(plain_config(config), mode)
    tags = [tag.name for tag, count in settings.groups for _ in range(count)]
    first = seed if seed is not None else settings.seed or 0
    return [f"{tags[place % len(tags)]}{_BETWEEN}{first + place}" for place in range(number)]


def read_start(text: Any, rules: PlayRules) -> tuple[str, int]:
    """Tag and seed of a start."""
    tag, _, seed = str(text).rpartition(_BETWEEN)
    if not isinstance(text, str) or tag not in rules.tags or not seed.isdecimal():
        raise ConfigError(
            f"the prompt {text!r:.60} names no environment and seed, such as "
            f"'{next(iter(rules.tags))}{_BETWEEN}7'; make the data set with "
            "start_prompts of envfleet.llm.trl, or start_rows of envfleet.llm.verl"
        )
    return tag, int(seed)
