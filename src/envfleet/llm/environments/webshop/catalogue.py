"""Products, and how they are read from the irregular rows of WebShop's files.

Law: a row becomes the same product in every process. Where the original draws a random number while
it loads (the price within a range), this takes it from a digest of the product's id.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

NO_PRICE = 100.0
BRANCH = " \u203a "
"""Separates the branches of a product category."""

NO_ATTRIBUTES = ("DUMMY_ATTR",)
NO_CAP = 1_000_000.0
MAX_ASIN = 10
_CAPS = [10.0 * tens for tens in range(1, 100)]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A wish in words, with the attributes and options that a purchase is checked by."""

    text: str
    attributes: Sequence[str]
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Product:
    """One product of the shop."""

    asin: str
    title: str
    description: str = ""
    bullets: Sequence[str] = ()
    prices: Sequence[float] = (NO_PRICE,)
    """One price, or the two ends of a range."""
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    attributes: Sequence[str] = NO_ATTRIBUTES
    category: str = ""
    query: str = ""
    product_category: str = ""
    rating: str = "N.A."
    reviews: Sequence[Sequence[str]] = ()
    """Title, score and body of each."""
    wanted: Instruction | None = None
    """The instruction of its synthetic goals."""
    human: Sequence[Instruction] = ()
    """Instructions that people wrote."""

    @property
    def price_tag(self) -> str:
        """The price as the shop writes it."""
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def price(self) -> float:
        """The price at a purchase; of a range, a fixed value within it."""
        if len(self.prices) == 1:
            return self.prices[0]
        low, high = self.prices
        return low + (high - low) * stable_fraction(f"price {self.asin}")

    @property
    def searchable(self) -> str:
        """The text that is searched: title, description, first bullet and options."""
        options = ", and ".join(
            f"{name}: {', '.join(values)}" for name, values in self.options.items()
        )
        first = self.bullets[0] if self.bullets else ""
        return " ".join((self.title, self.description, first, options)).lower()

    def to_bytes(self) -> bytes:
        """As one line of JSON."""
        return _ENCODER.encode(self).encode()

    @classmethod
    def from_bytes(cls, line: bytes) -> Product:
        """What `to_bytes` wrote."""
        row = json.loads(line)
        wanted, human = row.pop("wanted"), row.pop("human")
        return cls(
            **row,
            wanted=Instruction(**wanted) if wanted else None,
            human=[Instruction(**one) for one in human],
        )


def _record_fields(record: Any) -> dict[str, Any]:
    """Like `dataclasses.asdict` without its copies, which took half the time of building."""
    return {name: getattr(record, name) for name in record.__slots__}


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_record_fields)


