"""The words that a text is searched by: split, in lower case, without stop words, stemmed.

Law: catalogue and query go through the same function, so that a match does not depend on which side
a word is written on.

The stemmer is M. F. Porter's of 1980 with the author's later corrections (`bli` and `logi` in step
2), as search engines have it. It is written by hand because snowballstemmer's Porter stemmer lacks
them and gives other stems for "technology", "assembly", "trekking" and "xs", and so other results.
"""

from __future__ import annotations

import re
from functools import lru_cache

# Letters and digits; an apostrophe or a point joins what stands on both its sides ("2.5"), a comma
# joins digits only ("1,000").
_WORD = re.compile(r"\w+(?:(?:['’.]\w+)|(?:(?<=\d),\d\w*))*")  # noqa: RUF001

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())

MAX_WORD = 64
"""Longer words are cut off."""


def words_of(text: str) -> list[str]:
    """The searchable words of a text, in order, with repeats."""
    return [word for word in map(_searchable, _WORD.findall(text.lower())) if word]


@lru_cache(maxsize=50_000)
def _searchable(word: str) -> str:
    """The stem of a word, or nothing if it is a stop word."""
    word = word[:MAX_WORD]
    if word.endswith(("'s", "’s")):  # noqa: RUF001
        word = word[:-2]
    return "" if word in STOP_WORDS else stem(word)


# ---- stems --------------------------------------------------------------------------------------

_STEP_2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize",
    "bli": "ble", "alli": "al", "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize",
    "ation": "ate", "ator": "ate", "alism": "al", "iveness": "ive", "fulness": "ful",
    "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble", "logi": "log",
}  # fmt: skip
_STEP_3 = {
    "icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": "",
}  # fmt: skip
_STEP_4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip


def stem(word: str) -> str:
    """The stem of one word in lower case."""
    if len(word) <= 2:
        return word
    word = _without_past_and_gerund(_without_plural(word))
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    word = _replaced(word, _STEP_2)
    word = _replaced(word, _STEP_3)
    return _tidied(_without_word_ending(word))


def _word_shape(word: str) -> str:
    """One letter per letter: c for a consonant, v for a vowel."""
    shape: list[str] = []
    for letter in word:
        is_y_as_vowel = letter == "y" and bool(shape) and shape[-1] == "c"
        shape.append("v" if letter in "aeiou" or is_y_as_vowel else "c")
    return "".join(shape)


def _measure(word: str) -> int:
    """How often a vowel is followed by a consonant: the m of the paper."""
    return _word_shape(word).count("vc")


def _has_vowel(word: str) -> bool:
    return "v" in _word_shape(word)


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _word_shape(word)[-1] == "c"


def _ends_short(word: str) -> bool:
    """Consonant, vowel, consonant, and the last is not w, x or y: the *o of the paper."""
    return _word_shape(word)[-3:] == "cvc" and word[-1] not in "wxy"


def _without_plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    if word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def _without_past_and_gerund(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for ending in ("ed", "ing"):
        if word.endswith(ending):
            rest = word[: -len(ending)]
            return _restored(rest) if _has_vowel(rest) else word
    return word


def _restored(word: str) -> str:
    """Undo what an ending changed: hop(p)ing, fil(e)ing, siz(e)d."""
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_double(word) and word[-1] not in "lsz":
        return word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_short(word) else word


def _replaced(word: str, endings: dict[str, str]) -> str:
    """Only the longest ending that fits is tried, even if its condition fails."""
    for size in range(min(7, len(word)), 1, -1):
        replacement = endings.get(word[-size:])
        if replacement is not None:
            rest = word[:-size]
            return rest + replacement if _measure(rest) > 0 else word
    return word


def _without_word_ending(word: str) -> str:
    for ending in sorted((one for one in _STEP_4 if word.endswith(one)), key=len, reverse=True):
        rest = word[: -len(ending)]
        may_go = ending != "ion" or rest.endswith(("s", "t"))
        return rest if may_go and _measure(rest) > 1 else word
    return word


def _tidied(word: str) -> str:
    if word.endswith("e"):
        rest = word[:-1]
        size = _measure(rest)
        if size > 1 or (size == 1 and not _ends_short(rest)):
            word = rest
    if word.endswith("ll") and _measure(word[:-1]) > 1:
        word = word[:-1]
    return word
