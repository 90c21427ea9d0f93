"""Conversations as tokens that only grow."""

from concurrent.futures import Future

import pytest

from envfleet.errors import ConfigError
from envfleet.llm.inference.types import GenerateRequest, Generation, Message
from envfleet.llm.token_prompts import TokenAsk, TokenPrompts

END = ord("$")


class Letters:
    """A tokenizer: each letter is its number, and a dollar ends a message."""

    eos_token_id = END
    chat_template = "there is one"

    def __init__(self, drops_answers=False):
        self._drops_answers = drops_answers

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [ord(one) for one in text]}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        shown = [one for one in messages if one["role"] != "assistant" or not self._drops_answers]
        return "".join(f"{one['role'][0]}:{one['content']}$" for one in shown) + "a:"


def letters(ids):
    return "".join(map(chr, ids))


def test_the_first_prompt_is_the_template_s():
    found = TokenPrompts(Letters()).first([Message("system", "S"), Message("user", "U")], "<")

    assert letters(found) == "s:S$u:U$a:<"


@pytest.mark.parametrize("answer", ["Left", "Left$"])
def test_an_answer_is_ended_once_whether_the_model_ended_it_or_not(answer):
    so_far = [ord(one) for one in f"u:U$a:<{answer}"]

    found = TokenPrompts(Letters()).following(so_far, [Message("user", "V")], "<")

    assert letters(found) == "u:U$a:<Left$u:V$a:<"


def test_a_tokenizer_without_a_template_gets_lines():
    plain = Letters()
    plain.chat_template = ""

    assert letters(TokenPrompts(plain).first([Message("user", "U")])) == "user: U\nassistant: "


def test_a_template_that_leaves_answers_out_is_refused():
    with pytest.raises(ConfigError, match="leaves out an earlier answer"):
        TokenPrompts(Letters(drops_answers=True)).following([1], [Message("user", "V")])


def test_conversations_grow_each_for_itself():
    asked = []

    def ask(request):
        asked.append(letters(request.prompt_ids))
        future: Future[Generation] = Future()
        ids = tuple(map(ord, f"{len(asked)}$"))
        future.set_result(Generation(text="", stop_reason="stop", token_ids=ids))
        return future

    tokens = TokenAsk(TokenPrompts(Letters()), ask)
    first, answer, second = Message("user", "U"), Message("assistant", "x"), Message("user", "V")
    tokens(GenerateRequest(request_id="0.0.0", messages=(first,)))
    tokens(GenerateRequest(request_id="1.0.0", messages=(second,)))
    tokens(GenerateRequest(request_id="0.0.1", messages=(first, answer, second)))

    assert asked == ["u:U$a:", "u:V$a:", "u:U$a:1$u:V$a:"]
