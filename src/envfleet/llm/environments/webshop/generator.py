"""A catalogue generated from a seed, in the form of WebShop's three files.

Law: row i depends on the seed and on i only, so a catalogue of 1000 is the beginning of one of
100,000. Rows are as irregular as real ones: price ranges, no price, no options, one bullet as text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from envfleet.llm.environments.webshop.vocabulary import (
    ASKED,
    BULLETS,
    CHOICES,
    KINDS,
    OCCASIONS,
    PRAISE,
    SENTENCES,
    SYLLABLES,
    ProductKind,
)

VERSION = 1
"""Raise this whenever the same seed gives other rows."""

WITH_INSTRUCTION = 0.42
WITH_HUMAN = 0.2
WITH_OPTIONS = 0.6
WITH_RANGE = 0.13
WITHOUT_PRICE = 0.05

_BASE36 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NUM_ASINS = 36**8
_STRIDE = 1_743_541_830_001  # has no factor in common with 36**8, so the ids of one seed differ

Row = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]


def generate(num_products: int, seed: int = 0) -> Iterator[Row]:
    """Rows of a catalogue: the item, its attributes, its human instructions."""
    return (row(number, seed) for number in range(num_products))


def row(number: int, seed: int = 0) -> Row:
    """One row of the catalogue of this seed."""
    draw = random.Random(f"webshop {seed} {number}")
    asin = asin_of(number, seed)
    kind = draw.choice(KINDS)
    attributes = draw.sample(kind.attributes, draw.randint(3, 5))
    words = _words(draw, kind, attributes)
    item = {
        "asin": asin,
        "name": _product_title(draw, words),
        "full_description": " ".join(
            sentence.format(**words) for sentence in draw.sample(SENTENCES, draw.randint(3, 7))
        ),
        "small_description": _bullets(draw, words),
        "pricing": _pricing(draw, kind.prices),
        "images": [f"https://images.example/{asin}.jpg"],
        "product_category": kind.path,
        "category": kind.category,
        "query": kind.query,
        "average_rating": round(draw.uniform(2.5, 5.0), 1),
        "customization_options": _product_options(draw, kind, asin),
    }
    about: dict[str, Any] = {"attributes": attributes}
    if draw.random() < WITH_INSTRUCTION:
        asked = draw.sample(attributes, draw.randint(1, 3))
        about |= {
            "instruction": f"Find me {', '.join(asked)} {kind.query}",
            "instruction_attributes": asked,
        }
    human = [_asked(draw, item, words, attributes)] if draw.random() < WITH_HUMAN else []
    return item, about, human


def asin_of(number: int, seed: int) -> str:
    """The id of a row; all ids of one seed differ."""
    left = (number * _STRIDE + _first_asin(seed)) % _NUM_ASINS
    digits = []
    for _ in range(8):
        left, digit = divmod(left, 36)
        digits.append(_BASE36[digit])
    return "B0" + "".join(digits)


@cache
def _first_asin(seed: int) -> int:
    return random.Random(f"asins {seed}").randrange(_NUM_ASINS)


def write_catalogue(folder: Path, num_products: int, seed: int = 0) -> None:
    """Write the three files as WebShop has them, row by row.

    The files are items_shuffle.json, items_ins_v2.json and items_human_ins.json. With 1000 products
    the names of the first two end in _1000, as `dataset="small"` expects.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = "_1000" if num_products == 1000 else ""
    paths = (f"items_shuffle{size}.json", f"items_ins_v2{size}.json", "items_human_ins.json")
    with (
        (folder / paths[0]).open("w", encoding="utf-8") as items,
        (folder / paths[1]).open("w", encoding="utf-8") as abouts,
        (folder / paths[2]).open("w", encoding="utf-8") as humans,
    ):
        has_human = False
        for number, (item, about, human) in enumerate(generate(num_products, seed)):
            before = ",\n" if number else ""
            asin = json.dumps(item["asin"])
            items.write((before or "[") + json.dumps(item))
            abouts.write((before or "{") + f"{asin}: {json.dumps(about)}")
            if human:
                humans.write((",\n" if has_human else "{") + f"{asin}: {json.dumps(human)}")
                has_human = True
        items.write("]" if num_products else "[]")
        abouts.write("}" if num_products else "{}")
        humans.write("}" if has_human else "{}")


def _words(draw: random.Random, kind: ProductKind, attributes: list[str]) -> dict[str, str]:
    brand = "".join(draw.choices(SYLLABLES, k=draw.randint(2, 4))).capitalize()
    return {
        "brand": brand,
        "town": "".join(draw.choices(SYLLABLES, k=3)).capitalize(),
        "noun": draw.choice(kind.nouns),
        "query": kind.query,
        "praise": draw.choice(PRAISE),
        "occasion": draw.choice(OCCASIONS),
        "first": attributes[0],
        "second": attributes[1],
        "third": attributes[2],
        "months": str(draw.choice((3, 6, 12, 18, 24, 36))),
        "year": str(draw.randint(1890, 2020)),
        "weight": str(draw.randint(1, 400)),
        "model": f"{brand[:2].upper()}{draw.randint(100, 9999)}",
    }


def _product_title(draw: random.Random, words: dict[str, str]) -> str:
    parts = [words["brand"], words["praise"], words["noun"].title()]
    if draw.random() < 0.5:
        parts.append(f"for {words['occasion'].title()},")
    parts.append(words["first"].title())
    if draw.random() < 0.6:
        parts.append(f"({words['model']})")
    return " ".join(parts)


def _bullets(draw: random.Random, words: dict[str, str]) -> list[str] | str:
    bullets = [bullet.format(**words) for bullet in draw.sample(BULLETS, draw.randint(1, 5))]
    return bullets[0] if len(bullets) == 1 else bullets


def _pricing(draw: random.Random, prices: tuple[float, float]) -> str:
    low, high = prices
    # Most products are cheap: the square of a uniform number is mostly small.
    price = low + (high - low) * draw.random() ** 2
    chance = draw.random()
    if chance < WITHOUT_PRICE:
        return ""
    if chance < WITHOUT_PRICE + WITH_RANGE:
        return f"${price:,.2f}${price * draw.uniform(1.2, 2.5):,.2f}"
    return f"${price:,.2f}"


def _product_options(
    draw: random.Random, kind: ProductKind, asin: str
) -> dict[str, list[dict[str, Any]]] | str:
    if draw.random() >= WITH_OPTIONS:
        return ""
    names = draw.sample(kind.choices, draw.randint(1, min(2, len(kind.choices))))
    options = {}
    for name in names:
        every = CHOICES[name]
        values = draw.sample(every, draw.randint(2, min(7, len(every))))
        options[name.partition("/")[0].title()] = [
            {
                "value": value,
                "price": 0,
                "image": f"https://images.example/{asin}-{place}.jpg" if name == "color" else None,
            }
            for place, value in enumerate(values)
        ]
    return options


def _asked(
    draw: random.Random, item: dict[str, Any], words: dict[str, str], attributes: list[str]
) -> dict[str, Any]:
    """A human instruction: its words, some attributes, some options."""
    wanted = draw.sample(attributes, draw.randint(1, 2))
    offered = item["customization_options"] or {}
    chosen = [draw.choice(values)["value"].lower() for values in offered.values()]
    options = f" in {' and '.join(chosen)}" if chosen else ""
    text = draw.choice(ASKED).format(**words, attributes=" and ".join(wanted), options=options)
    return {
        "asin": item["asin"],
        "instruction": f"{text}.",
        "attributes": attributes,
        "instruction_attributes": wanted,
        "instruction_options": chosen,
    }
