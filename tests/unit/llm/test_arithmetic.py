"""Arithmetic of strangers: worked out as Python would with exact fractions, or refused at once."""

import ast
import operator
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.llm.environments.arithmetic import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_NUMBERS,
    ArithmeticResult,
    read_arithmetic,
)
from tests.gates import computes_within
from tests.unit.llm.laws import HOSTILE

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def by_python(text: str) -> Fraction:
    """Python's own reading of the text, in fractions."""

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(ast.get_source_segment(text, node) or "")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        assert isinstance(node, ast.BinOp)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body)


def numbers_by_python(text: str) -> list[Fraction]:
    found = [one for one in ast.walk(ast.parse(text, mode="eval")) if isinstance(one, ast.Constant)]
    found.sort(key=lambda one: one.col_offset)
    return [Fraction(ast.get_source_segment(text, one) or "") for one in found]


numbers = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)
blanks = st.sampled_from(["", "", " ", "  "])
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, blanks, st.sampled_from("+-*/"), blanks, inner).map("".join),
        st.tuples(st.just("("), blanks, inner, blanks, st.just(")")).map("".join),
        st.tuples(st.just("-"), blanks, inner).map("".join),
    ),
    max_leaves=20,
)


@given(expressions)
def test_it_comes_to_what_python_makes_of_it(text):
    try:
        expected = ArithmeticResult(by_python(text), tuple(numbers_by_python(text)))
    except ZeroDivisionError:
        expected = None

    assert read_arithmetic(text) == expected


pieces = [*"0123456789.+-*/()=eEjx_%^,;:'\"[]{}~@!&|<> \t\n", "**", "//", "1", "\\times", "\x00"]


@given(st.lists(st.sampled_from(pieces), max_size=12).map("".join))
def test_what_it_reads_python_reads_alike(text):
    """No text is taken for arithmetic that Python, of the same few constructs, would not take."""
    found = read_arithmetic(text)

    if found is not None and "=" not in text and "\\" not in text:
        # Python has no whole numbers with leading zeros, and takes a line feed for the end.
        plain = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", " ".join(text.split()))
        assert found.value == by_python(plain)


@given(st.text(max_size=60))
def test_any_text_is_answered(text):
    found = read_arithmetic(text)
    assert found is None or isinstance(found.value, Fraction)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),
        ("8 / 4 / 2", 1),
        ("1/3 + 1/3 + 1/3", 1),
        ("-(2 - 5)", 3),
        ("3 - -2", 5),
        ("2 * -3", -6),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("007", 7),
        (" \t3\r\n+ 4 \n", 7),
        ("6 × 7", 42),  # noqa: RUF001
        ("6 · 7", 42),
        (r"6 \times 7", 42),
        (r"6\cdot(7)", 42),
        ("84 ÷ 2", 42),
        (r"84 \div 2", 42),
        ("50 − 8", 42),  # noqa: RUF001
        ("50 – 8", 42),  # noqa: RUF001
        ("6 * 7 = 42", 42),
        ("6 * 7 = 41", 42),
        ("6 - 7 = -1", -1),
        ("6 / 4 = 1.5", Fraction(3, 2)),
    ],
)
def test_a_line_is_worked_out(text, value):
    found = read_arithmetic(text)
    assert found is not None
    assert found.value == value


def test_the_claim_is_no_number_of_the_line():
    assert read_arithmetic("3 + 4 + 3 = 10") == ArithmeticResult(Fraction(10), (3, 4, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "", "   ", "=", "= 3", "3 =", "3 = 2 + 1", "3 = 3 = 3", "3 = (3)", "3 = --3", "3 = x",
        "()", "(", ")", "(1", "1)", ")(", "1 2", "1 + ", "+ 1", "* 1", "1 + + 1", "2(3)", "(2)(3)",
        "1 ** 2", "7 // 2", "7 % 2", "1e5", "1_000", "0x10", "1.", ".5", "1.2.3", "1,5", "inf",
        "nan", "x", "3!", "√4", "2^3", "\N{FULLWIDTH DIGIT ONE}", "\N{ARABIC-INDIC DIGIT THREE}",
        "1/0", "1/(2-2)", "0/0", r"6 \timesx 7",
        r"6 \frac 7", "__import__('os')", "lambda: 1", "1 if 1 else 2", "1;2", "\x001", "1\x0b+1",
        "1\ud800",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text):
    assert read_arithmetic(text) is None


@pytest.mark.parametrize(
    ("small_enough", "too_large"),
    [
        ("1" * MAX_CHARACTERS, "1" * (MAX_CHARACTERS + 1)),
        ("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, "(" * 51 + "1" + ")" * 51),
        ("-" * MAX_DEPTH + "1", "-" * (MAX_DEPTH + 1) + "1"),
        ("+".join("1" * MAX_NUMBERS), "+".join("1" * (MAX_NUMBERS + 1))),
    ],
)
def test_size_is_bounded(small_enough, too_large):
    assert read_arithmetic(small_enough) is not None
    assert read_arithmetic(too_large) is None


@pytest.mark.parametrize(
    "text",
    [
        *(text for text in HOSTILE if isinstance(text, str)),
        "*".join(["9" * 9] * 100),
        "+".join(f"1/{10**7 + n}" for n in range(50)),
        "/".join(f"{10**8 + n}" for n in range(100)),
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_the_worst_takes_milliseconds(text):
    with computes_within(0.02):
        read_arithmetic(text)
