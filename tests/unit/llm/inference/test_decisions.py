"""Pure decisions of inference: seeds, retries, and the threads of a model."""

import random
import subprocess
import sys
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.errors import InferenceError
from envfleet.llm.inference import engines
from envfleet.llm.inference.http_calls import retry_after_s, without_credentials
from envfleet.llm.inference.retries import LONGEST_DELAY_S, delay_before_retry
from envfleet.llm.inference.types import request_seed

PASSING = InferenceError("engine", "busy", is_retryable=True)


def test_seeds_differ_for_every_argument_and_fit_every_server():
    seeds = {
        request_seed(run, env, turn, attempt)
        for run in range(5)
        for env in range(20)
        for turn in range(10)
        for attempt in range(3)
    }
    assert len(seeds) == 5 * 20 * 10 * 3
    assert all(0 <= seed < 1 << 31 for seed in seeds)


def test_a_seed_is_the_same_in_another_process():
    code = "from envfleet.llm.inference.types import request_seed; print(request_seed(42, 7, 3, 1))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == request_seed(42, 7, 3, 1)


def delay(error=PASSING, failures=1, **kwargs):
    settings = {"max_retries": 5, "first_delay_s": 0.5, "longest_wait_s": 120.0}
    return delay_before_retry(error, failures, dice=random.Random(0), **{**settings, **kwargs})


@given(st.integers(1, 5), st.integers(0, 1000))
def test_a_delay_doubles_within_its_jitter_and_has_a_ceiling(failures, seed):
    found = delay_before_retry(
        PASSING,
        failures,
        max_retries=5,
        first_delay_s=4.0,
        longest_wait_s=120.0,
        dice=random.Random(seed),
    )
    whole = min(4.0 * 2 ** (failures - 1), LONGEST_DELAY_S)
    assert found is not None
    assert whole / 2 <= found <= whole


def test_no_retry_after_the_last_or_for_what_cannot_pass():
    assert delay(failures=5) is not None
    assert delay(failures=6) is None
    assert delay(InferenceError("engine", "no such model")) is None


def test_a_server_that_asks_to_wait_is_waited_for_within_reason():
    assert delay(InferenceError("engine", "full", True, 20.0)) == 20.0
    assert delay(InferenceError("engine", "full", True, 3600.0)) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("2", 2.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 1970 00:01:10 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("soon", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(header, seconds):
    assert retry_after_s(header, now_s=60.0) == seconds


def test_an_address_is_shown_without_user_password_and_query():
    shown = without_credentials("https://me:secret@host:8000/v1?key=secret")
    assert shown == "https://host:8000/v1"


@pytest.mark.parametrize(
    ("cores", "proxy", "threads"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (8, {}, 8),
        (8, {"use_parallel_rollout": True, "parallel_n_jobs": 4}, 4),
        (8, {"use_parallel_rollout": False, "parallel_n_jobs": 4}, 8),
        (8, {"use_parallel_rollout": True, "parallel_n_jobs": -1}, 7),
        (2, {"use_parallel_rollout": True, "parallel_n_jobs": 16}, 1),
    ],
)
def test_the_model_gets_the_cores_that_workers_leave(cores, proxy, threads):
    with mock.patch.object(engines, "usable_cores", return_value=cores):
        assert engines.threads_left({"agent_proxy": proxy}) == threads


def test_an_inference_error_pickles_with_its_data():
    import pickle

    error = InferenceError("timeout", "too slow", True, 2.0, 3)
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.is_retryable, again.retry_after_s, again.attempts) == (
        "timeout",
        True,
        2.0,
        3,
    )
    assert str(again) == "the model gave no answer after 3 attempts: too slow"
