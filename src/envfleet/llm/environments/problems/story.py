"""The parts of a word problem: people, things, numbers in words, and the working."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, TypeVar

Number = int | Fraction
Sign = Literal["+", "-", "*", "/"]
NumberKind = Literal["whole", "decimal", "fraction"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Person:
    """A person, with their pronouns."""

    name: str
    they: str
    their: str

    @property
    def They(self) -> str:
        """The pronoun that begins a sentence."""
        return self.they.capitalize()


@dataclass(frozen=True, slots=True)
class Thing:
    """A thing that can be counted."""

    one: str
    many: str

    def __call__(self, count: int) -> str:
        """A count of it: 1 apple, 2 apples."""
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
    """The random choices of one problem."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def whole(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return self._rng.randint(low, high)

    def one_of(self, of: Sequence[_T]) -> _T:
        """One of these."""
        return of[self._rng.randrange(len(of))]

    def some(self, of: Sequence[_T], count: int) -> list[_T]:
        """`count` different ones of these."""
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
    """The text of a problem, and its working line by line."""

    kind: NumberKind = "whole"
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

        A calculation has only + and - or only * and /, so that it can be read from left to right.
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
        """The lines of working."""
        return tuple(self._lines)

    def answer(self) -> tuple[Fraction, str]:
        """The result of the last line of working, and its text."""
        return self._results[-1], self.n(self._results[-1])

    def is_well_told(self) -> bool:
        """Whether no result is 1: the words after a result are in the plural."""
        return 1 not in self._results


Template = Callable[[Draw, Story], None]
"""Draws the numbers of a problem and writes its text and working into a story."""
