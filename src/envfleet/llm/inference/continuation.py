"""What a chat template writes between one answer and the next. Pure.

A conversation whose tokens are known up to an answer goes on with what follows that answer in the
template's text: the end of the answer, the new messages, and the beginning of the next answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from envfleet.llm.inference.types import Message

_ANSWER = "envfleet-answer-0"
"""Stands for an answer where only what a template writes after it is of interest."""


def probe_messages(new: Sequence[Message]) -> list[Message]:
    """A conversation for a template, with these messages after an answer."""
    return [Message("user", "-"), Message("assistant", _ANSWER), *new]


def text_after_answer(whole: str) -> str | None:
    """What the template wrote after the answer of `probe_messages`; None if it left that out."""
    _, found, after = whole.partition(_ANSWER)
    return after if found else None


def new_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Those after the last answer."""
    answers = [place for place, one in enumerate(messages) if one.role == "assistant"]
    return tuple(messages[answers[-1] + 1 :] if answers else messages)
