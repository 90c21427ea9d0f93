"""What a model wrote, as the actions it named.

    "<think>left is free</think> <answer>Left || Up</answer>"  ->  ["Left", "Up"]

Pure. Law: every text has an answer, in time that grows with its length only; a text without the
right form names nothing and is kept as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ACTION_SEP = "||"
MAX_ACTIONS = 5
_MARKS = ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>")
"""Taken out of thoughts and answers, where they would be read as something else later."""
_ANSWER_AFTER_THOUGHT = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A response as it is kept, and what it asks for."""

    llm_response: str
    actions: tuple[str, ...] = ()


def parse_response(
    raw: str,
    *,
    action_sep: str = ACTION_SEP,
    max_actions: int = MAX_ACTIONS,
    enable_think: bool = True,
) -> Parsed:
    """Read a response: the first thought with an answer behind it, or the first answer alone.

    Args:
        raw: What the model wrote.
        action_sep: What stands between two actions.
        max_actions: How many count; the rest is cut off.
        enable_think: Whether an answer needs a thought before it.
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


# What one lazy regular expression over the whole text would find. Such an expression begins anew at
# every mark, and a megabyte of marks takes it hours: here each of them is looked at once.


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
