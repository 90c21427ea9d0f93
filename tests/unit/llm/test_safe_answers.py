"""What may be shown to code that evaluates it: values and small arithmetic, nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.llm.environments.safe_answers import has_few_repeats, is_arithmetic, is_value_or_words
from tests.gates import computes_within


@pytest.mark.parametrize(
    "text",
    ["[[0, 1], [1, 0]]", "['a', 'b']", "1 2 3", "AABBC", "0 1\n1 0", "-3", "(1, 2)", "not a list"],
)
def test_values_and_words(text):
    assert is_value_or_words(text)


@pytest.mark.parametrize(
    "text", ["(3 + 4) * 5 - 6/2", "2*x**2 - 7*x*y + 1", "-8", "(x+1)**2", "2.5", "1e3", "2e-5*x"]
)
def test_arithmetic(text):
    assert is_arithmetic(text)


EVIL = (
    "__import__('os').system('false')",
    "().__class__",
    "[x for x in [1]]",
    "[1]*9",
    "'a'*99999999999",
    "exit()",
    "lambda: 1",
    "open('x')",
    "x.y",
    "x[0]",
    "f'{1}'",
    "9**9**9",
    "(((9**30)**30)**30)",
    "9**-9",
    "9**x",
    "9" * 13,
    "9" * 5000,
    "1j",
    "factorial(9)",
    "9!",
    "x(3)",
    "_",
    "x if y else z",
    "(" * 31 + "1" + ")" * 31,
    "-" * 1999 + "1",
    "[" * 100_000,
    "x:=1",
    "1 << 99",
    "\x00",
    "True+True",
    "1e9999999",
    "1e999999*x",
    "3-1.e-999999",
    "1E+10",
)


@pytest.mark.parametrize("allows", [is_arithmetic, is_value_or_words])
def test_everything_else_is_refused_in_no_time(allows):
    plain = {"9" * 13, "1j", "_", "x if y else z", "-" * 1999 + "1", "9" * 5000}
    plain |= {"1e9999999", "1E+10"}
    for text in EVIL:
        with computes_within(0.1, text):
            is_allowed = allows(text)
        assert not is_allowed or (allows is is_value_or_words and text in plain), text[:40]


def test_moves_are_repeated_a_little():
    assert has_few_repeats("R2 U' F A+3")
    assert not has_few_repeats("A+1001")
    assert not has_few_repeats("R99 " * 11)
    assert not has_few_repeats("R" + "9" * 5000)


def test_no_deep_tree_passes():
    assert not is_arithmetic("-" * 1999 + "1")
    assert not is_arithmetic("1" + "**2" * 600)


@given(st.text("0123456789x+-*/(). ", max_size=60))
def test_what_is_allowed_is_small(text):
    if is_arithmetic(text):
        try:
            value = eval(text.strip(), {"__builtins__": {}}, {"x": 3})
        except (ZeroDivisionError, OverflowError):
            return
        assert isinstance(value, int | float)
        assert not isinstance(value, int) or value.bit_length() < 100_000
