"""Generated word problems: worked out again from what is written, by other means than theirs."""

import ast
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest

from envfleet.errors import ConfigError
from envfleet.llm.environments.problems.story import decimal
from envfleet.llm.environments.word_problems import TEMPLATES, WordProblems, word_problem

MANY = [word_problem(7, index) for index in range(2000)]
NUMBER = r"-?\d+(?:\.\d+|/\d+)?"
CALCULATION = re.compile(rf"([-(\d][-\d./ +*()]*?) = ({NUMBER})(?![\d/])")


def worked_out(node):
    """The value of a calculation, by Python's own grammar and exact arithmetic."""
    match node:
        case ast.Expression(body=body):
            return worked_out(body)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -worked_out(operand)
        case ast.Constant(value=value):
            return Fraction(str(value))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = worked_out(left), worked_out(right)
            if isinstance(op, ast.Add):
                return a + b
            if isinstance(op, ast.Sub):
                return a - b
            return a * b if isinstance(op, ast.Mult) else a / b
    raise AssertionError(ast.dump(node))


def numbers_in(text):
    return Counter(Fraction(one) for one in re.findall(NUMBER, text))


def test_there_are_many_templates_and_all_are_used():
    assert len(TEMPLATES) >= 20
    assert {one.template for one in MANY} == {template.__name__ for _, template in TEMPLATES}
    assert all(template.__doc__ for _, template in TEMPLATES)


def test_every_line_of_working_is_right_and_the_last_is_the_answer():
    for problem in MANY:
        for line in problem.working:
            ((calculation, result),) = CALCULATION.findall(line)
            value = worked_out(ast.parse(calculation.strip(), mode="eval"))
            assert value == Fraction(result), line
        assert Fraction(result) == problem.answer == Fraction(problem.answer_text), problem


def test_working_uses_numbers_of_the_text_or_of_earlier_lines_only():
    for problem in MANY:
        known = set(numbers_in(problem.query))
        known |= {Fraction(100)} if "percent" in problem.query else set()
        for line in problem.working:
            ((calculation, result),) = CALCULATION.findall(line)
            signs = re.findall(rf"\(({NUMBER})\)|(?<![\d.])(\d+(?:\.\d+)?)", calculation)
            for one in ("".join(pair) for pair in signs):
                assert Fraction(one) in known, (problem, one)
            known.add(Fraction(result))


def test_working_uses_every_number_of_the_text():
    for problem in MANY:
        unused = numbers_in(problem.query).keys() - numbers_in(" ".join(problem.working)).keys()
        assert not unused, (problem, unused)


def test_there_are_one_to_four_steps_and_three_kinds_of_answer():
    assert {len(problem.working) for problem in MANY} == {1, 2, 3, 4}
    forms = {re.sub(r"\d+", "1", problem.answer_text) for problem in MANY}
    assert {"1", "-1", "1.1", "1/1"} == forms


def test_answers_are_written_as_the_text_asks():
    for problem in MANY:
        text = problem.answer_text
        if "trailing zeros" in problem.query:
            assert re.fullmatch(r"\d+(\.\d*[1-9])?", text), problem
        elif "lowest terms" in problem.query:
            assert text == str(Fraction(text)), problem
        else:
            assert re.fullmatch(r"-?\d+", text), problem


def test_one_is_singular_and_others_are_plural():
    for problem in MANY:
        words = re.findall(r"(?<![\d./$-])(\d+) ([a-z]+)", problem.query)
        for count, word in words:
            is_plural = word.endswith("s") or word in ("geese", "sheep", "children")
            if count == "1":
                assert not is_plural, problem.query
            elif word in ("chair", "marble", "coin", "loaf", "pastry", "goose", "hour", "friend"):
                raise AssertionError(problem.query)
        assert not re.search(r"= 1 [a-z]+s\b", " ".join(problem.working)), problem.working


def test_sentences_are_whole():
    for problem in MANY:
        assert re.fullmatch(r"[A-Z0-9][^{}\n]*[.?]", problem.query), problem.query
        assert "  " not in problem.query
        assert "?" in problem.query
        for line in problem.working:
            assert re.fullmatch(r"[A-Z][^{}\n]*\.", line), line


def test_quantities_make_sense():
    """No story takes away what is not there; only temperatures go below zero."""
    for problem in MANY:
        if problem.template != "temperature":
            assert "-" not in problem.answer_text
            assert not re.search(r"(?<!\d )-\d|\$-", problem.query), problem.query
            assert all(Fraction(CALCULATION.findall(w)[0][1]) > 0 for w in problem.working)


def test_a_problem_depends_on_its_seed_and_number_only():
    assert word_problem(3, 41) == word_problem(3, 41)
    assert word_problem(3, 41) != word_problem(4, 41)
    assert len({word_problem(0, index).query for index in range(500)}) > 480


def test_a_problem_is_the_same_in_another_process_with_other_hashes():
    code = (
        "from envfleet.llm.environments.word_problems import word_problem\n"
        "for index in range(50): print(word_problem(5, index))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.splitlines() == [str(word_problem(5, index)) for index in range(50)]


def test_rows_are_metamath_s():
    rows = WordProblems(7, 3)
    assert len(rows) == 3
    assert list(rows) == [problem.row() for problem in MANY[:3]]
    for row, problem in zip(rows, MANY, strict=False):
        assert set(row) == {"type", "query", "original_question", "response"}
        assert row["response"].endswith(f"\nThe answer is: {problem.answer_text}")
        assert row["response"].count("The answer is: ") == 1
    with pytest.raises(IndexError):
        rows[3]
    with pytest.raises(ConfigError, match="at least 1"):
        WordProblems(0, 0)


def test_a_decimal_is_never_rounded():
    assert decimal(Fraction(5, 4)) == "1.25"
    assert decimal(Fraction(-1, 2)) == "-0.5"
    with pytest.raises(ValueError, match="more than two decimals"):
        decimal(Fraction(1, 3))
