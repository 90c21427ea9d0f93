"""Servers that speak OpenAI's protocol: what they are asked, and how their answers are read."""

import pytest

from envfleet.errors import InferenceError
from envfleet.llm import SharedLLMInferenceManager
from envfleet.llm.inference.scripted import ScriptedEngine
from tests.misbehaving_server import MisbehavingServer
from tests.unit.llm.inference.stage import ask


def manager(server, **llm):
    block = {"base_url": server.base_url, "retry_delay_s": 0.001, **llm}
    return SharedLLMInferenceManager.from_config({"llm": block})


@pytest.fixture(scope="module")
def expected():
    with SharedLLMInferenceManager(ScriptedEngine()) as llm:
        return llm.generate(ask(prefill="<think>", seed=5))


@pytest.mark.parametrize(
    ("owned_by", "tells_ids", "tells_prompt"),
    [("", False, False), ("llamacpp", True, False), ("vllm", True, True)],
)
def test_an_answer_is_put_together_from_its_stream(owned_by, tells_ids, tells_prompt, expected):
    with MisbehavingServer(owned_by=owned_by) as server, manager(server) as llm:
        found = llm.generate(ask(prefill="<think>", seed=5))
    assert (found.text, found.stop_reason) == (expected.text, expected.stop_reason)
    assert found.num_tokens == expected.num_tokens
    assert found.num_prompt_tokens == expected.num_prompt_tokens
    assert found.token_ids == (expected.token_ids if tells_ids else None)
    assert found.log_probs == (expected.log_probs if tells_ids else None)
    assert found.prompt_ids == (expected.prompt_ids if tells_prompt else None)
    assert found.model_version == "script-1"


def test_a_request_is_streamed_bounded_and_seeded():
    with MisbehavingServer() as server, manager(server) as llm:
        llm.generate(ask(prefill="<think>", seed=5, max_tokens=33, stop=("</answer>",)))
        (body,) = server.requests
    assert (body["stream"], body["max_tokens"], body["seed"]) == (True, 33, 5)
    assert body["stop"] == ["</answer>"]
    assert [one["role"] for one in body["messages"]] == ["system", "user", "assistant"]
    # an unknown server may refuse what is not of the protocol
    beyond = {"return_token_ids", "return_tokens", "grammar", "continue_final_message", "ebnf"}
    assert not beyond & body.keys()


@pytest.mark.parametrize(
    ("owned_by", "field"),
    [("vllm", "structured_outputs"), ("llamacpp", "grammar"), ("sglang", "ebnf")],
)
def test_a_grammar_goes_to_servers_that_know_one(owned_by, field):
    with MisbehavingServer(owned_by=owned_by) as server, manager(server) as llm:
        llm.generate(ask(grammar='root ::= "a"'))
        assert field in server.requests[0]


def test_token_ids_of_a_prompt_are_continued_as_they_are():
    ids = tuple(b"Once upon a time")
    with MisbehavingServer(owned_by="vllm") as server, manager(server) as llm:
        found = llm.generate(ask(prompt_ids=ids))
        assert server.requests[0]["prompt"] == list(ids)
    with SharedLLMInferenceManager(ScriptedEngine()) as script:
        assert found.prompt_ids == ids
        # the server was told no messages, which the script reads
        assert len(found.token_ids) == len(found.log_probs) == found.num_tokens
        assert script.generate(ask(prompt_ids=ids)).prompt_ids == ids


def test_an_answer_at_the_limit_says_so():
    with MisbehavingServer() as server, manager(server) as llm:
        found = llm.generate(ask(max_tokens=5))
    assert (found.stop_reason, found.num_tokens, len(found.text)) == ("length", 5, 5)


def test_a_server_that_lists_no_models_needs_a_name():
    with MisbehavingServer(lists_models=False) as server:
        with pytest.raises(InferenceError, match=r"does not say.*name one by llm\.model"):
            manager(server)
        with manager(server, model="mine") as llm:
            assert llm.generate(ask()).model_version == "mine"
            assert server.requests[0]["model"] == "mine"


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("status 400: bad", r"answered 400: bad\. Check llm\.model"),
        ("status 401", r"environment variable MY_KEY"),
        ("status 404", r"Check llm\.model and llm\.base_url"),
        (
            'status 400: {"error": {"message": "maximum context length is 9"}}',
            r"context length is 9\. Set agent_proxy\.max_context_window",
        ),
        ('status 429: {"error": {"code": "insufficient_quota"}}', "answered 429"),
        ("status 302", "answered 302"),
    ],
)
def test_what_cannot_pass_is_asked_once_and_says_what_to_do(fault, advice):
    with MisbehavingServer() as server, manager(server, api_key_env="MY_KEY") as llm:
        server.always_misbehave(fault)
        with pytest.raises(InferenceError, match=advice) as caught:
            llm.generate(ask())
        assert (caught.value.reason, caught.value.is_retryable) == ("engine", False)
        assert len(server.requests) == 1


def test_a_server_that_is_not_there_says_so():
    block = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "max_retries": 0}
    with (
        SharedLLMInferenceManager.from_config({"llm": block}) as llm,
        pytest.raises(InferenceError, match=r"127\.0\.0\.1:9/v1 cannot be reached") as caught,
    ):
        llm.generate(ask())
    assert caught.value.is_retryable
