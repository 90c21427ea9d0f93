"""What word problems are told with: people, things, numbers as words have them, and a working."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, TypeVar

Number = int | Fraction
Sign = Literal["+", "-", "*", "/"]
Kind = Literal["whole", "decimal", "fraction"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody, and the words that stand for them."""

    name: str
    they: str
    their: str

    @property
    def They(self) -> str:
        """The pronoun at the beginning of a sentence."""
        return self.they.capitalize()


@dataclass(frozen=True, slots=True)
class Thing:
    """Something that can be counted."""

    one: str
    many: str

    def __call__(self, count: int) -> str:
        """So many of it: 1 apple, 2 apples."""
        return f"{count} {self.one if count == 1 else self.many}"


PEOPLE = (
    *(Person(name, "she", "her") for name in (
        "Amina", "Beatriz", "Chloe", "Dorothea", "Elif", "Fatima", "Grace", "Hana", "Ingrid",
        "Jelena", "Keiko", "Leila", "Mei", "Nadia", "Olga", "Priya", "Rosa", "Sofia",
    )),
    *(Person(name, "he", "his") for name in (
        "Ahmed", "Bruno", "Carlos", "Dmitri", "Emeka", "Felix", "Giorgio", "Hugo", "Ivan",
        "Jonas", "Kofi", "Liam", "Mateo", "Nils", "Omar", "Pedro", "Rafael", "Samuel",
    )),
)  # fmt: skip

KEPT = tuple(
    Thing(one, one + "s")
    for one in ("marble", "sticker", "stamp", "coin", "shell", "badge", "button", "bead", "card")
)
BAKED = tuple(
    Thing(one, many)
    for one, many in (
        ("muffin", "muffins"), ("cookie", "cookies"), ("bun", "buns"), ("pastry", "pastries"),
        ("pie", "pies"), ("biscuit", "biscuits"), ("waffle", "waffles"), ("loaf", "loaves"),
    )
)  # fmt: skip
BOUGHT = tuple(
    Thing(one, many)
    for one, many in (
        ("notebook", "notebooks"), ("pen", "pens"), ("brush", "brushes"), ("ruler", "rulers"),
        ("eraser", "erasers"), ("folder", "folders"), ("pencil case", "pencil cases"),
        ("box of chalk", "boxes of chalk"), ("calendar", "calendars"), ("diary", "diaries"),
    )
)  # fmt: skip
SOLD_BY_WEIGHT = ("apples", "rice", "flour", "cherries", "potatoes", "cheese", "nuts", "lentils")


class Draw:
    """Choices of one problem."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def whole(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return self._rng.randint(low, high)

    def one_of(self, of: Sequence[_T]) -> _T:
        """One of these."""
        return of[self._rng.randrange(len(of))]

    def some(self, of: Sequence[_T], count: int) -> list[_T]:
        """So many different ones of these."""
        return self._rng.sample(list(of), count)

    def tenths(self, low: int, high: int) -> Fraction:
        """A number with one decimal, from low to high tenths."""
        return Fraction(self.whole(low, high), 10)

    def cents(self, low: int, high: int) -> Fraction:
        """A number with two decimals, in steps of five, from low to high twentieths."""
        return Fraction(self.whole(low, high), 20)

    def proper_fraction(self, denominators: Sequence[int]) -> Fraction:
        """A fraction between 0 and 1 in lowest terms."""
        below = self.one_of(denominators)
        return Fraction(self.whole(1, below - 1), below)


def dollars(amount: Number) -> str:
    """An amount as a price tag has it: $3, $2.50."""
    value = Fraction(amount)
    return f"${value.numerator}" if value.denominator == 1 else f"${float(value):.2f}"


def decimal(number: Number) -> str:
    """A number with at most two decimals, and no zeros at its end."""
    hundredths = Fraction(number) * 100
    if hundredths.denominator != 1:
        raise ValueError(f"{number} has more than two decimals")
    whole, rest = divmod(abs(hundredths.numerator), 100)
    text = f"{'-' if number < 0 else ''}{whole}.{rest:02d}"
    return text.rstrip("0").rstrip(".")


def fraction(number: Number) -> str:
    """A number as a whole number, or as a fraction in lowest terms."""
    return str(Fraction(number))


@dataclass(slots=True)
class Story:
    """A problem as it is told, and its working line by line."""

    kind: Kind = "whole"
    """How its numbers are written."""
    _text: list[str] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)
    _results: list[Fraction] = field(default_factory=list)

    def tell(self, *sentences: str) -> None:
        """Add sentences to the problem."""
        self._text.extend(sentences)

    def n(self, number: Number) -> str:
        """A number as this problem writes it."""
        return decimal(number) if self.kind == "decimal" else fraction(number)

    def work(self, says: str, first: Number, *rest: Sign | Number) -> Fraction:
        """Add a line of working: `says` with {} for the calculation. Returns its result.

        Signs of one calculation are all of + and - or all of * and /, so that reading it from left
        to right is reading it right.
        """
        result = Fraction(first)
        written = self._operand(first)
        for sign, number in zip(rest[::2], rest[1::2], strict=True):
            value = Fraction(number)
            if sign == "+":
                result += value
            elif sign == "-":
                result -= value
            elif sign == "*":
                result *= value
            else:
                result /= value
            written += f" {sign} {self._operand(value)}"
        self._lines.append(says.format(f"{written} = {self.n(result)}"))
        self._results.append(result)
        return result

    def _operand(self, number: Number) -> str:
        text = self.n(number)
        return f"({text})" if "/" in text or text.startswith("-") else text

    def query(self) -> str:
        """The problem."""
        form = {
            "whole": (),
            "decimal": ("Give your answer as a decimal number without trailing zeros.",),
            "fraction": ("Give your answer as a whole number or a fraction in lowest terms.",),
        }
        return " ".join((*self._text, *form[self.kind]))

    def working(self) -> tuple[str, ...]:
        """Its working."""
        return tuple(self._lines)

    def answer(self) -> tuple[Fraction, str]:
        """What the last line of the working comes to, and how it is written."""
        return self._results[-1], self.n(self._results[-1])

    def is_well_told(self) -> bool:
        """Whether no line comes to 1: the words after a result are in the plural."""
        return 1 not in self._results
