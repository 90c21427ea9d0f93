"""Reads the actions out of a model's response.

    "<think>left is free</think> <answer>Left || Up</answer>"  ->  ["Left", "Up"]

Law: any text is parsed, in time proportional to its length. A text that has not the right form
names no action and is kept as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ACTION_SEP = "||"
MAX_ACTIONS = 5
_MARKS = ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>")
"""Removed from thoughts and answers, where they could be taken for marks later."""
_ANSWER_AFTER_THOUGHT = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A response as it is kept, and the actions that it names."""

    llm_response: str
    actions: tuple[str, ...] = ()


def parse_response(
    raw: str,
    *,
    action_sep: str = ACTION_SEP,
    max_actions: int = MAX_ACTIONS,
    enable_think: bool = True,
) -> Parsed:
    """Parse a response: the first thought with an answer after it, or just the first answer.

    Args:
        raw: The response.
        action_sep: What stands between two actions.
        max_actions: Actions beyond this number are dropped.
        enable_think: Whether a response needs a thought before its answer.
    """
    found = _thought_and_answer(raw) if enable_think else _answer(raw)
    if found is None:
        return Parsed(raw)
    thought, answer = (_without_marks(part) for part in found)
    actions = tuple(name for part in answer.split(action_sep) if (name := part.strip()))
    if len(actions) > max_actions:
        actions = actions[:max_actions]
        answer = f" {action_sep} ".join(actions)
    return Parsed(format_response(thought, answer, enable_think=enable_think), actions)


def format_response(thought: str, answer: str, *, enable_think: bool = True) -> str:
    """A response in the right form."""
    said = f"<answer>{answer}</answer>"
    return f"<think>{thought}</think>{said}" if enable_think else said


# These find what one lazy regular expression would. Such an expression starts again at every mark
# and takes hours for a megabyte of marks; here each mark is looked at once.


def _thought_and_answer(raw: str) -> tuple[str, str] | None:
    begin = raw.find("<think>")
    if begin < 0:
        return None
    begin += len("<think>")
    between = _ANSWER_AFTER_THOUGHT.search(raw, begin)
    if between is None:
        return None
    end = raw.find("</answer>", between.end())
    return None if end < 0 else (raw[begin : between.start()], raw[between.end() : end])


def _answer(raw: str) -> tuple[str, str] | None:
    begin = raw.find("<answer>")
    if begin < 0:
        return None
    begin += len("<answer>")
    end = raw.find("</answer>", begin)
    return None if end < 0 else ("", raw[begin:end])


def _without_marks(text: str) -> str:
    for mark in _MARKS:
        text = text.replace(mark, "").strip()
    return text
