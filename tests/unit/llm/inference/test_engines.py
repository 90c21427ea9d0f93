"""Engines that run in this process: a script, PyTorch models, and RAGEN's worker groups."""

import asyncio
import math
import statistics
import threading
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from envfleet.errors import ConfigError, InferenceError
from envfleet.llm import SharedLLMInferenceManager
from envfleet.llm.inference.generate_sequences import GenerateSequencesEngine
from envfleet.llm.inference.scripted import LognormalLatency, ScriptedEngine
from envfleet.llm.inference.transformers_engine import TransformersEngine
from tests.unit.llm.inference.stage import PATIENCE_S, ask

# ---- a script -----------------------------------------------------------------------------------


def answered(engine, *requests):
    with SharedLLMInferenceManager(engine) as llm:
        found = [llm.submit(request) for request in requests]
        return [one.result(PATIENCE_S) for one in found]


def test_a_script_names_actions_of_the_prompt_and_depends_on_content_and_seed_only():
    text = "Your available actions are:\nUp, Down\nGo."
    first, again, other = answered(
        ScriptedEngine(), ask("a", text, seed=1), ask("b", text, seed=1), ask("c", text, seed=2)
    )
    assert first.text == again.text
    assert (first.token_ids, first.log_probs) == (again.token_ids, again.log_probs)
    assert first.log_probs != other.log_probs
    assert set(first.text[34:-9].split(" || ")) <= {"Up", "Down"}
    assert bytes(first.token_ids).decode() == first.text


def test_a_prefill_is_of_the_prompt_and_not_of_the_answer():
    (found,) = answered(ScriptedEngine(), ask(prefill="<think>"))
    assert found.text.startswith("by a script</think><answer>")
    assert bytes(found.prompt_ids).endswith(b"<|assistant|><think>")


def test_a_stop_word_and_a_limit_end_an_answer():
    stopped, cut = answered(ScriptedEngine(), ask(stop=("</think>",)), ask(max_tokens=4))
    assert (stopped.text, stopped.stop_reason) == ("<think>by a script", "stop")
    assert (cut.text, cut.stop_reason) == ("<thi", "length")


def test_latencies_are_lognormal_and_belong_to_the_request():
    latency = LognormalLatency(2.0, 1.25)
    import random

    times = [latency(ask(), random.Random(number)) for number in range(4000)]
    assert statistics.median(times) == pytest.approx(2.0, rel=0.1)
    assert statistics.stdev(map(math.log, times)) == pytest.approx(1.25, rel=0.05)
    found = answered(ScriptedEngine(latency=LognormalLatency(0.001, 1.0)), ask(), ask())
    assert found[0].times.decode_s == found[1].times.decode_s > 0


# ---- PyTorch ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """A Llama with random weights, and a tokenizer of bytes."""
    letters = ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    vocabulary["<end>"] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    )
    fast.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=vocabulary["<end>"],
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval(), fast


def test_a_model_of_pytorch_answers_by_seed_with_exact_ids_and_log_probs(tiny):
    model, tokenizer = tiny
    before = torch.random.get_rng_state()
    first, again, other = answered(
        TransformersEngine(model, tokenizer),
        ask("a", seed=1, max_tokens=8, prefill="<think>"),
        ask("b", seed=1, max_tokens=8, prefill="<think>"),
        ask("c", seed=2, max_tokens=8, prefill="<think>"),
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.token_ids == again.token_ids != other.token_ids
    assert (
        tokenizer.decode(list(first.prompt_ids)) == "[system]Play.[user]What now?[assistant]<think>"
    )
    whole = torch.tensor([[*first.prompt_ids, *first.token_ids]])
    with torch.inference_mode():
        logits = model(whole).logits[0].log_softmax(-1)
    start = len(first.prompt_ids) - 1
    expected = [float(logits[start + i, one]) for i, one in enumerate(first.token_ids)]
    assert first.log_probs == pytest.approx(expected, abs=1e-4)


def test_at_temperature_zero_it_equals_generate_of_transformers(tiny):
    model, tokenizer = tiny
    (found,) = answered(TransformersEngine(model, tokenizer), ask(temperature=0, max_tokens=12))
    ids = torch.tensor([found.prompt_ids])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )
    assert list(found.token_ids) == expected[0, len(found.prompt_ids) :].tolist()


