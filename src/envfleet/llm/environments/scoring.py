"""Whether an answer is right: the same text, the same number, or equal algebra.

Each of the three accepts all that the one before accepts. Law: an answer is never evaluated as
code, and any text is decided within milliseconds.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from envfleet.llm.environments.algebra import is_same_algebra

Scoring = Literal["exact", "numeric", "symbolic"]

MAX_NUMBER_CHARS = 200

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\$?(?P<sign_after>[-+]?)"
    rf"(?:(?:(?P<mixed>[0-9]+)[ ]+)?(?P<above>{_WHOLE})/(?P<below>{_WHOLE})"
    rf"|(?P<decimal>{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?P<percent>%?)\.?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


def is_right(answer: str, expected: str | None, scoring: Scoring = "exact") -> bool:
    """Whether an answer is the expected one; never, if none is expected."""
    if not expected or not (said := normalised(answer)):
        return False
    if said == normalised(expected):
        return True
    if scoring == "exact":
        return False
    if is_same_number(answer, expected):
        return True
    return scoring == "symbolic" and is_same_algebra(answer, expected)


def normalised(text: str) -> str:
    """The text in lower case without white space."""
    return "".join(text.lower().split())


def is_same_number(left: str, right: str) -> bool:
    """Whether both are numbers, and exactly the same one.

    A per cent sign on one side only is read both ways: 50% is 50 and one half.
    """
    one, other = number(left), number(right)
    if one is None or other is None:
        return False
    (value, is_percent), (other_value, other_is_percent) = one, other
    if value == other_value:
        return True
    if is_percent == other_is_percent:
        return False
    return value == other_value * 100 if is_percent else value * 100 == other_value


def number(text: str) -> tuple[Fraction, bool] | None:
    r"""The number in a text, and whether it is in per cent; None if the text is no number.

    Understands `42`, `-1,234.50`, `$3`, `3/4`, `1 3/4`, `75%`, and `\frac{3}{4}` in LaTeX.
    """
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = text.replace("\\$", "$").replace("\\%", "%").replace("\u2212", "-")
    text = _FRACTION.sub(r" \1/\2", text).strip()
    found = _NUMBER.fullmatch(text.replace("- ", "-"))
    if found is None or (found["sign"] and found["sign_after"]):
        return None
    if found["decimal"] is not None:
        value = Fraction(found["decimal"].replace(",", ""))
    else:
        below = int(found["below"].replace(",", ""))
        if below == 0:
            return None
        value = Fraction(int(found["above"].replace(",", "")), below) + int(found["mixed"] or 0)
    is_negative = "-" in (found["sign"], found["sign_after"])
    return (-value if is_negative else value), bool(found["percent"])
