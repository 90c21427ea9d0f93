"""The broker and its manager: order, places, retries, deadlines, budgets, and how they end."""

import asyncio
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from envfleet.errors import ConfigError, InferenceError
from envfleet.llm import SharedLLMInferenceManager
from envfleet.llm.inference.options import InferenceOptions
from envfleet.llm.inference.scripted import ScriptedEngine
from tests.unit.llm.inference.stage import PATIENCE_S, ToldEngine, ask, managed

QUICK = {"retry_delay_s": 0.001}


def told(num_places=1, **options):
    return managed(ToldEngine(num_places), **{**QUICK, **options})


def test_many_threads_ask_at_once_and_each_gets_its_own_answer():
    with SharedLLMInferenceManager(ScriptedEngine()) as llm:
        expected = {seed: llm.generate(ask(seed=seed)).text for seed in range(40)}
        found = {}
        threads = [
            threading.Thread(target=lambda s=s: found.update({s: llm.generate(ask(seed=s)).text}))
            for s in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == expected
        assert len(set(expected.values())) > 20
        assert llm.stats.num_answers == llm.stats.num_requests == 80


def test_places_are_kept_full_and_the_smallest_priority_goes_first():
    with told(2) as llm:
        engine = llm.engine
        first = [llm.submit(ask(name)) for name in "ab"]
        assert [engine.next(), engine.next()] == ["a", "b"]
        later = [llm.submit(ask(name, priority=(int(name),))) for name in "312"]
        while llm.stats.num_queued != 3:
            pass
        assert llm.stats.num_in_flight == 2
        engine.answer("b")
        assert engine.next() == "1"
        engine.answer("a")
        assert engine.next() == "2"
        engine.answer("1")
        assert engine.next() == "3"
        engine.answer("2")
        engine.answer("3")
        assert [one.result(PATIENCE_S).text for one in (*first, *later)] == ["yes"] * 5
        assert llm.stats.max_in_flight == 2


def test_equal_priorities_go_in_the_order_in_which_they_came():
    with told(1) as llm:
        futures = [llm.submit(ask(name)) for name in range(20)]
        for name in range(20):
            assert llm.engine.next() == str(name)
            llm.engine.answer(str(name))
        assert all(future.result(PATIENCE_S) for future in futures)


def test_max_concurrency_of_the_options_limits_the_engine():
    with told(8, max_concurrency=1) as llm:
        futures = [llm.submit(ask(name)) for name in "ab"]
        assert llm.engine.next() == "a"
        assert llm.engine.begun.empty()
        llm.engine.answer("a")
        assert llm.engine.next() == "b"
        llm.engine.answer("b")
        assert [one.result(PATIENCE_S).text for one in futures] == ["yes", "yes"]
        assert llm.stats.max_in_flight == 1


def test_a_cancelled_caller_frees_its_place_at_once():
    with told(1) as llm:
        first, second, third = (llm.submit(ask(name)) for name in "abc")
        assert llm.engine.next() == "a"
        assert second.cancel()
        assert first.cancel()
        assert llm.engine.next() == "c"
        assert llm.engine.ended.get(timeout=PATIENCE_S) == "a"
        llm.engine.answer("c")
        assert third.result(PATIENCE_S).text == "yes"
        assert llm.stats.num_cancelled == 2
        assert llm.stats.num_in_flight == 0


def test_a_cancelled_coroutine_of_another_loop_frees_its_place():
    async def give_up(llm):
        task = asyncio.create_task(llm.generate_async(ask("a")))
        assert await asyncio.to_thread(llm.engine.next) == "a"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer = asyncio.create_task(llm.generate_async(ask("b")))
        assert await asyncio.to_thread(llm.engine.next) == "b"
        llm.engine.answer("b", "hello")
        return (await answer).text

    with told(1) as llm:
        assert asyncio.run(give_up(llm)) == "hello"


def test_what_may_pass_is_tried_again_and_gives_its_place_to_others_meanwhile():
    with told(1, retry_delay_s=0.05) as llm:
        first, second = llm.submit(ask("a")), llm.submit(ask("b"))
        assert llm.engine.next() == "a"
        llm.engine.fail("a")
        assert llm.engine.next() == "b"
        llm.engine.answer("b")
        assert llm.engine.next() == "a"
        llm.engine.answer("a", "after all")
        assert (first.result(PATIENCE_S).text, second.result(PATIENCE_S).text) == (
            "after all",
            "yes",
        )
        assert llm.stats.retries == {"engine": 1, "timeout": 0}
        assert first.result().times.queue_s > 0.02


def test_what_cannot_pass_is_not_tried_again():
    with told() as llm:
        future = llm.submit(ask("a"))
        llm.engine.next()
        llm.engine.fail("a", InferenceError("engine", "no such model"))
        with pytest.raises(InferenceError, match="no answer: no such model"):
            future.result(PATIENCE_S)
        assert llm.stats.num_retries == 0
        assert llm.stats.failures == {"engine": 1, "timeout": 0, "budget": 0}


def test_retries_have_an_end_and_are_counted_in_the_error():
    with told(max_retries=2) as llm:
        future = llm.submit(ask("a"))
        for _ in range(3):
            assert llm.engine.next() == "a"
            llm.engine.fail("a")
        with pytest.raises(InferenceError, match="after 3 attempts: a hiccup") as caught:
            future.result(PATIENCE_S)
        assert caught.value.attempts == 3


def test_an_engine_that_raises_what_it_should_not_fails_one_request_only():
    class Broken(ToldEngine):
        async def generate(self, request):
            if request.request_id == "bad":
                raise ZeroDivisionError("a bug")
            return await ScriptedEngine().generate(request)

    with SharedLLMInferenceManager(Broken(4)) as llm:
        bad, good = llm.submit(ask("bad")), llm.submit(ask("good"))
        with pytest.raises(InferenceError, match="the engine raised ZeroDivisionError: a bug"):
            bad.result(PATIENCE_S)
        assert good.result(PATIENCE_S).text


def test_an_attempt_that_takes_too_long_is_ended_and_tried_again():
    with told(request_timeout_s=0.05, max_retries=1) as llm:
        with pytest.raises(InferenceError, match=r"longer than 0\.05 s.*request_timeout_s") as why:
            llm.generate(ask("a"))
        assert why.value.reason == "timeout"
        assert [llm.engine.next(), llm.engine.next()] == ["a", "a"]
        assert llm.stats.failures["timeout"] == llm.stats.retries["timeout"] == 1


def test_the_deadline_of_a_request_counts_its_time_in_the_queue():
    with told(1) as llm:
        first = llm.submit(ask("a"))
        with pytest.raises(InferenceError, match=r"over after 0\.05 s") as why:
            llm.generate(ask("b", timeout_s=0.05))
        assert why.value.reason == "timeout"
        llm.engine.answer(llm.engine.next())
        assert first.result(PATIENCE_S).text == "yes"
        assert llm.engine.begun.empty()


def test_a_spent_token_budget_stops_what_has_not_begun_and_keeps_what_has():
    with told(2, token_budget=10) as llm:
        first, second, third = (llm.submit(ask(name)) for name in "abc")
        assert {llm.engine.next(), llm.engine.next()} == {"a", "b"}
        llm.engine.answer("a", num_tokens=10)
        with pytest.raises(InferenceError, match=r"10 of 10.*raise llm\.token_budget") as why:
            third.result(PATIENCE_S)
        assert why.value.reason == "budget"
        llm.engine.answer("b", num_tokens=5)
        assert first.result(PATIENCE_S)
        assert second.result(PATIENCE_S)
        with pytest.raises(InferenceError, match="15 of 10"):
            llm.generate(ask("d"))
        assert llm.stats.failures["budget"] == 2


def test_a_spent_time_budget_stops_what_is_under_way_and_what_waits():
    with told(1, time_budget_s=0.1) as llm:
        running, waiting = llm.submit(ask("a")), llm.submit(ask("b"))
        for future in (running, waiting):
            with pytest.raises(InferenceError, match=r"time budget of 0\.1 s is spent") as why:
                future.result(PATIENCE_S)
            assert why.value.reason == "budget"
        assert llm.engine.next() == "a"
        assert llm.engine.begun.empty()


def test_a_server_that_is_full_holds_back_the_others_too_but_not_the_budget():
    with told(2, time_budget_s=0.3, retry_delay_s=0.001) as llm:
        first = llm.submit(ask("a"))
        assert llm.engine.next() == "a"
        llm.engine.fail("a", InferenceError("engine", "full", True, 60.0))
        while llm.stats.num_retries == 0:
            pass
        second = llm.submit(ask("b"))
        for future in (first, second):
            with pytest.raises(InferenceError, match="time budget"):
                future.result(PATIENCE_S)
        assert llm.engine.begun.empty()
        assert llm.stats.num_queued == 0


def test_every_request_ends_once_whatever_happens_to_it():
    dice = random.Random(1)

    class Capricious(ScriptedEngine):
        async def generate(self, request):
            await asyncio.sleep(dice.random() * 0.003)
            what = dice.random()
            if what < 0.2:
                raise InferenceError("engine", "a hiccup", is_retryable=True)
            if what < 0.25:
                raise InferenceError("engine", "never")
            if what < 0.3:
                await asyncio.sleep(60)
            return await super().generate(request)

    options = {"request_timeout_s": 0.05, "max_retries": 2, "max_concurrency": 7}
    with managed(Capricious(), **QUICK, **options) as llm:
        futures = [
            llm.submit(ask(n, seed=n, priority=(n % 5,), timeout_s=dice.choice([None, 0.1])))
            for n in range(300)
        ]
        is_cancelled = [future.cancel() for future in dice.sample(futures, 60)]
        ends = {"cancelled": 0, "answers": 0, "failures": 0}
        for future in futures:
            try:
                future.result(PATIENCE_S)
                ends["answers"] += 1
            except InferenceError:
                ends["failures"] += 1
            except CancelledError:
                ends["cancelled"] += 1
        assert ends["cancelled"] == sum(is_cancelled) > 0
        while llm.stats.num_queued + llm.stats.num_in_flight:
            pass  # a cancelled one is forgotten a moment after its future
        found = llm.stats
    assert min(ends.values()) > 0
    assert found.num_answers == ends["answers"]
    assert sum(found.failures.values()) == ends["failures"]
    assert found.num_requests == found.num_answers + ends["failures"] + found.num_cancelled
    assert found.max_in_flight == 7


def test_close_ends_every_request_with_an_error_and_refuses_more():
    llm = told(1)
    futures = [llm.submit(ask(name)) for name in "ab"]
    llm.engine.next()
    llm.close()
    for future in futures:
        with pytest.raises(InferenceError, match="was closed"):
            future.result(PATIENCE_S)
    with pytest.raises(InferenceError, match="was closed"):
        llm.generate(ask("c"))
    llm.close()
    assert llm.engine.is_closed


def test_an_engine_that_cannot_start_leaves_nothing_and_says_why():
    class Broken(ToldEngine):
        async def start(self):
            raise InferenceError("engine", "no memory")

    engine = Broken()
    with pytest.raises(InferenceError, match="no memory"):
        SharedLLMInferenceManager(engine)
    assert engine.is_closed


def test_a_manager_that_is_forgotten_ends_itself():
    llm = told()
    engine, gone = llm.engine, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert engine.is_closed


def test_a_program_that_forgets_to_close_ends_all_the_same():
    code = (
        "from envfleet.llm import SharedLLMInferenceManager as M\n"
        "llm = M.from_config({'llm': {'engine': 'scripted'}}); print(llm.name)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env={**os.environ},
    )
    assert (done.stdout, done.stderr) == ("scripted\n", "")


def test_a_copy_in_a_forked_process_refuses_at_once_and_its_client_works():
    code = """
import os, sys
from envfleet.errors import InferenceError
from envfleet.llm import SharedLLMInferenceManager
from tests.unit.llm.inference.stage import ask
llm = SharedLLMInferenceManager.from_config({"llm": {"engine": "scripted"}})
client = llm.client()
first = client.generate(ask()).text
if os.fork() == 0:
    try:
        llm.generate(ask())
    except InferenceError as exc:
        print("forked process" in str(exc), client.generate(ask()).text == first, flush=True)
    sys.exit()
os.wait()
print(client.generate(ask()).text == first, llm.generate(ask()).text == first)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        cwd=Path(__file__).parents[4],
    )
    assert done.stdout.split() == ["True"] * 4, done.stderr


def test_a_manager_does_not_pickle_and_says_what_does():
    with told() as llm, pytest.raises(TypeError, match=r"send its client\(\) to workers"):
        pickle.dumps(llm)


def test_importing_the_room_needs_no_http_library():
    code = "import sys, envfleet.llm; print('aiohttp' in sys.modules, 'asyncio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[0] == "False"


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ({"modle": "x"}, r"llm has no option 'modle'; did you mean model\?"),
        ({"max_tokens": 0}, r"llm\.max_tokens must be a whole number of at least 1, got 0"),
        ({"engine": "gpt"}, r"llm\.engine must be one of 'embedded', 'openai'"),
        ({"engine": "openai"}, "needs llm.base_url"),
        ({"engine": "scripted", "base_url": "http://a"}, "is for llm.engine openai"),
        ({"base_url": "localhost:8000"}, "must start with http://"),
        ({"base_url": "http://me:pass@host/v1"}, r"must not hold a user.*llm\.api_key_env"),
        ({"engine": "cassette"}, "needs llm.cassette"),
        ("scripted", "llm must hold options"),
    ],
)
def test_a_wrong_option_is_one_sentence(block, complaint):
    with pytest.raises(ConfigError, match=complaint):
        SharedLLMInferenceManager.from_config({"llm": block})


def test_options_make_the_sampling_of_a_request():
    options = InferenceOptions(max_tokens=7, temperature=0.5)
    assert options.sampling(3, grammar="root ::= x").grammar is None
    sampling = InferenceOptions(grammar=True, max_tokens=7).sampling(3, grammar="root ::= x")
    assert (sampling.max_tokens, sampling.seed, sampling.grammar) == (7, 3, "root ::= x")