def test_top_p_leaves_out_what_is_improbable(tiny):
    model, tokenizer = tiny
    requests = [ask(seed=s, top_p=1e-6, max_tokens=6) for s in range(3)]
    found = answered(
        TransformersEngine(model, tokenizer), *requests, ask(temperature=0, max_tokens=6)
    )
    assert len({one.token_ids for one in found}) == 1


def test_a_conversation_that_is_too_long_is_refused(tiny):
    model, tokenizer = tiny
    with pytest.raises(InferenceError, match=r"tokens, and the model reads 128"):
        answered(TransformersEngine(model, tokenizer), ask(text="x" * 200))


# ---- worker groups ------------------------------------------------------------------------------


class TextGroup:
    """As RAGEN's wrappers: reads messages, answers with texts, is no friend of threads."""

    world_size = 4

    def __init__(self):
        self.sizes = []
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)

    def generate_sequences(self, lm_inputs):
        self.entered.release()
        assert self.gate.wait(PATIENCE_S)
        messages = lm_inputs.non_tensor_batch["messages_list"]
        self.sizes.append(len(lm_inputs))
        texts = [f"<think>saw {one[-1]['content']}" for one in messages]
        return SimpleNamespace(non_tensor_batch={"response_texts": texts}, batch=None)


def test_requests_that_come_while_a_batch_is_under_way_form_the_next_one():
    group = TextGroup()
    with SharedLLMInferenceManager(GenerateSequencesEngine(group)) as llm:
        first = llm.submit(ask(text="0", prefill="<think>"))
        assert group.entered.acquire(timeout=PATIENCE_S)
        rest = [llm.submit(ask(text=str(number))) for number in range(1, 7)]
        while llm.stats.num_in_flight < 7:
            pass
        group.gate.set()
        assert first.result(PATIENCE_S).text == "saw 0"
        found = [one.result(PATIENCE_S).text for one in rest]
    assert found == [f"<think>saw {number}" for number in range(1, 7)]
    assert group.sizes == [4, 8]  # multiples of the world


def test_answers_as_ids_are_decoded_and_kept(tiny):
    _, tokenizer = tiny

    class IdGroup:
        def __init__(self):
            self.prompts = []

        def generate_sequences(self, lm_inputs):
            ids, mask = lm_inputs.batch["input_ids"], lm_inputs.batch["attention_mask"]
            assert (mask[:, -1] == 1).all()  # padded on the left
            lengths = mask.sum(-1).tolist()
            prompts = [
                tokenizer.decode(row[-length:]) for row, length in zip(ids, lengths, strict=True)
            ]
            self.prompts += prompts
            up = [*tokenizer("Up")["input_ids"], tokenizer.pad_token_id]
            down = tokenizer("Dow")["input_ids"]
            rows = [down if "bcd" in prompt else up for prompt in prompts]
            return SimpleNamespace(batch={"responses": torch.tensor(rows)}, non_tensor_batch={})

    group = IdGroup()
    found = answered(GenerateSequencesEngine(group, tokenizer), ask(text="a"), ask(text="bcd"))
    assert [one.text for one in found] == ["Up", "Dow"]
    assert [len(one.token_ids) for one in found] == [2, 3]
    assert group.prompts[1] == "[system]Play.[user]bcd[assistant]"


def test_a_group_that_raises_fails_its_batch_with_its_reason():
    class Bad:
        def generate_sequences(self, lm_inputs):
            raise RuntimeError("out of memory")

    with pytest.raises(InferenceError, match="RuntimeError: out of memory"):
        answered(GenerateSequencesEngine(Bad()), ask())
    with pytest.raises(ConfigError, match=r"object has no generate_sequences"):
        GenerateSequencesEngine(object())


# ---- an engine of the user's own ----------------------------------------------------------------


def test_any_object_of_the_protocol_is_an_engine():
    class Echo:
        name, is_deterministic, max_concurrency = "echo", True, 2

        async def start(self):
            pass

        async def generate(self, request):
            await asyncio.sleep(0)
            return await ScriptedEngine(lambda r, d: r.messages[-1].content).generate(request)

        async def close(self):
            pass

    (found,) = answered(Echo(), ask(text="hello"))
    assert found.text == "hello"
