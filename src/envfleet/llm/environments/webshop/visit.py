"""Where a shopper stands, what an action says, and what keywords find.

Law: all three are plain values and functions of the store, so an episode is a few words long.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from envfleet.llm.environments.webshop.catalogue import Product
from envfleet.llm.environments.webshop.index import label
from envfleet.llm.environments.webshop.store import Store

NUM_RESULTS = 50
MAX_QUERY = 1000
"""Characters of an action that are read; nothing that can be clicked is longer."""


@dataclass(frozen=True, slots=True)
class Visit:
    """Where a shopper stands."""

    goal: int
    seed: int
    place: str = "start"
    """start, search, results, item, done, or the name of a sub page."""
    keywords: str = ""
    number: int = 1
    """Of the page of results."""
    product: int = -1
    options: dict[str, str] = field(default_factory=dict)


def parse(action: Any) -> tuple[str, str]:
    """`name[words]` in lower case; two empty texts if it is nothing of the kind."""
    if not isinstance(action, str):
        return "", ""
    name, bracket, rest = action.strip().partition("[")
    name = name.lower() if len(name) < 10 else ""
    if not bracket or not rest.endswith("]") or name not in ("search", "click"):
        return "", ""
    words = rest[:-1][:MAX_QUERY].lower()
    return (name, words) if words else ("", "")


def find(store: Store, keywords: str, seed: int) -> Sequence[int]:
    """Products for keywords: by words, or by the special ones <r>, <a>, <c> and <q>."""
    first, *others = keywords.split(" ")
    rest = " ".join(others).strip()
    if first == "<r>":
        draw = random.Random(f"webshop {seed} {keywords}")
        return draw.sample(range(store.num_products), min(NUM_RESULTS, store.num_products))
    if first == "<a>":
        return cast("Sequence[int]", store.index.labelled(label("a", rest)))
    if first == "<c>":
        return cast("Sequence[int]", store.index.labelled(label("c", rest.partition(" ")[0])))
    if first == "<q>":
        return cast("Sequence[int]", store.index.labelled(label("q", rest)))
    return store.index.search(keywords, NUM_RESULTS)


def chosen(product: Product, before: Mapping[str, str], value: str) -> dict[str, str]:
    """The options after a value was clicked; of two options with one value the last counts."""
    names = [name for name, values in product.options.items() if value in values]
    return {**before, names[-1]: value}
