"""What the tests of inference share: requests, and an engine that answers when it is told to."""

import asyncio
import queue
from typing import Any

from envfleet.errors import InferenceError
from envfleet.llm import SharedLLMInferenceManager
from envfleet.llm.inference.options import InferenceOptions
from envfleet.llm.inference.types import GenerateRequest, Generation, Message, Sampling

PATIENCE_S = 60.0


def ask(name="0", text="What now?", *, seed=0, prefill="", prompt_ids=None, **kwargs):
    """A request; what is not of the request itself is of its sampling."""
    own = {key: kwargs.pop(key) for key in ("priority", "timeout_s") if key in kwargs}
    return GenerateRequest(
        request_id=str(name),
        messages=(Message("system", "Play."), Message("user", text)),
        prefill=prefill,
        prompt_ids=prompt_ids,
        sampling=Sampling(seed=seed, **kwargs),
        **own,
    )


def managed(engine: Any, **options: Any) -> Any:
    """A manager whose engine has more than the protocol says."""
    return SharedLLMInferenceManager(engine, options=InferenceOptions(**options))


class ToldEngine:
    """Answers a request when the test says so; `begun` has the names in the order they came."""

    name = "told"
    is_deterministic = True

    def __init__(self, max_concurrency=1):
        self.max_concurrency = max_concurrency
        self.begun: queue.Queue[str] = queue.Queue()
        self.ended: queue.Queue[str] = queue.Queue()
        """Names of requests that were cancelled."""
        self.is_closed = False
        self._futures = {}

    async def start(self):
        self._loop = asyncio.get_running_loop()

    async def generate(self, request):
        name = request.request_id
        self._futures[name] = self._loop.create_future()
        self.begun.put(name)
        try:
            return await self._futures[name]
        except asyncio.CancelledError:
            self.ended.put(name)
            raise

    async def close(self):
        self.is_closed = True

    def next(self):
        return self.begun.get(timeout=PATIENCE_S)

    def answer(self, name, text="yes", num_tokens=1):
        answer = Generation(text=text, stop_reason="stop", num_tokens=num_tokens)
        self._loop.call_soon_threadsafe(self._futures[name].set_result, answer)

    def fail(self, name, error=None):
        error = error or InferenceError("engine", "a hiccup", is_retryable=True)
        self._loop.call_soon_threadsafe(self._futures[name].set_exception, error)
