"""How text becomes the words that are searched: cut, lower-cased, without stop words, stemmed.

Law: catalogue and query go through the same function, so that what matches does not depend on which
side a word is written on.
"""

from __future__ import annotations

import re
from functools import lru_cache

from envfleet.llm.environments.webshop.stemmer import stem

# Letters and digits; an apostrophe or a point holds together what stands on both its sides ("2.5"),
# a comma only digits ("1,000").
_WORD = re.compile(r"\w+(?:(?:['’.]\w+)|(?:(?<=\d),\d\w*))*")  # noqa: RUF001

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())

MAX_WORD = 64
"""Longer runs of letters are cut: they are no words, and an index need not hold them."""


def words_of(text: str) -> list[str]:
    """Every searchable word of a text, in order, as often as it stands there."""
    return [word for word in map(_searchable, _WORD.findall(text.lower())) if word]


@lru_cache(maxsize=50_000)
def _searchable(word: str) -> str:
    """The stem of a word, or nothing if it is a stop word."""
    word = word[:MAX_WORD]
    if word.endswith(("'s", "’s")):  # noqa: RUF001
        word = word[:-2]
    return "" if word in STOP_WORDS else stem(word)
