"""A limit for YAML whose aliases repeat each other: some hundred bytes can stand for billions."""

from __future__ import annotations

from typing import Any

from envfleet.errors import ConfigError

MAX_VALUES = 10_000
"""More than any configuration has."""


def check_size(node: Any, where: str) -> None:
    """Refuse a composed YAML node that stands for too many values.

    Raises:
        ConfigError: It does, or it contains itself.
    """
    sizes: dict[int, int] = {}

    def size_of(part: Any) -> int:
        if id(part) not in sizes:
            sizes[id(part)] = MAX_VALUES + 1  # while its inside is counted: it may be in there
            inner = part.value if isinstance(part.value, list) else []
            flat = [one for item in inner for one in (item if type(item) is tuple else (item,))]
            sizes[id(part)] = 1 + sum(map(size_of, flat))
        return sizes[id(part)]

    if node is not None and size_of(node) > MAX_VALUES:
        raise ConfigError(
            f"{where} stands for more than {MAX_VALUES:,} values; write it without aliases (*name)"
        )
