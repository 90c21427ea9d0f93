"""The state of a visit to the shop, parsing of actions, and search by keywords.

Law: a visit is a few plain values, so an episode is small to pickle.
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
"""Characters of an action that are read; no text that can be clicked is longer."""


@dataclass(frozen=True, slots=True)
class Visit:
    """The state of a visit."""

    goal: int
    seed: int
    place: str = "start"
    """start, search, results, item, done, or the name of a sub page."""
    keywords: str = ""
    number: int = 1
    """The number of the page of results."""
    product: int = -1
    options: dict[str, str] = field(default_factory=dict)


def parse(action: Any) -> tuple[str, str]:
    """Name and words of `name[words]`, in lower case; two empty texts for any other action."""
    if not isinstance(action, str):
        return "", ""
    name, bracket, rest = action.strip().partition("[")
    name = name.lower() if len(name) < 10 else ""
    if not bracket or not rest.endswith("]") or name not in ("search", "click"):
        return "", ""
    words = rest[:-1][:MAX_QUERY].lower()
    return (name, words) if words else ("", "")


def find(store: Store, keywords: str, seed: int) -> Sequence[int]:
    """The products for keywords, which may begin with <r>, <a>, <c> or <q>."""
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
    """The options after a click on a value; if two options have it, the last one gets it."""
    names = [name for name, values in product.options.items() if value in values]
    return {**before, names[-1]: value}
