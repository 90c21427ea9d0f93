"""The reward of a purchase: how much of the goal it meets, times whether it is the right kind.

Law: reward = r_type * (attributes met + options met + price met) / (attributes + options + 1), in
[0, 1]. The goal's own product with the goal's options gives 1 if it has the wanted attributes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from envfleet.llm.environments.webshop.catalogue import BRANCH, Product
from envfleet.llm.environments.webshop.goals import Goal
from envfleet.llm.extras import import_extra

fuzz = import_extra(
    "rapidfuzz.fuzz", wanted_by="env type webshop", install="pip install 'envfleet[llm]'"
)

ALIKE = 85
"""Texts more similar than this, of 100, mean the same."""

Nouns = Callable[[str], Sequence[str]]

# The first of these that occurs in a text is its colour.
_COLOURS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown "
    "burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee "
    "cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia "
    "gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender "
    "lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor "
    "mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red "
    "rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan "
    "taupe teal tiger turquoise violet walnut wheat white wine yellow"
)
COLOURS = tuple(_COLOURS.split())

_OTHER_WORDS = (
    "a an and or nor but the this that these those of in on at by for from to with without into "
    "onto over under up down out off as is are be was were it its you your our my we us they them "
    "all any each every more most other some such no not only own same so than too very new best "
    "great good perfect easy free non super extra ultra multi made make makes fits fit use used "
    "uses using includes included including up per vs via etc"
)
_NOT_NOUNS = frozenset(_OTHER_WORDS.split())
_SIGNS = re.compile(r"[^a-z0-9]+")
_TITLE_WORD = re.compile(r"[a-z][a-z'-]*[a-z]")


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and its parts, as an info reports them."""

    reward: float
    parts: dict[str, float | bool]


def score(
    product: Product, goal: Goal, chosen: Mapping[str, str], nouns: Nouns | None = None
) -> Score:
    """The reward for buying this product with these options."""
    wanted = _wanted_options(goal)
    kind = type_parts(product, goal, nouns or nouns_of)
    num_attributes = sum(has_attribute(product, attribute) for attribute in goal.attributes)
    num_options = num_options_met(list(chosen.values()), wanted)
    is_price_met = product.price <= goal.price_upper
    total = len(goal.attributes) + len(wanted) + 1
    reward = kind["r_type"] * (num_attributes + num_options + is_price_met) / total
    parts: dict[str, float | bool] = dict(kind)
    parts["r_att"] = num_attributes / max(len(goal.attributes), 1)
    parts["w_att"] = len(goal.attributes) / total
    if wanted:
        parts["r_option"] = num_options / len(wanted)
        parts["w_option"] = len(wanted) / total
    parts["r_price"] = is_price_met
    parts["w_price"] = 1 / total
    return Score(float(reward), parts)


def type_parts(product: Product, goal: Goal, nouns: Nouns) -> dict[str, float | bool]:
    """Whether it is the right kind: by the query, the category tree, and the titles' nouns."""
    query_match = product.query == goal.query
    category_match = len(_branches(product.product_category) & _branches(goal.product_category)) > 1
    desired = list(nouns(goal.title))
    shared = set(nouns(product.title)) & set(desired)
    title_score = len(shared) / len(desired) if desired else 0.2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1 if title_score else 0.0
    return {
        "r_type": r_type,
        "query_match": query_match,
        "category_match": category_match,
        "title_score": title_score,
    }


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether a product has a similar attribute, or the same words in its text."""
    return any(similarity(own, attribute) > ALIKE for own in product.attributes) or any(
        attribute in text.lower()
        for text in (product.title, " ".join(product.bullets), product.description)
    )


def num_options_met(chosen: Sequence[str], wanted: Sequence[str | tuple[str, str]]) -> int:
    """How many of the wanted options are similar to a chosen one."""
    return sum(any(_is_option_met(one, goal) for one in chosen) for goal in wanted)


def nouns_of(title: str) -> list[str]:
    """The nouns of a title by a simple rule: its words without numbers and function words.

    A tagger too takes nearly every word of a title for a noun.
    """
    found: list[str] = _TITLE_WORD.findall(title.lower())
    return [word for word in found if word not in _NOT_NOUNS]


def colour_of(text: str) -> str:
    """The first colour in a text; without one the text itself."""
    return next((colour for colour in COLOURS if colour in text), text)


def similarity(one: str, other: str) -> int:
    """How similar two texts are by their words, from 0 to 100, ignoring case, signs and accents.

    Words of one that all stand in the other give 100. It is rounded, as the original's are.
    """
    ratio: float = fuzz.token_set_ratio(_plain_words(one), _plain_words(other))
    return round(ratio)


def _plain_words(text: str) -> str:
    return _SIGNS.sub(" ", text.encode("ascii", "ignore").decode("ascii").lower())


def _wanted_options(goal: Goal) -> list[str | tuple[str, str]]:
    if isinstance(goal.options, Mapping):
        return list(goal.options.items())
    return list(goal.options)


def _is_option_met(chosen: str, wanted: str | tuple[str, str]) -> bool:
    """Whether a chosen value is similar to a wanted option, by its colour or with its name.

    As in the original, "large" meets ("size", "x-large"): its words are among the wanted ones. The
    same value always counts; else "charred oak", which has "red" in it, would not meet itself.
    """
    if isinstance(wanted, tuple):
        name, value = wanted
        text = value if value in COLOURS else f"{name} {value}"
    else:
        value, text = wanted, colour_of(wanted)
    return chosen == value or similarity(colour_of(chosen), text) > ALIKE


def _branches(path: str) -> set[str]:
    return {branch.strip() for branch in path.split(BRANCH.strip())}
