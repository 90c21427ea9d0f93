"""Responses of models, read: the right form, the wrong ones, and those meant to hurt."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.llm.parsing import Parsed, format_response, parse_response
from tests.gates import computes_within


def actions_of(raw, **options):
    return list(parse_response(raw, **options).actions)


class TestForm:
    @pytest.mark.parametrize(
        ("raw", "actions"),
        [
            ("<think>x</think><answer>Up</answer>", ["Up"]),
            ("<think>x</think><answer>Up || Down</answer>", ["Up", "Down"]),
            ("<think>x</think> \n\t <answer>Up||Down</answer>", ["Up", "Down"]),
            ("<think>a\nb</think><answer>\n Up \n</answer>", ["Up"]),
            ("so: <think>x</think><answer>Up</answer> and more", ["Up"]),
            ("<think>x</think><answer>|| Up || || </answer>", ["Up"]),
            ("<think>x</think><answer></answer>", []),
            ("<think>x</think><answer> || </answer>", []),
            ("<think>x</think><answer>Up | Down</answer>", ["Up | Down"]),
        ],
    )
    def test_actions_are_what_stands_between_separators(self, raw, actions):
        assert actions_of(raw) == actions

    @pytest.mark.parametrize(
        "raw",
        [
            "",
            "Up",
            "<answer>Up</answer>",
            "<think>x<answer>Up</answer>",
            "<think>x</think>then<answer>Up</answer>",
            "<think>x</think><answer>Up",
            "<answer>Up</answer><think>x</think>",
            "<THINK>x</THINK><ANSWER>Up</ANSWER>",
        ],
    )
    def test_without_the_form_nothing_is_named_and_the_text_stays(self, raw):
        assert parse_response(raw) == Parsed(raw, ())

    def test_the_first_of_several_counts(self):
        raw = "<think>a</think><answer>Up</answer><think>b</think><answer>Down</answer>"
        assert parse_response(raw) == Parsed("<think>a</think><answer>Up</answer>", ("Up",))

    def test_a_thought_goes_on_to_the_end_that_an_answer_follows(self):
        raw = "<think>a</think> hm <think>b</think> <answer>Up</answer>"
        assert parse_response(raw).llm_response == "<think>a hm b</think><answer>Up</answer>"

    def test_marks_inside_are_taken_out(self):
        raw = "<think> a<|im_end|> </think><answer><answer>Up<|im_start|> || <think>Down</answer>"
        assert parse_response(raw) == Parsed(
            "<think>a</think><answer>Up || Down</answer>", ("Up", "Down")
        )

    def test_more_actions_than_a_turn_may_have_are_cut_off(self):
        found = parse_response("<think>x</think><answer>a||b||c||d</answer>", max_actions=2)
        assert found == Parsed("<think>x</think><answer>a || b</answer>", ("a", "b"))

    def test_an_answer_of_the_right_length_stays_as_it_was_written(self):
        found = parse_response("<think>x</think><answer>a||b</answer>", max_actions=2)
        assert found.llm_response == "<think>x</think><answer>a||b</answer>"

    def test_another_separator(self):
        raw = "<think>x</think><answer>a; b || c</answer>"
        assert actions_of(raw, action_sep=";") == ["a", "b || c"]

    def test_without_thoughts_an_answer_is_enough(self):
        raw = "<think>x</think><answer>Up</answer>"
        assert parse_response(raw, enable_think=False) == Parsed("<answer>Up</answer>", ("Up",))
        assert actions_of("<answer>Up</answer>", enable_think=False) == ["Up"]
        assert actions_of("<answer>Up", enable_think=False) == []


PARTS = ["<think>", "</think>", "<answer>", "</answer>", "||", " ", "\n", "Up", "<|im_end|>", "<"]
THOUGHT_AND_ANSWER = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join))
def test_it_finds_what_a_lazy_expression_finds(raw):
    thinking, plain = THOUGHT_AND_ANSWER.search(raw), ANSWER.search(raw)
    for match, enable_think in ((thinking, True), (plain, False)):
        got = parse_response(raw, enable_think=enable_think)
        if match is None:
            assert got == Parsed(raw)
        else:
            answer = match.groups()[-1]
            for mark in ("<think>", "</think>", "<answer>", "</answer>", "<|im_end|>"):
                answer = answer.replace(mark, "").strip()
            assert list(got.actions) == [a.strip() for a in answer.split("||") if a.strip()][:5]


@given(st.lists(st.text("abc[]|1 ", min_size=1).map(str.strip).filter(bool), min_size=1))
def test_what_is_written_is_read_again(names):
    names = [name.replace("||", "") for name in names if name.replace("||", "").strip("| ")][:5]
    found = parse_response(format_response("why", " ; ".join(names)), action_sep=";")
    assert list(found.actions) == names
    assert parse_response(found.llm_response, action_sep=";") == found


@pytest.mark.parametrize(
    "raw",
    [
        "<think>" * 150_000,
        "<think>" * 75_000 + "</think>" * 75_000,
        "<think></think>" * 70_000,
        "<think></think><answer>" * 45_000,
        "<think>" + "</think> " * 100_000 + "<answer>",
        "<think>x</think>" + " " * 1_000_000 + "<answer",
        ("<think>x</think>" + " " * 1_000) * 1_000,
        "<think>x</think><answer>" + "||" * 500_000 + "</answer>",
        "<think>x</think><answer>" + "Up||" * 250_000 + "</answer>",
        "<think>x</think><answer>" + "<think>" * 140_000 + "</answer>",
        "<answer>" * 125_000,
        "\x00\x1b[2J\ud800" * 200_000,
        "<think>\x00</think><answer>" + "\N{PILE OF POO}" * 250_000 + "</answer>",
    ],
    ids=lambda raw: f"{raw[:24]!r}",
)
@pytest.mark.parametrize("enable_think", [True, False])
def test_a_megabyte_meant_to_hurt_takes_milliseconds(raw, enable_think):
    with computes_within(0.25):
        found = parse_response(raw, enable_think=enable_think)
    assert len(found.actions) <= 5
