"""Answers compared by their letters, as numbers and as algebra; hostile ones in no time."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.llm.environments.algebra import is_same_algebra
from envfleet.llm.environments.scoring import is_right, number
from tests.gates import computes_within

WAYS = ("exact", "numeric", "symbolic")

HOSTILE = [
    "9**9**9",
    "9^(9^9)",
    "9" * 100_000,
    "1/" * 5_000 + "1",
    "(" * 100_000,
    "{" * 240 + "1" + "}" * 240,
    "(" * 23 + "x+1" + ")^64" * 23,
    "(a+b+c+d+e+f+g+h)^{64}",
    r"(1+\sqrt2+\sqrt3+\sqrt5+\sqrt7+\sqrt{11}+\sqrt{13})^{60}",
    r"\sqrt{9999991}+" * 25 + "1",
    "-" * 499 + "1",
    "1/3+" * 120 + "1",
    r"\frac" * 100,
    "__import__('os').system('false')",
    "().__class__.__bases__[0]",
    "a" * 1_000_000,
    " " * 1_000_000 + "7",
    "\x00\x1b[2J\u202e",
    "\ud800",
    "1e999999999",
    "$" * 400,
    r"\text{" * 80,
    "x=" * 200,
    "1," * 240 + "1",
]


class TestExact:
    @pytest.mark.parametrize("answer", ["1/2", " 1 / 2 ", "1/\t2\n"])
    def test_white_space_does_not_count(self, answer):
        assert is_right(answer, "1/2")

    def test_case_does_not_count(self):
        assert is_right("A b C", "abc")

    @pytest.mark.parametrize("answer", ["0.5", "2/4", "1/2.", "the answer is 1/2"])
    def test_other_letters_are_wrong(self, answer):
        assert not is_right(answer, "1/2")

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("expected", [None, ""])
    def test_nothing_is_right_where_nothing_is_expected(self, way, expected):
        assert not is_right("", expected, way)
        assert not is_right("5", expected, way)

    @pytest.mark.parametrize("way", WAYS)
    def test_nothing_is_no_answer(self, way):
        assert not is_right(" \n", "5", way)


class TestNumeric:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("42", 42),
            ("-7", -7),
            ("- 7", -7),
            ("\u22127", -7),
            ("+3", 3),
            ("1,234,567", 1234567),
            ("1,234.50", Fraction("1234.5")),
            ("$3", 3),
            ("-$3.20", Fraction("-3.2")),
            ("$-3.20", Fraction("-3.2")),
            (r"\$18", 18),
            (".5", Fraction(1, 2)),
            ("18.", 18),
            ("6/8", Fraction(3, 4)),
            ("-1/3", Fraction(-1, 3)),
            ("1 3/4", Fraction(7, 4)),
            (r"\frac{3}{4}", Fraction(3, 4)),
            (r"-\dfrac{3}{4}", Fraction(-3, 4)),
            (r"1\frac{3}{4}", Fraction(7, 4)),
        ],
    )
    def test_a_number_is_exactly_this(self, text, value):
        assert number(text) == (value, False)

    @pytest.mark.parametrize(
        "text",
        ["", "x", "12,34", "1,2345", "1/0", "--5", "+-5", "1e5", "0x10", "1_000", "٣", "5 apples"],
    )
    def test_this_is_no_number(self, text):
        assert number(text) is None

    def test_a_tenth_three_times_is_three_tenths(self):
        assert is_right("3/10", "0.3", "numeric")
        assert not is_right("0.30000000000000004", "0.3", "numeric")
        assert not is_right("0.333333333333", "1/3", "numeric")

    @pytest.mark.parametrize(
        ("answer", "expected", "verdict"),
        [
            ("50%", "50%", True),
            ("50%", "50", True),
            ("50%", "1/2", True),
            ("0.5", r"50\%", True),
            ("50%", "5%", False),
            ("50%", "500", False),
        ],
    )
    def test_per_cent(self, answer, expected, verdict):
        assert is_right(answer, expected, "numeric") is verdict
        assert is_right(expected, answer, "numeric") is verdict

    def test_algebra_is_not_numeric(self):
        assert not is_right("1+x", "x+1", "numeric")

    @given(st.fractions())
    def test_every_way_of_writing_a_fraction_is_the_same_number(self, value):
        above, below = value.numerator, value.denominator
        assert is_right(f"{3 * above}/{3 * below}", str(value), "numeric")
        assert not is_right(f"{3 * above + 1}/{3 * below}", str(value), "numeric")

    @given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=0))
    def test_thousands_and_zeros_do_not_count(self, value):
        assert is_right(f"${value:,.6f}", f"{value:f}", "numeric")


class TestSymbolic:
    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (r"\frac12", "0.5"),
            (r"\frac{x^2-1}{x-1}", "x+1"),
            ("(x+1)^2", "x^2+2x+1"),
            ("2(3-y)", "6-2y"),
            ("xy", "y x"),
            (r"\sqrt{8}", r"2\sqrt2"),
            (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
            (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1"),
            (r"\sqrt{6}", r"\sqrt2\cdot\sqrt3"),
            ("sqrt(12)", "2*3**0.5"),
            (r"(1+i)^2", "2i"),
            (r"\sqrt{-4}", "2i"),
            (r"2\pi r", r"\pi\times 2 r"),
            ("x = 5", "5"),
            ("y=2x+3", "y = 3 + 2x"),
            ("(1, 2)", r"\left(1,2\right)"),
            (r"(-\infty, \frac{3}{2}]", r"(-\infty,1.5]"),
            (r"\{1,2\}", r"\{2, 1\}"),
            ("1, 2", "2,1"),
            (r"\boxed{5}", "5"),
            (r"5\text{ cm}", "5"),
            (r"90^\circ", "90"),
            (r"1\frac12", "3/2"),
            (r"-1\frac12", "-1.5"),
            (r"2\frac{x}{3}", r"\frac{2x}{3}"),
            ("2^{-1}", "1/2"),
            ("-2^2", "-4"),
            ("$12$", "12"),
        ],
    )
    def test_these_are_the_same(self, left, right):
        assert is_right(left, right, "symbolic")
        assert is_right(right, left, "symbolic")

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            ("(x+1)^2", "x^2+1"),
            (r"\sqrt{2}", "1.41421356"),
            (r"\pi", "22/7"),
            ("(1,2)", "(2,1)"),
            ("[1,2)", "(1,2)"),
            ("(1,2)", "1,2"),
            ("1,2", "1,2,2"),
            ("1,1,2", "1,2,2"),
            ("apples", "papels"),
            ("1 3/4", "3/4"),
            (r"1\frac12", "1/2"),
            ("1/0", "2/0"),
            ("0/x", "1/x"),
            ("x=5", "x=6"),
            ("xy", "x+y"),
        ],
    )
    def test_these_are_not(self, left, right):
        assert not is_right(left, right, "symbolic")
        assert not is_right(right, left, "symbolic")

    @given(st.lists(st.integers(-9, 9), min_size=1, max_size=4), st.integers(-9, 9))
    def test_a_polynomial_is_the_product_of_its_factors(self, roots, value):
        factors = "".join(f"(x-({root}))" for root in roots)
        coefficients = [1]
        for root in roots:
            shifted = [0, *coefficients]
            coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, 0], strict=True)]
        expanded = "+".join(f"({c})x^{power}" for power, c in enumerate(coefficients))
        assert is_same_algebra(factors, expanded)
        assert not is_same_algebra(factors, f"{expanded}+1")

    @given(st.integers(0, 3000), st.integers(1, 40))
    def test_squares_come_out_of_a_root(self, number, square):
        assert is_same_algebra(rf"\sqrt{{{number * square**2}}}", rf"{square}\sqrt{{{number}}}")


class TestHostile:
    @pytest.mark.parametrize("way", WAYS)
    def test_is_decided_in_milliseconds(self, way):
        for text in HOSTILE:
            with computes_within(0.5, text):
                is_right(text, "x^2+1", way)
                is_right("x^2+1", text, way)
                is_right(text, text[:-1], way)

    @given(st.text(max_size=80), st.text(max_size=80), st.sampled_from(WAYS))
    def test_any_text_is_decided(self, answer, expected, way):
        assert is_right(answer, expected, way) in (True, False)

    @given(
        st.text(r"0123456789xyi+-*/^(){}[],=.\ $%", max_size=120),
        st.sampled_from(["", r"\frac", r"\sqrt", r"\pi"]),
    )
    def test_what_looks_like_algebra_is_decided_and_equals_itself(self, text, command):
        text = text.replace("\\", command)
        assert is_same_algebra(text, "x") in (True, False)
        if "".join(text.split()):
            assert is_right(text, text, "symbolic")
