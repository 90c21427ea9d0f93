"""Parses and computes a line of arithmetic; nothing is ever executed.

    line   = sum ["=" ["-"] number]
    sum    = term {("+" | "-") term}
    term   = factor {("*" | "/") factor}
    factor = "-" factor | "(" sum ")" | number
    number = digits ["." digits]

Blanks may stand between all of these. Printed and LaTeX signs for "*", "/" and "-" are understood.
The result that a line claims after "=" is ignored.

It is written by hand because the text is a model's: the result is exact, and any text is decided
within milliseconds. Length, depth and the number of operands are bounded, and so is every
intermediate value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 1000
MAX_DEPTH = 50
"""Of nested parentheses and minus signs."""
MAX_NUMBERS = 100

_TOKEN = re.compile(
    r"[ \t\r\n]*(?:(?P<number>[0-9]+(?:\.[0-9]+)?)"
    r"|(?P<sign>[-+*/()=\u00d7\u00b7\u00f7\u2212\u2013]|\\(?:times|cdot|div)))"
)
_MEANING = {
    "\N{MULTIPLICATION SIGN}": "*",
    "\N{MIDDLE DOT}": "*",
    r"\times": "*",
    r"\cdot": "*",
    "\N{DIVISION SIGN}": "/",
    r"\div": "/",
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
}
_Token = str | Fraction
_END = ""


@dataclass(frozen=True, slots=True)
class ArithmeticResult:
    """The value of a line, and the numbers in it."""

    value: Fraction
    numbers: tuple[Fraction, ...]
    """In the order of the line, with repeats."""


def read_arithmetic(text: str) -> ArithmeticResult | None:
    """Compute a line; None if it is no arithmetic, too large, or divides by zero."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return _ArithmeticParser(_without_claim(_tokens(text))).line()
    except (_Unreadable, ZeroDivisionError):
        return None


class _Unreadable(ValueError):
    """Not a line of the grammar."""


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    text = text.rstrip(" \t\r\n")
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise _Unreadable
        number, sign = found["number"], found["sign"]
        tokens.append(Fraction(number) if number else _MEANING.get(sign, sign))
        place = found.end()
    return tokens


def _without_claim(tokens: list[_Token]) -> list[_Token]:
    if "=" not in tokens:
        return tokens
    equals = tokens.index("=")
    claim = tokens[equals + 1 :]
    number = claim[1:] if claim[:1] == ["-"] else claim
    if len(number) != 1 or not isinstance(number[0], Fraction):
        raise _Unreadable
    return tokens[:equals]


class _ArithmeticParser:
    """One method per rule of the grammar, which takes tokens and returns their value."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = [*tokens, _END]
        self._place = 0
        self._numbers = tuple(token for token in tokens if isinstance(token, Fraction))
        if len(self._numbers) > MAX_NUMBERS:
            raise _Unreadable

    def line(self) -> ArithmeticResult:
        value = self._sum(0)
        if self._next() != _END:
            raise _Unreadable
        return ArithmeticResult(value, self._numbers)

    def _sum(self, depth: int) -> Fraction:
        value = self._term(depth)
        while self._next() in ("+", "-"):
            if self._take() == "+":
                value += self._term(depth)
            else:
                value -= self._term(depth)
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self._next() in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
            else:
                value /= self._factor(depth)
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _Unreadable
        token = self._take()
        if isinstance(token, Fraction):
            return token
        if token == "-":
            return -self._factor(depth + 1)
        if token != "(":
            raise _Unreadable
        value = self._sum(depth + 1)
        if self._take() != ")":
            raise _Unreadable
        return value

    def _next(self) -> _Token:
        return self._tokens[self._place]

    def _take(self) -> _Token:
        token = self._next()
        # At the end the next token stays the end.
        self._place = min(self._place + 1, len(self._tokens) - 1)
        return token
