"""Ways to ask a shared model, as contenders: a step is a request, or a token."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from typing import Any

import psutil

from envfleet.cli.measure import Slice
from envfleet.llm.inference.client import InferenceClient
from envfleet.llm.inference.embedded import EmbeddedEngine
from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.inference.openai_http import OpenAIEngine
from envfleet.llm.inference.scripted import ScriptedEngine
from envfleet.llm.inference.types import Engine, GenerateRequest, Message, Sampling

WINDOW = 64
"""Requests under way at once."""
INSTRUCTION = "You walk over a frozen lake. Reach the goal without falling into a hole. " * 20


def request(number: int, max_tokens: int = 64) -> GenerateRequest:
    """A request with a prompt of about 2 KB."""
    return GenerateRequest(
        request_id=str(number),
        messages=(
            Message("system", INSTRUCTION),
            Message("user", f"State {number}: P _ O G " * 20),
        ),
        sampling=Sampling(seed=number, max_tokens=max_tokens),
    )


class InProcess:
    """Threads of this process ask, and the script answers in this process."""

    key, label = "in-process", "in this process"

    def engine(self) -> Engine:
        return ScriptedEngine(tells_tokens=False, max_concurrency=WINDOW)

    def open(self) -> None:
        self._llm = SharedLLMInferenceManager(self.engine())
        self._numbers = itertools.count()
        self.cpu_s: list[float] = []
        """Of this process, for each request, in each slice."""

    def run(self, seconds: float) -> Slice:
        begun_s, cpu_s, count = time.perf_counter(), time.process_time(), 0
        while (took_s := time.perf_counter() - begun_s) < seconds:
            futures = [self._llm.submit(request(next(self._numbers))) for _ in range(WINDOW)]
            for future in futures:
                future.result()
            count += WINDOW
        self.cpu_s.append((time.process_time() - cpu_s) / count)
        return Slice(count, took_s)

    def close(self) -> None:
        self._llm.close()


class OverHttp(InProcess):
    """The script answers behind a real HTTP server, in a process of its own."""

    key, label = "http", "over HTTP, streamed"

    def engine(self) -> Engine:
        command = [sys.executable, "-m", "tests.misbehaving_server"]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        return OpenAIEngine(self._server.stdout.readline().strip(), max_concurrency=WINDOW)

    def close(self) -> None:
        super().close()
        self._server.communicate(timeout=30)


class PerRequest:
    """Workers of joblib ask over the manager's socket, one request after the other each."""

    def __init__(self, backend: str, num_jobs: int = 2) -> None:
        self.key, self.label = backend, f"{num_jobs} workers of joblib, {backend}"
        self._num_jobs = num_jobs

    def open(self) -> None:
        import joblib

        engine = ScriptedEngine(tells_tokens=False, max_concurrency=WINDOW)
        self._llm = SharedLLMInferenceManager(engine)
        self._parallel = joblib.Parallel(n_jobs=self._num_jobs, backend=self.key)
        self._delayed = joblib.delayed(ask_for)
        self.run(0.1)  # starts the workers

    def run(self, seconds: float) -> Slice:
        client = self._llm.client()
        done: Any = self._parallel(
            self._delayed(client, seconds, 10_000_000 * place) for place in range(self._num_jobs)
        )
        return Slice(sum(count for count, _ in done), max(took_s for _, took_s in done))

    def close(self) -> None:
        self._llm.close()


def ask_for(client: InferenceClient, seconds: float, first: int) -> tuple[int, float]:
    """How many requests one worker makes in about so many seconds."""
    begun_s, count = time.perf_counter(), 0
    while (took_s := time.perf_counter() - begun_s) < seconds:
        client.generate(request(first + count))
        count += 1
    return count, took_s


class Embedded:
    """The embedded model continues conversations; seconds are those of its processor.

    Args:
        key: Its short name.
        num_at_once: Conversations that are continued at the same time, of 8 in all.
        num_tokens: Of each answer, at most.
    """

    def __init__(self, key: str, num_at_once: int, num_tokens: int) -> None:
        self.key, self.label = key, f"{num_at_once} at once"
        self._num_at_once, self._num_tokens = num_at_once, num_tokens
        self._numbers = itertools.count()

    def open(self) -> None:
        self._engine = EmbeddedEngine(max_concurrency=8)
        self._llm = SharedLLMInferenceManager(self._engine)

    def run(self, seconds: float) -> Slice:
        assert self._engine.pid is not None
        child = psutil.Process(self._engine.pid)
        before, num_tokens = child.cpu_times(), 0
        turn = next(self._numbers)
        requests = [
            GenerateRequest(
                request_id=f"{env} {turn}",
                messages=(Message("user", f"Tell a long story about the number {env}."),),
                sampling=Sampling(seed=100 * turn + env, max_tokens=self._num_tokens),
            )
            for env in range(8)
        ]
        for start in range(0, len(requests), self._num_at_once):
            part = [self._llm.submit(one) for one in requests[start : start + self._num_at_once]]
            num_tokens += sum(future.result().num_tokens for future in part)
        after = child.cpu_times()
        return Slice(num_tokens, after.user + after.system - before.user - before.system)

    def close(self) -> None:
        self._llm.close()
