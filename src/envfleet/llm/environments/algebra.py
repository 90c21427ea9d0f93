"""Whether two short texts of algebra, plain or LaTeX, are equal.

It is written by hand because the text is a model's: parsers such as sympy's evaluate it as Python
and can take any time. Here a small grammar reads it into fractions of polynomials (polynomials.py).
Text that is too long, too deep or too large does not count as algebra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from envfleet.llm.environments.polynomials import (
    NotAlgebra,
    PolynomialArithmetic,
    Ratio,
    atom_of,
    constant,
)

MAX_CHARS = 500
MAX_DEPTH = 24

_TOKEN = re.compile(
    r"\s+|(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|(?P<command>\\(?:[A-Za-z]+|.))|(?P<name>[A-Za-z]+)|(?P<sign>\*\*|[-+*/^(){}\[\],=_|\u00b7\u00d7\u00f7\u221a\u03c0\u2212])"
)
_SPACING = {"\\" + one for one in ("left", "right", "displaystyle", "!", ",", ";", ":", " ")}
_SAME = {
    "**": "^",
    "\u00b7": "*",
    "\u00d7": "*",
    "\u2212": "-",
    "\u00f7": "/",
    "\u221a": "sqrt",
    "\u03c0": "pi",
    "\\sqrt": "sqrt",
    "\\pi": "pi",
    "\\cdot": "*",
    "\\times": "*",
    "\\div": "/",
    "\\dfrac": "frac",
    "\\tfrac": "frac",
    "\\frac": "frac",
    "\\{": "set{",
    "\\}": "set}",
    "\\infty": "infinity",
}
_NAMES = ("sqrt", "pi", "frac", "infinity")
_ENDS = {"(": ")", "[": "]", "{": "}", "set{": "set}"}
_TRIMMED = (r"\$", "$")
_UNIT = re.compile(r"(?<=.)\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*$|\^\s*\{?\s*\\circ\s*\}?\s*$")
_BOXED = re.compile(r"^\s*\\boxed\s*\{(.*)\}\s*$", re.DOTALL)
_NAMED = re.compile(r"^\s*[A-Za-z]\s*=(?!=)")


def is_same_algebra(left: str, right: str) -> bool:
    """Whether both are algebra and equal.

    Lists in round or square brackets are compared in order, bare lists and sets in any order.
    `x = 5` equals `5`.
    """
    try:
        return _Comparison().is_same(_trimmed(left), _trimmed(right))
    except NotAlgebra:
        return False


def _trimmed(text: str) -> str:
    if len(text) > MAX_CHARS:
        raise NotAlgebra(f"longer than {MAX_CHARS} characters")
    boxed = _BOXED.match(text)
    text = boxed.group(1) if boxed else text
    for sign in _TRIMMED:
        text = text.replace(sign, " ")
    return _UNIT.sub("", text.strip().removesuffix("."))


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NotAlgebra(f"{text[at]!r} is no sign of algebra")
        at = found.end()
        token = found.group().strip()
        if found.lastgroup == "name":
            yield from _letters(token)
        elif token and token not in _SPACING and found.group() not in _SPACING:
            yield _SAME.get(token, token)


def _letters(name: str) -> Iterator[str]:
    """A known name, or one or two letters, such as x or ab; longer words are no algebra."""
    if name in _NAMES:
        yield name
    elif len(name) <= 2:
        yield from name
    else:
        raise NotAlgebra(f"{name!r} is a word")


@dataclass(frozen=True, slots=True)
class _List:
    opening: str
    closing: str
    items: tuple[_Value, ...]


_Value = Ratio | _List


class _AlgebraParser:
    """Reads one expression: sums of products of powers, and lists of them."""

    def __init__(self, text: str, maths: PolynomialArithmetic) -> None:
        self.tokens = [*_tokens(text), ""]
        self.at = 0
        self.depth = 0
        self.maths = maths

    @property
    def next(self) -> str:
        return self.tokens[self.at]

    def take(self) -> str:
        token = self.next
        if not token:
            raise NotAlgebra("something is missing at the end")
        self.at += 1
        return token

    def whole(self) -> _Value:
        """All of the text."""
        items = self.items()
        if self.next:
            raise NotAlgebra(f"{self.next!r} does not belong here")
        return items[0] if len(items) == 1 else _List("", "", tuple(items))

    def items(self) -> list[_Value]:
        items = [self.sum()]
        while self.next == ",":
            self.take()
            items.append(self.sum())
        return items

    def sum(self) -> _Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotAlgebra("too deep")
        value = self.product()
        while self.next in ("+", "-"):
            sign = self.take()
            right = _number(self.product())
            right = self.maths.negative(right) if sign == "-" else right
            value = self.maths.add(_number(value), right)
        self.depth -= 1
        return value

    def product(self) -> _Value:
        value = self.signed()
        while self.next and self.next not in ("+", "-", ",", "=", *_ENDS.values()):
            if self.next in ("*", "/"):
                is_division = self.take() == "/"
                right = _number(self.signed())
            elif _is_numeral(self.next):
                raise NotAlgebra("a number after something else: 1 3/4 and x2 can mean two things")
            else:
                is_division = False
                right = _number(self.power())
            into = self.maths.divide if is_division else self.maths.multiply
            value = into(_number(value), right)
        return value

    def signed(self) -> _Value:
        is_negative = False
        while self.next in ("+", "-"):
            is_negative ^= self.take() == "-"
        value = self.power()
        return self.maths.negative(_number(value)) if is_negative else value

    def power(self) -> _Value:
        base = self.single()
        if self.next != "^":
            return base
        self.take()
        is_negative = self.next == "-"
        if is_negative:
            self.take()
        exponent = self.maths.rational(_number(self.single()))
        if self.next == "^":
            raise NotAlgebra("a power of a power needs brackets")
        return self.maths.power(_number(base), -exponent if is_negative else exponent)

    def single(self) -> _Value:
        token = self.take()
        if token in _ENDS:
            return self.bracket(token)
        if _is_numeral(token):
            value = constant(Fraction(token.replace(",", "")))
            return self.mixed(value) if self.next == "frac" else value
        if token == "frac":
            return self.fraction()
        if token == "sqrt":
            if self.next == "[":
                raise NotAlgebra("a root that is not square")
            return self.maths.root(_number(self.digit_or_single()))
        if token in ("pi", "infinity") or (len(token) == 1 and token.isalpha()):
            return atom_of(token)
        raise NotAlgebra(f"{token!r} is not understood")

    def fraction(self) -> Ratio:
        above = _number(self.digit_or_single())
        return self.maths.divide(above, _number(self.digit_or_single()))

    def mixed(self, whole: Ratio) -> Ratio:
        r"""A number before a fraction: `1\frac{1}{2}` is a sum, `2\frac{x}{3}` a product."""
        self.take()
        fraction = self.fraction()
        is_number = set(fraction.above) <= {()} and set(fraction.below) <= {()}
        return (self.maths.add if is_number else self.maths.multiply)(whole, fraction)

    def digit_or_single(self) -> _Value:
        r"""In LaTeX a command takes one digit of a number: `\frac12` is a half."""
        token = self.next
        if len(token) > 1 and token.isdigit():
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.single()

    def bracket(self, opening: str) -> _Value:
        items = self.items()
        closing = self.take()
        if len(items) == 1 and closing == _ENDS[opening] and opening != "set{":
            return items[0]
        if closing not in _ENDS.values() or (opening in "({[") != (closing in ")}]"):
            raise NotAlgebra(f"{closing!r} does not close {opening!r}")
        if opening == "{":
            opening, closing = "set{", "set}"
        return _List(opening, closing, tuple(items))


def _is_numeral(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."


def _number(value: _Value) -> Ratio:
    if isinstance(value, _List):
        raise NotAlgebra("a list is no number")
    return value


class _Comparison(PolynomialArithmetic):
    def is_same(self, left: str, right: str) -> bool:
        if "=" in left and "=" in right:
            sides, others = left.split("="), right.split("=")
            return len(sides) == len(others) and all(map(self.is_same, sides, others))
        left, right = _NAMED.sub("", left), _NAMED.sub("", right)
        return self._is_equal(
            _AlgebraParser(left, self).whole(), _AlgebraParser(right, self).whole()
        )

    def _is_equal(self, left: _Value, right: _Value) -> bool:
        if isinstance(left, Ratio) and isinstance(right, Ratio):
            return self.is_equal(left, right)
        if not (isinstance(left, _List) and isinstance(right, _List)):
            return False
        if (left.opening, left.closing) != (right.opening, right.closing):
            return False
        if len(left.items) != len(right.items):
            return False
        if left.opening in ("(", "["):
            return all(map(self._is_equal, left.items, right.items))
        unmatched = list(right.items)
        for one in left.items:
            match = next((other for other in unmatched if self._is_equal(one, other)), None)
            if match is None:
                return False
            unmatched.remove(match)
        return True
