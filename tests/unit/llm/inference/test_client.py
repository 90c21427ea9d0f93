"""Workers of every kind ask one manager over its socket."""

import json
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from envfleet.errors import ConfigError, InferenceError
from envfleet.llm import SharedLLMInferenceManager
from envfleet.llm.inference.scripted import ScriptedEngine
from tests.unit.llm.inference.stage import PATIENCE_S, ToldEngine, ask, managed

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("backend", ["loky", "threading", "multiprocessing"])
def test_workers_of_joblib_ask_and_hand_over_turns(backend):
    # in a program of its own: loky keeps a process and a folder until its program ends
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.unit.llm.inference.joblib_program", backend],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["receipts"] == [10] * 4
    assert found["is_equal"]
    assert (found["pids"] == [found["pid"]]) == (backend == "threading")


def test_a_client_pickles_as_the_path_of_a_socket():
    with SharedLLMInferenceManager(ScriptedEngine()) as llm:
        data = pickle.dumps(llm.client())
        assert len(data) < 200
        with pickle.loads(data) as client:
            assert client.generate(ask()).text == llm.generate(ask()).text


def test_a_client_may_have_many_requests_under_way():
    with managed(ToldEngine(3)) as llm, llm.client() as client:
        tickets = {name: client.begin(ask(name)) for name in "abc"}
        assert sorted(llm.engine.next() for _ in range(3)) == ["a", "b", "c"]
        with pytest.raises(TimeoutError):
            client.next_answer(timeout_s=0.01)
        for name in "bca":
            llm.engine.answer(name, text=name)
            ticket, answer = client.next_answer(PATIENCE_S)
            assert (ticket, answer.text) == (tickets[name], name)


def test_errors_of_the_manager_are_raised_in_the_worker():
    with managed(ToldEngine()) as llm, llm.client() as client:
        begun = client.begin(ask("a"))
        llm.engine.next()
        llm.engine.fail("a", InferenceError("engine", "no such model"))
        ticket, error = client.next_answer(PATIENCE_S)
        assert (ticket, str(error)) == (begun, "the model gave no answer: no such model")


def test_errors_of_a_handler_are_raised_in_the_worker_and_end_nothing():
    def refuse(payload):
        raise ConfigError(f"the disk is full: {payload}")

    def refuse_oddly(payload):
        class Local(Exception):  # cannot be pickled
            pass

        raise Local("odd")

    with SharedLLMInferenceManager(ScriptedEngine()) as llm, llm.client() as client:
        llm.on_message("turn", refuse)
        llm.on_message("odd", refuse_oddly)
        with pytest.raises(ConfigError, match="the disk is full: 7"):
            client.send("turn", 7)
        with pytest.raises(InferenceError, match="Local: odd"):
            client.send("odd", 7)
        with pytest.raises(InferenceError, match="no handler of 'else'"):
            client.send("else", 7)
        assert client.generate(ask()).text


def test_threads_of_one_client_do_not_mix_answers():
    with SharedLLMInferenceManager(ScriptedEngine()) as llm:
        client, found = llm.client(), {}

        def work(seed):
            found[seed] = client.generate(ask(seed=seed)).text
            client.close()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == {seed: llm.generate(ask(seed=seed)).text for seed in range(20)}


def test_a_worker_that_is_killed_frees_the_places_it_had():
    with managed(ToldEngine(1)) as llm:
        code = (
            "import pickle, sys; sys.path.insert(0, '.');"
            "from tests.unit.llm.inference.stage import ask;"
            f"client = pickle.loads({pickle.dumps(llm.client())!r});"
            "client.generate(ask('of the worker'))"
        )
        worker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        try:
            assert llm.engine.next() == "of the worker"
            mine = llm.submit(ask("mine"))
            worker.send_signal(signal.SIGKILL)
            assert llm.engine.next() == "mine"
            llm.engine.answer("mine")
            assert mine.result(PATIENCE_S).text == "yes"
            assert llm.stats.num_cancelled == 1
        finally:
            worker.kill()
            worker.wait()


def test_a_client_whose_manager_is_gone_says_so():
    with managed(ToldEngine()) as llm:
        client = llm.client()
        ended = []

        def work():
            try:
                client.generate(ask("a"))
            except InferenceError as exc:
                ended.append(str(exc))
            client.close()

        thread = threading.Thread(target=work)
        thread.start()
        llm.engine.next()
    thread.join(PATIENCE_S)
    assert "was closed" in ended[0]
    with pytest.raises(InferenceError, match=r"cannot be reached.*it was closed, or its program"):
        client.generate(ask())


def test_what_the_manager_cannot_read_is_an_error_of_that_message_only():
    with SharedLLMInferenceManager(ScriptedEngine()) as llm, llm.client() as client:
        llm.on_message("turn", lambda payload: payload)
        with pytest.raises(InferenceError, match=r"cannot be read.*Unreadable"):
            client.send("turn", Unreadable())
        assert client.send("turn", 7) == 7


def test_a_message_of_many_megabytes_arrives_whole():
    with SharedLLMInferenceManager(ScriptedEngine()) as llm, llm.client() as client:
        llm.on_message("turn", lambda payload: payload[::-1])
        payload = bytes(range(256)) * 40_000
        assert client.send("turn", payload) == payload[::-1]


class Unreadable:
    """Pickles as a call of what does not exist where it is read."""

    def __reduce__(self):
        return getattr, (Unreadable, "missing")
