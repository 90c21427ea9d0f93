"""Goals: one for each human instruction, or for each combination of a product's options.

Law: on disk a goal is two numbers (a product, and which of its instructions or combinations), eight
bytes in all; its words are made when it is used. Goals are shuffled with a fixed seed, so that a
number means the same goal in every process.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.llm.environments.base import Mode
from envfleet.llm.environments.webshop.catalogue import NO_CAP, Product, price_cap
from envfleet.llm.environments.webshop.mapped_files import saved

SHUFFLE_SEED = 233
ORDER_SEED = 42
MAX_COMBINATIONS = 10_000
"""The most goals of one product."""

NUM_TEST, NUM_VAL = 500, 1000

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Goal:
    """What to buy, in words, and what a purchase is checked by."""

    asin: str
    text: str
    attributes: Sequence[str]
    options: Mapping[str, str] | Sequence[str]
    """By name for a synthetic goal, values only for a human one."""
    price_upper: float
    title: str
    category: str
    query: str
    product_category: str


FilterGoals = Callable[[int, Goal], bool]


def synthetic_goal(product: Product, combination: int) -> Goal:
    """The goal for one combination of a product's options."""
    wanted = product.wanted
    if wanted is None:
        raise ValueError(f"{product.asin} has no instruction")
    options = combination_of(product.options, combination)
    cap = price_cap(product.price, product.asin)
    chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
    text = f"{wanted.text}{f' with {chosen}' if chosen else ''}{_price_text(cap)}"
    return _goal(product, text, wanted.attributes, options, cap)


def human_goal(product: Product, number: int) -> Goal:
    """The goal of one of a product's human instructions."""
    wanted = product.human[number]
    cap = price_cap(product.price, f"{product.asin} {number}")
    text = wanted.text.strip(".") + _price_text(cap)
    return _goal(product, text, wanted.attributes, wanted.options, cap)


def num_combinations(options: Mapping[str, Sequence[str]]) -> int:
    """How many goals a product's options make."""
    return min(prod(len(values) for values in options.values()), MAX_COMBINATIONS)


def combination_of(options: Mapping[str, Sequence[str]], number: int) -> dict[str, str]:
    """The combination of this number: one value of each option, in the order of sorted names."""
    chosen: dict[str, str] = {}
    for name in sorted(options, reverse=True):
        number, place = divmod(number, len(options[name]))
        chosen[name] = options[name][place]
    return dict(sorted(chosen.items()))


def goal_place(seed: int, mode: Mode, num_goals: int) -> int:
    """The place of an episode's goal; test, val and train have different goals.

    The first 500 are for tests, the next 1000 for validation, the rest for training. Where there
    are not more than 1500, a tenth is for tests and a fifth for validation.
    """
    num_test, num_val = NUM_TEST, NUM_VAL
    if num_goals <= NUM_TEST + NUM_VAL:
        num_test, num_val = max(num_goals // 10, 1), max(num_goals // 5, 1)
    spans = {
        "test": (0, num_test),
        "val": (num_test, num_test + num_val),
        "train": (num_test + num_val, num_goals),
    }
    first, end = spans[mode]
    # One or two goals cannot be split in three: the last goal is used for what is missing.
    first, end = min(first, num_goals - 1), min(end, num_goals)
    return first + seed % max(end - first, 1)


def shuffled(num: int, seed: int) -> Numbers:
    """The numbers below `num`, in the order `random.shuffle` gives a list after this seed."""
    numbers = array("i", range(num))
    random.Random(seed).shuffle(numbers)
    return np.array(numbers, np.int32)


def pick(
    num_goals: int,
    weights: npt.NDArray[np.float32],
    goal_at: Callable[[int], Goal],
    filter_goals: FilterGoals | None,
    limit: int,
) -> Numbers:
    """The goals that pass the filter, or `limit` of them, drawn by weight."""
    kept = np.arange(num_goals, dtype=np.int32)
    if filter_goals is not None:
        wanted = [place for place in range(num_goals) if filter_goals(place, goal_at(place))]
        kept = np.array(wanted, np.int32)
    if 0 <= limit < len(kept):
        draw = np.random.Generator(np.random.PCG64(SHUFFLE_SEED))
        # The smallest exponential waiting times: a weighted draw without replacement.
        waits = draw.exponential(size=len(kept)) / weights[kept]
        kept = kept[np.argsort(waits, kind="stable")[:limit]]
    return kept


class GoalWriter:
    """Collects the goals of products, and writes the lists of synthetic and human ones."""

    def __init__(self) -> None:
        self._synthetic, self._human = array("i"), array("i")
        # Per product with an instruction: how many goals, how many attributes, and which.
        self._num_goals, self._num_attributes, self._attributes = array("i"), array("i"), array("i")
        self._numbers: dict[str, int] = {}

    def add(self, number: int, product: Product) -> None:
        """Add the goals of the next product."""
        for place in range(len(product.human)):
            self._human.extend((number, place))
        if product.wanted is None:
            return
        num_goals = num_combinations(product.options)
        for combination in range(num_goals):
            self._synthetic.extend((number, combination))
        numbers = self._numbers
        self._num_goals.append(num_goals)
        self._num_attributes.append(len(product.wanted.attributes))
        self._attributes.extend(
            numbers.setdefault(attribute, len(numbers)) for attribute in product.wanted.attributes
        )

    def finish(self, folder: Path) -> dict[str, int]:
        """Write the goals; returns how many there are of each kind."""
        ones = np.ones(len(self._human) // 2, np.float32)
        return {
            "synthetic": _write_goals(folder, "synthetic", self._synthetic, self._weights()),
            "human": _write_goals(folder, "human", self._human, ones),
        }

    def _weights(self) -> npt.NDArray[np.float32]:
        """Weights of goals: rare attributes weigh more."""
        num_goals = np.array(self._num_goals, np.int64)
        if not len(num_goals):
            return np.ones(0, np.float32)
        num_attributes = np.array(self._num_attributes, np.int64)
        attributes = np.array(self._attributes, np.int64)
        popularity = np.bincount(attributes, np.repeat(num_goals, num_attributes))
        firsts = np.cumsum(num_attributes) - num_attributes
        means = np.add.reduceat(1.0 / popularity[attributes], firsts) / num_attributes
        return np.repeat(means, num_goals).astype(np.float32)


def _write_goals(folder: Path, kind: str, flat: Any, weights: npt.NDArray[np.float32]) -> int:
    order = shuffled(len(weights), SHUFFLE_SEED)
    saved(folder / f"{kind}_goals.npy", np.array(flat, np.int32).reshape(-1, 2)[order])
    saved(folder / f"{kind}_weights.npy", weights[order])
    saved(folder / f"{kind}_order.npy", shuffled(len(weights), ORDER_SEED))
    return len(weights)


def _price_text(cap: float) -> str:
    return "" if cap == NO_CAP else f", and price lower than {cap:.2f} dollars"


def _goal(
    product: Product,
    text: str,
    attributes: Sequence[str],
    options: Mapping[str, str] | Sequence[str],
    cap: float,
) -> Goal:
    return Goal(
        asin=product.asin,
        text=text,
        attributes=attributes,
        options=options,
        price_upper=cap,
        title=product.title,
        category=product.category,
        query=product.query,
        product_category=product.product_category,
    )
