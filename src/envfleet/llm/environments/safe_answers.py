"""Answers that are safe for code which evaluates them as Python: plain values, plain arithmetic.

Law: nothing is evaluated here. A text that passes has no call, no attribute and no comprehension,
and no power with more than some thousand digits, written as 9**9 or as 9e9.
"""

from __future__ import annotations

import ast
import re

MAX_CHARS = 2_000
MAX_DEPTH = 30
MAX_TREE_DEPTH = 200
MAX_DIGITS = 12
MAX_EXPONENT = 30
MAX_NESTED_EXPONENT = 60
MAX_REPEATS = 1_000

_WORDS = re.compile(r"[A-Za-z0-9_ \n]*")
_LETTERS_IN_A_ROW = re.compile(r"[^\W\d_]{2,}|_")
_NUMBER = re.compile(r"\d+")
_LONG_EXPONENT = re.compile(r"\d\.?_?[eE][-+]?_?\d_?\d")


def is_value_or_words(text: str) -> bool:
    """Whether it is a Python value such as [[0, 1], [1, 0]], or just words."""
    if len(text) > MAX_CHARS or not _is_shallow(text):
        return False
    if _WORDS.fullmatch(text):
        return True
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def is_arithmetic(text: str) -> bool:
    """Whether it is a sum of products and small powers of numbers and single letters."""
    if len(text) > MAX_CHARS or not text.isascii() or not _is_shallow(text):
        return False
    if _LETTERS_IN_A_ROW.search(text) or has_long_exponent(text):
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return _power_in_answer(tree.body) <= MAX_NESTED_EXPONENT


def has_long_exponent(text: str) -> bool:
    """Whether a number in it is written with an exponent of several digits, like 1e999999.

    For Python that is infinite, or 0 with a minus; for sympy and fractions it is a number with as
    many digits.
    """
    return _LONG_EXPONENT.search(text) is not None


def has_few_repeats(text: str) -> bool:
    """Whether the numbers in it, read as numbers of repeats, have a small sum."""
    counts = _NUMBER.findall(text)
    return all(len(one) <= MAX_DIGITS for one in counts) and sum(map(int, counts)) <= MAX_REPEATS


def _is_shallow(text: str) -> bool:
    return sum(map(text.count, "([{")) <= MAX_CHARS // 4 and _depth(text) <= MAX_DEPTH


def _depth(text: str) -> int:
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return deepest


_TOO_MUCH = MAX_NESTED_EXPONENT + 1


def _power_in_answer(node: ast.expr, depth: int = 0) -> int:
    """The largest product of exponents on a branch of a tree; `_TOO_MUCH` for anything else."""
    if depth > MAX_TREE_DEPTH:
        return _TOO_MUCH
    depth += 1
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return 1 if len(str(node.value)) <= MAX_DIGITS else _TOO_MUCH
        case ast.Name():
            return 1
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _power_in_answer(operand, depth)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(exponent))):
            by = exponent if 1 <= exponent <= MAX_EXPONENT else _TOO_MUCH
            return _power_in_answer(left, depth) * by
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return max(_power_in_answer(left, depth), _power_in_answer(right, depth))
    return _TOO_MUCH