def stable_fraction(key: str) -> float:
    """A number in [0, 1) that depends on the key only."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48


def price_cap(price: float, key: str) -> float:
    """The most a goal allows: the higher of two of the next four multiples of ten."""
    above = [cap for cap in _CAPS if cap > price][:4]
    if len(above) < 2:
        return NO_CAP
    pairs = list(combinations(above, 2))
    return pairs[int(stable_fraction(f"cap {key}") * len(pairs))][1]


# ---- rows of files ------------------------------------------------------------------------------


def products_of(rows: Iterator[tuple[Any, Any, Any]]) -> Iterator[Product]:
    """Products of rows (item, its attributes, its human instructions), each id once."""
    seen: set[str] = set()
    for item, attributes, human in rows:
        product = product_of(item, attributes, human)
        if product is not None and product.asin not in seen:
            seen.add(product.asin)
            yield product


def product_of(item: Any, about: Any = None, human: Any = None) -> Product | None:
    """The product of one row, or None if the row has no usable id.

    Args:
        item: A row of items_shuffle.json, or of documents.jsonl.
        about: Its entry in items_ins_v2.json, if any.
        human: Its entry in items_human_ins.json, if any.
    """
    if isinstance(item, dict) and isinstance(item.get("product"), dict):
        item = item["product"]
    if not isinstance(item, dict) or not _is_asin(item.get("asin")):
        return None
    about = about if isinstance(about, dict) else {}
    if "attributes" in about:
        attributes = _product_texts(about["attributes"])
    elif "Attributes" in item:
        attributes = _product_texts(item["Attributes"])
    else:
        attributes = list(NO_ATTRIBUTES)
    return Product(
        asin=item["asin"],
        title=_product_text(item.get("name")),
        description=_product_text(item.get("full_description")),
        bullets=_product_texts(item.get("small_description")),
        prices=prices_of(item.get("pricing")),
        options=options_of(item.get("customization_options"), item.get("options")),
        attributes=attributes,
        category=_product_text(item.get("category")),
        query=_product_text(item.get("query")).lower().strip(),
        product_category=_product_text(item.get("product_category")),
        rating=_product_text(item.get("Rating")) or "N.A.",
        reviews=_reviews(item.get("Reviews")),
        wanted=_instruction(about, "instruction"),
        human=_human(item.get("instructions") if human is None else human),
    )


def prices_of(pricing: Any) -> list[float]:
    """One or two prices of "$5.99", "$5.99$8.49", "$1,299.00", a number, a list, or nothing."""
    parts: list[Any] = []
    if isinstance(pricing, str):
        parts = pricing.split("$")[1:] if "$" in pricing else [pricing]
    elif isinstance(pricing, list):
        parts = pricing
    elif pricing is not None:
        parts = [pricing]
    prices = [price for price in (_price(part) for part in parts) if price is not None][:2]
    return sorted(prices) or [NO_PRICE]


def options_of(customization: Any, ready: Any = None) -> dict[str, list[str]]:
    """The values of each option; `ready` is used if there is no `customization`.

    Values are in lower case with bars for slashes, since they are parts of actions.
    """
    source = customization if isinstance(customization, dict) else ready
    options: dict[str, list[str]] = {}
    for name, contents in source.items() if isinstance(source, dict) else ():
        if not isinstance(contents, list):
            continue
        said = (one.get("value") if isinstance(one, dict) else one for one in contents)
        values = [_product_text(one).strip().replace("/", " | ").lower() for one in said]
        values = [" ".join(value.split("\n")) for value in values if value]
        if values:
            options[_product_text(name).lower()] = values
    return options


def _is_asin(asin: Any) -> bool:
    return isinstance(asin, str) and 0 < len(asin) <= MAX_ASIN and asin != "nan"


def _product_text(value: Any) -> str:
    """A text of any value in a row: nothing, a number, a list of texts, or a text."""
    if isinstance(value, str):
        # Lone surrogates, such as "\ud83d", cannot be encoded.
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return " ".join(_product_text(one) for one in value)
    return "" if value is None or isinstance(value, bool | dict) else str(value)


def _product_texts(value: Any) -> list[str]:
    return (
        [_product_text(one) for one in value] if isinstance(value, list) else [_product_text(value)]
    )


def _price(part: Any) -> float | None:
    text = part if isinstance(part, str) else repr(part)
    digits = re.sub(r"[^\d.]", "", text, flags=re.ASCII) if isinstance(part, str) else text
    try:
        price = float(digits)
    except ValueError:
        return None
    return price if math.isfinite(price) and price >= 0 else None


def _reviews(reviews: Any) -> list[list[str]]:
    rows = [one for one in reviews if isinstance(one, dict)] if isinstance(reviews, list) else []
    return [
        [
            _product_text(one.get("title")),
            _product_text(one.get("score", one.get("stars"))),
            _product_text(one.get("body", one.get("review"))),
        ]
        for one in rows
    ]


def _instruction(row: Any, words: str) -> Instruction | None:
    """The instruction of a row, if it has words and at least one attribute."""
    if not isinstance(row, dict):
        return None
    text = _product_text(row.get(words))
    attributes = row.get("instruction_attributes")
    checked = [one for one in _product_texts(attributes) if one] if attributes else []
    if not text or not checked:
        return None
    options = row.get("instruction_options")
    chosen = [_product_text(one) for one in options] if isinstance(options, list) else []
    return Instruction(text, checked, [one for one in chosen if one])


def _human(rows: Any) -> list[Instruction]:
    if not isinstance(rows, list):
        return []
    found = (_instruction(row, "instruction") for row in rows)
    return [one for one in found if one is not None]
