"""What the model is told before each answer, and the form that its answer must have.

    system, instruction + state ─► answer ─► reward + state ─► answer ─► ...

The messages are those of RAGEN: what the environment is, its symbols and actions, then turn by turn
the state, the actions that are left and the form of an answer. Another function of `PromptInput`
may be named in `agent_proxy.prompt`. Law: messages depend on their input only, so a conversation
that is rebuilt from a journal is the one that was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.llm.environments.base import gbnf_text
from envfleet.llm.inference.types import Message
from envfleet.llm.settings import AgentProxy, Tag
from envfleet.llm.trajectories import TrajectoryTurn

__all__ = ["PromptInput", "TagPrompt", "WritePrompt", "format_grammar", "tag_prompt"]
__all__ += ["prefill_of", "write_messages"]

SYSTEM = "You're a helpful assistant. "
_MAX_TOKENS = 100
"""The length of a response that the model is told, where the configuration says none."""
_MOST_THOUGHT, _MOST_ANSWER = 150, 80
"""Characters of a thought and of a free answer that a grammar allows."""


@dataclass(frozen=True, slots=True)
class TagPrompt:
    """What messages say about one kind of environment."""

    prefix: str
    """What it is, what its symbols mean, and which actions it has."""
    max_tokens: int
    """How long a response may be, in words to the model."""
    actions: tuple[str, ...] | None
    """Their names; None if they have none."""
    form: str | None = None
    """What an action without a name looks like, in GBNF; None if it is any text."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """What the messages of one turn are written from."""

    tag: TagPrompt
    proxy: AgentProxy
    turns: Sequence[TrajectoryTurn]
    """The turns so far, all of them."""
    state: str
    actions_left: int
    max_context_window: int = -1
    """How many turns the model is shown, this one included; -1 for all."""


WritePrompt = Callable[[PromptInput], Sequence[Message]]


def tag_prompt(tag: Tag, about: Mapping[str, Any], proxy: AgentProxy) -> TagPrompt:
    """What messages say about a tag.

    Args:
        tag: The tag.
        about: Its block of `custom_envs`.
        proxy: How responses are written.
    """
    config = tag.env_type.config(tag.env_config)
    vocab = getattr(config, "grid_vocab", None)
    lookup = getattr(config, "action_lookup", None)
    prefix = str(about.get("env_instruction") or "")
    if vocab:
        meanings = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in vocab.items())
        prefix += f"\nThe meaning of each symbol in the state is:\n{meanings}"
    if lookup:
        prefix += (
            f"\nYour available actions are:\n{', '.join(lookup.values())}\n"
            f"You can make up to {tag.max_actions_per_traj} actions, separated by the action "
            f'separator " {proxy.action_sep} "\n'
        )
    names = tuple(lookup.values()) if lookup else None
    return TagPrompt(
        prefix, int(about.get("max_tokens") or _MAX_TOKENS), names, config.action_grammar()
    )


def write_messages(given: PromptInput) -> list[Message]:
    """The whole conversation up to the coming answer."""
    first = 0
    if given.max_context_window > 0:
        first = max(0, len(given.turns) + 1 - given.max_context_window)
    messages = [Message("system", SYSTEM)]
    said = given.tag.prefix
    for turn in given.turns[first:]:
        said += _turn_text(given, turn.number, turn.state, turn.actions_left)
        messages += [Message("user", said), Message("assistant", turn.llm_response)]
        said = f"Reward:\n{turn.reward}\n"
    said += _turn_text(given, len(given.turns), given.state, given.actions_left)
    return [*messages, Message("user", said)]


def _turn_text(given: PromptInput, number: int, state: str, actions_left: int) -> str:
    thought = "<think> [Your thoughts] </think> " if given.proxy.enable_think else ""
    return (
        f"\nTurn {number + 1}:\nState:\n{state}\nYou have {actions_left} actions left. "
        f"Always output: {thought}<answer> [your answer] </answer> with no extra text. "
        "Strictly follow this format. "
        f"Max response length: {given.tag.max_tokens} words (tokens).\n"
    )


def prefill_of(proxy: AgentProxy) -> str:
    """The beginning of every answer, which the model does not choose."""
    return "<think>" if proxy.enable_think else "<answer>"


def format_grammar(tag: TagPrompt, proxy: AgentProxy) -> str:
    """A GBNF grammar of what may follow the prefill.

    Actions with names can be those only; a thought is short enough to leave room for the answer.
    """
    thought = f"[^<]{{1,{_MOST_THOUGHT}}}"
    lines = [
        f'root ::= thought "</think><answer>" answer "</answer>"\nthought ::= {thought}'
        if proxy.enable_think
        else 'root ::= answer "</answer>"'
    ]
    if tag.actions is None:
        # any text, but not blank
        answer = tag.form or f"[^< \\t\\r\\n] [^<]{{0,{_MOST_ANSWER - 1}}}"
        return "\n".join([*lines, f"answer ::= {answer}"])
    more = proxy.max_actions_per_turn - 1
    rest = f" ({gbnf_text(f' {proxy.action_sep} ')} action){{0,{more}}}" if more else ""
    names = " | ".join(gbnf_text(name) for name in tag.actions)
    return "\n".join([*lines, f"answer ::= action{rest}", f"action ::= {names}"])
