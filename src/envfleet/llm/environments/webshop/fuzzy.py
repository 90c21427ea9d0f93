"""How alike two short texts are by their words, 0 to 100: the token set ratio.

Law: a text whose words are a part of the other's scores 100, in any order and however often they
repeat. Texts are compared without case, without signs, and without what is not ASCII.
"""

from __future__ import annotations

import re

_SIGNS = re.compile(r"[^a-z0-9]+")


def token_set_ratio(one: str, other: str) -> int:
    """The best ratio among the words both have, and those with what each has besides.

    It is rounded to a whole number, as rewards are compared with one.
    """
    ours, theirs = _words(one), _words(other)
    if not ours or not theirs:
        return 0
    shared = " ".join(sorted(ours & theirs))
    left, right = " ".join(sorted(ours - theirs)), " ".join(sorted(theirs - ours))
    if shared and not (left and right):
        return 100
    gap = 1 if shared else 0
    left_size = len(shared) + gap + len(left)
    right_size = len(shared) + gap + len(right)
    # What both begin with costs nothing, so only what they have besides is compared.
    ratios = [_ratio(_edits(left, right), left_size + right_size)]
    if shared:
        ratios.append(_ratio(gap + len(left), len(shared) + left_size))
        ratios.append(_ratio(gap + len(right), len(shared) + right_size))
    return round(max(ratios))


def _words(text: str) -> set[str]:
    plain = text.encode("ascii", "ignore").decode("ascii").lower()
    return set(_SIGNS.sub(" ", plain).split())


def _ratio(edits: int, size: int) -> float:
    return 100.0 - 100.0 * edits / size


def _edits(one: str, other: str) -> int:
    """Letters to take out and put in to make one text of the other."""
    return len(one) + len(other) - 2 * _common(one, other)


def _common(one: str, other: str) -> int:
    """Length of the longest common subsequence, one row of its table as the bits of an integer."""
    places: dict[str, int] = {}
    for at, letter in enumerate(one):
        places[letter] = places.get(letter, 0) | 1 << at
    whole = (1 << len(one)) - 1
    row = whole
    for letter in other:
        match = row & places.get(letter, 0)
        row = (row + match | row - match) & whole
    return len(one) - row.bit_count()
