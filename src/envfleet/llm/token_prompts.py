"""Conversations as tokens that only grow.

    first prompt │ answer │ what the environment said │ answer │ ...

A chat template writes messages as text. Writing the whole conversation anew in every turn and
tokenising it again gives other tokens than the model drew. Here only what is new is tokenised: the
first prompt, and later what stands between one answer and the next. Law: the prompt of a turn
begins with the prompt and the answer of the turn before, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from envfleet.errors import ConfigError
from envfleet.llm.inference.continuation import new_messages, probe_messages, text_after_answer
from envfleet.llm.inference.types import GenerateRequest, Generation, Message


class TokenPrompts:
    """Writes prompts as tokens, by a tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a Hugging Face tokenizer, or anything with its methods."""
        self._tokenizer = tokenizer

    def first(self, messages: Sequence[Message], prefill: str = "") -> tuple[int, ...]:
        """The prompt of a conversation that begins."""
        return self._ids(self._text(messages) + prefill)

    def following(
        self, so_far: Sequence[int], new: Sequence[Message], prefill: str = ""
    ) -> tuple[int, ...]:
        """The prompt after an answer.

        Args:
            so_far: The last prompt and its answer.
            new: The messages since.
            prefill: The beginning of the next answer.
        """
        after = text_after_answer(self._text(probe_messages(new)))
        if after is None:
            raise ConfigError(
                "the chat template leaves out an earlier answer, so a conversation of several "
                "turns has no fixed tokens; use a template that keeps answers, or "
                "agent_proxy.max_turn=1"
            )
        added = self._ids(after + prefill)
        if so_far and added and so_far[-1] == added[0] == self._tokenizer.eos_token_id:
            added = added[1:]  # the model has ended its answer itself
        return (*so_far, *added)

    def _text(self, messages: Sequence[Message]) -> str:
        plain = [{"role": one.role, "content": one.content} for one in messages]
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
            return str(text)
        lines = [f"{one['role']}: {one['content']}\n" for one in plain]
        return "".join([*lines, "assistant: "])

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(int, self._tokenizer(text, add_special_tokens=False)["input_ids"]))


class TokenAsk:
    """Asks a model in tokens, for callers that ask in messages.

    Requests of one conversation have ids that differ in what follows the last dot, and come one
    after another.
    """

    def __init__(
        self, prompts: TokenPrompts, ask: Callable[[GenerateRequest], Future[Generation]]
    ) -> None:
        self._prompts, self._ask = prompts, ask
        self._so_far: dict[str, tuple[int, ...]] = {}

    def __call__(self, request: GenerateRequest) -> Future[Generation]:
        """Ask, with the prompt as tokens."""
        conversation = request.request_id.rpartition(".")[0]
        so_far = self._so_far.pop(conversation, None)
        if so_far is None:
            ids = self._prompts.first(request.messages, request.prefill)
        else:
            ids = self._prompts.following(so_far, new_messages(request.messages), request.prefill)
        asked = self._ask(replace(request, prompt_ids=ids))

        def keep(done: Future[Generation]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._so_far[conversation] = (*ids, *(done.result().token_ids or ()))

        # before the caller's own: the answer may lead to the next request at once
        asked.add_done_callback(keep)
        return asked
