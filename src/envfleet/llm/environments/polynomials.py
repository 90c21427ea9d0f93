"""Exact arithmetic on fractions of polynomials, by which algebra.py compares answers.

A polynomial has rational coefficients and its variables are letters, pi, the imaginary unit and
square roots of primes. Square roots of different primes are independent, and a product of two
polynomials that are not zero is not zero. So two fractions are equal exactly if their cross
products are the same polynomial.

Law: every product of two terms is counted against a budget, so that an expression that takes too
much work raises NotAlgebra after some milliseconds, on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 64
MAX_BITS = 2048
MAX_ROOT = 10**7
WORK = 3_000
"""Products of two terms in one comparison."""
ROOT_COSTS = 100

Monomial = tuple[tuple[str, int], ...]
Polynomial = dict[Monomial, Fraction]


class NotAlgebra(ValueError):
    """The text is not algebra that is understood here, or too much work."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One polynomial over another."""

    above: Polynomial
    below: Polynomial


_ONE: Polynomial = {(): Fraction(1)}


def constant(value: Fraction | int) -> Ratio:
    """A number."""
    return Ratio({(): Fraction(value)} if value else {}, _ONE)


def atom_of(name: str) -> Ratio:
    """A letter, or a name that is treated like one."""
    return Ratio({((name, 1),): Fraction(1)}, _ONE)


class PolynomialArithmetic:
    """Sums and products of polynomials, with one budget of work."""

    def __init__(self) -> None:
        self.work = WORK

    def pay(self, cost: int) -> None:
        """Take a cost from the budget."""
        self.work -= cost
        if self.work < 0:
            raise NotAlgebra("too much work")

    def times(self, left: Polynomial, right: Polynomial) -> Polynomial:
        """The product of two polynomials."""
        self.pay(len(left) * len(right))
        product: Polynomial = {}
        for one, by in left.items():
            for other, by_other in right.items():
                monomial, factor = _merged(one, other)
                value = product.get(monomial, Fraction(0)) + by * by_other * factor
                if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
                    raise NotAlgebra("a number is too long")
                product[monomial] = value
        return {monomial: value for monomial, value in product.items() if value}

    def plus(self, left: Polynomial, right: Polynomial) -> Polynomial:
        """The sum of two polynomials."""
        self.pay(len(left) + len(right))
        total = dict(left)
        for monomial, value in right.items():
            total[monomial] = total.get(monomial, Fraction(0)) + value
        return {monomial: value for monomial, value in total.items() if value}

    def add(self, left: Ratio, right: Ratio) -> Ratio:
        """The sum."""
        above = self.plus(self.times(left.above, right.below), self.times(right.above, left.below))
        return Ratio(above, self.times(left.below, right.below))

    def multiply(self, left: Ratio, right: Ratio) -> Ratio:
        """The product."""
        return Ratio(self.times(left.above, right.above), self.times(left.below, right.below))

    def divide(self, left: Ratio, right: Ratio) -> Ratio:
        """The quotient."""
        if not right.above:
            raise NotAlgebra("a division by zero")
        return self.multiply(left, Ratio(right.below, right.above))

    def negative(self, one: Ratio) -> Ratio:
        """Its negative."""
        return self.multiply(constant(-1), one)

    def power(self, base: Ratio, exponent: Fraction) -> Ratio:
        """A small whole power, or the square root."""
        if exponent == Fraction(1, 2):
            return self.root(base)
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
            raise NotAlgebra("a power that is not small and whole")
        if exponent < 0:
            base, exponent = self.divide(constant(1), base), -exponent
        result = constant(1)
        for bit in f"{int(exponent):b}":
            result = self.multiply(result, result)
            result = self.multiply(result, base) if bit == "1" else result
        return result

    def root(self, of: Ratio) -> Ratio:
        """The square root of a rational number, taken apart into roots of primes."""
        value = self.rational(of)
        number = abs(value.numerator * value.denominator)
        self.pay(ROOT_COSTS)
        outside, inside = _roots(number)
        result = constant(Fraction(outside, value.denominator))
        for prime in inside:
            result = self.multiply(result, atom_of(f"√{prime}"))
        return self.multiply(result, atom_of("i")) if value < 0 else result

    def rational(self, one: Ratio) -> Fraction:
        """The rational number that this fraction equals."""
        if set(one.above) - {()} or set(one.below) != {()}:
            raise NotAlgebra("this has to be a number")
        return one.above.get((), Fraction(0)) / one.below[()]

    def is_equal(self, left: Ratio, right: Ratio) -> bool:
        """Whether they are the same."""
        return self.times(left.above, right.below) == self.times(right.above, left.below)


def _merged(one: Monomial, other: Monomial) -> tuple[Monomial, int]:
    """The product of two monomials, and the factor that squares of roots and of i in it give."""
    powers = dict(one)
    factor = 1
    for atom, power in other:
        powers[atom] = powers.get(atom, 0) + power
        if powers[atom] > 1 and (atom == "i" or atom[0] == "√"):
            factor *= -1 if atom == "i" else int(atom[1:])
            powers[atom] -= 2
    return tuple(sorted((atom, power) for atom, power in powers.items() if power)), factor


def _roots(number: int) -> tuple[int, list[int]]:
    """A number's square root as a whole number times roots of different primes."""
    whole = math.isqrt(number)
    if whole * whole == number:
        return whole, []
    if number > MAX_ROOT:
        raise NotAlgebra("the root of a number that is too large")
    outside, inside, prime = 1, [], 2
    while prime * prime <= number:
        power = 0
        while number % prime == 0:
            number, power = number // prime, power + 1
        outside *= prime ** (power // 2)
        inside += [prime] * (power % 2)
        prime += 1 + prime % 2
    return outside, inside + [number] * (number > 1)
