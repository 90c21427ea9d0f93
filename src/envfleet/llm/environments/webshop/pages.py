"""The pages of the shop: their texts, and what can be clicked.

Law: a page depends on what it shows only, not on what happened before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envfleet.llm.environments.webshop.catalogue import Product

SEPARATOR = " [SEP] "
PER_PAGE = 10

BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
ANY_SEARCH = "search[<content>]"


@dataclass(frozen=True, slots=True)
class Page:
    """The visible texts in order, and the possible actions."""

    texts: Sequence[str]
    buttons: Sequence[str] = ()
    """Their texts; a click names them in lower case."""
    choices: Sequence[str] = ()
    """Product ids or values of options, in lower case."""
    has_search_bar: bool = False

    @property
    def observation(self) -> str:
        """All visible texts, in one line."""
        return SEPARATOR.join(text.strip() for text in self.texts)

    @property
    def clickables(self) -> list[str]:
        """What can be clicked, without repeats, buttons first."""
        return list(dict.fromkeys((*(button.lower() for button in self.buttons), *self.choices)))

    @property
    def actions(self) -> list[str]:
        """Every possible action, as it has to be written."""
        clicks = [f"click[{clickable}]" for clickable in self.clickables]
        if self.is_past_the_end:
            clicks.remove(f"click[{NEXT.lower()}]")
        return [ANY_SEARCH, *clicks] if self.has_search_bar else clicks

    @property
    def is_past_the_end(self) -> bool:
        """Whether it is a page of results after the last one, which has no next page."""
        return not self.choices and list(self.buttons) == [BACK, PREVIOUS, NEXT]


def search_page(instruction: str) -> Page:
    """The first page of a visit."""
    return Page(("WebShop", "Instruction:", instruction, "Search"), has_search_bar=True)


def results_page(instruction: str, products: Sequence[Product], number: int, total: int) -> Page:
    """One page of the products that a search found."""
    buttons = (BACK, PREVIOUS, NEXT) if number > 1 else (BACK, NEXT)
    texts = ["Instruction:", instruction, BACK, f"Page {number} (Total results: {total})"]
    texts += buttons[1:]
    for product in products:
        texts += (product.asin, product.title, product.price_tag)
    return Page(texts, buttons, [product.asin.lower() for product in products])


def item_page(instruction: str, product: Product, *, has_attributes: bool) -> Page:
    """A product with its options."""
    subs = SUB_PAGES if has_attributes else SUB_PAGES[:-1]
    texts = ["Instruction:", instruction, BACK, PREVIOUS]
    for name, values in product.options.items():
        texts += (name, *values)
    texts += (product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}", *subs, BUY)
    values = [value for values in product.options.values() for value in values]
    return Page(texts, (BACK, PREVIOUS, *subs, BUY), values)


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """More about a product."""
    texts = ["Instruction:", instruction, BACK, PREVIOUS]
    if name == "Description":
        texts.append(product.description)
    elif name == "Features":
        texts += product.bullets
    elif name == "Reviews":
        for title, stars, body in product.reviews:
            texts += (f'"{title}"', stars, body)
    else:
        texts += (*product.attributes, product.category, product.query, product.product_category)
    return Page(texts, (BACK, PREVIOUS))


def done_page(product: Product, options: Mapping[str, str], reward: float) -> Page:
    """The page after the purchase."""
    chosen = (f"{name}: {value}" for name, value in options.items())
    return Page(("Thank you for your purchase", product.asin, *chosen, f"Your score: {reward}"))
