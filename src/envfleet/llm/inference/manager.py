"""One language model for all workers of a rollout.

    caller's thread ── generate, submit ──► ┐
    worker process ── InferenceClient ────► ├─ event loop in one thread: broker ─► engine
    asyncio ── generate_async ────────────► ┘

Law: every call may come from any thread. The engine, the broker and the socket belong to the loop's
thread, which ends them. An engine is started when the manager is made, and ended by `close`, at the
latest when the program ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from envfleet.errors import InferenceError
from envfleet.llm.config import plain_config
from envfleet.llm.inference.broker import Broker, InferenceJob, Outcome
from envfleet.llm.inference.client import InferenceClient
from envfleet.llm.inference.engines import engine_of
from envfleet.llm.inference.options import InferenceOptions, read_options
from envfleet.llm.inference.socket_server import Handler, SocketServer
from envfleet.llm.inference.tcp import TcpAddress
from envfleet.llm.inference.types import Engine, GenerateRequest, Generation, InferenceStats

_CLOSE_S = 20.0
"""The longest that an engine may take to end."""
_LISTEN_S = 10.0


class SharedLLMInferenceManager:
    """Answers the requests of any number of threads and processes with one engine.

    Args:
        engine: What answers.
        options: Its limits; the defaults of `InferenceOptions` if None.

    Raises:
        InferenceError: The engine cannot be started.
    """

    def __init__(self, engine: Engine, *, options: InferenceOptions | None = None) -> None:
        self.options = InferenceOptions() if options is None else options
        self._running = _ManagerThread(engine, self.options)
        self._close = weakref.finalize(self, self._running.close)
        try:
            self._running.start()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, config: Any) -> SharedLLMInferenceManager:
        """The manager that the block `llm` of a configuration describes.

        Args:
            config: A mapping, an OmegaConf object, or the name or path of a YAML file.
        """
        plain = plain_config(config)
        options = read_options(plain)
        return cls(engine_of(options, plain), options=options)

    @property
    def engine(self) -> Engine:
        """What answers."""
        return self._running.engine

    @property
    def name(self) -> str:
        """What answers, for logs and journals."""
        return self.engine.name

    @property
    def is_deterministic(self) -> bool:
        """Whether the same request always gets the same answer, in any company."""
        return self.engine.is_deterministic

    @property
    def stats(self) -> InferenceStats:
        """What was done so far."""
        return self._running.broker.stats()

    def generate(self, request: GenerateRequest) -> Generation:
        """Ask, and wait for the answer.

        Raises:
            InferenceError: There is none.
        """
        future = self.submit(request)
        try:
            return future.result()
        except BaseException:  # interrupted: free its place
            future.cancel()
            raise

    def submit(self, request: GenerateRequest) -> Future[Generation]:
        """Ask without waiting. A future that is cancelled frees its place at once."""
        future: Future[Generation] = Future()
        self._running.post(_ManagerRequest(self._running.broker, request, future).begin)
        return future

    async def generate_async(self, request: GenerateRequest) -> Generation:
        """Ask from any event loop; cancelling this frees its place at once."""
        return await asyncio.wrap_future(self.submit(request))

    def client(self, host: str | None = None) -> InferenceClient:
        """What a worker needs to ask this manager; it can be pickled.

        Args:
            host: An address of this machine at which workers on other machines can reach it: the
                manager listens there from then on. The client holds the token that this needs. None
                is for workers on this machine.

        Raises:
            InferenceError: This machine cannot listen there.
        """
        if host is None:
            return InferenceClient(self._running.server.path)
        return InferenceClient(self._running.listen(host))

    def on_message(self, topic: str, handler: Handler | None) -> None:
        """Let `handler(payload)` take what clients `send` under this topic; None takes it away.

        It is called in the manager's thread, one message at a time, so it should be quick. What it
        returns or raises is what the client's `send` returns or raises.
        """
        if handler is None:
            self._running.handlers.pop(topic, None)
        else:
            self._running.handlers[topic] = handler

    def close(self) -> None:
        """End the engine, and every request that is under way with an error."""
        self._close()

    def __enter__(self) -> SharedLLMInferenceManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SharedLLMInferenceManager stays in its process; send its client() to workers"
        )


class _ManagerRequest:
    """One request of another thread, between its future there and its job here."""

    __slots__ = ("_broker", "_future", "_job", "_loop", "_request")

    def __init__(
        self, broker: Broker, request: GenerateRequest, future: Future[Generation]
    ) -> None:
        self._broker, self._request, self._future = broker, request, future
        self._job: InferenceJob | None = None

    def begin(self) -> None:
        if self._future.cancelled():
            return
        self._loop = asyncio.get_running_loop()
        self._job = self._broker.submit(self._request, self._on_end)
        self._future.add_done_callback(self._on_done)

    def _on_end(self, outcome: Outcome) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Generation):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)

    def _on_done(self, future: Future[Generation]) -> None:
        if future.cancelled() and self._job is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the job over
                self._loop.call_soon_threadsafe(self._broker.cancel, self._job)


class _ManagerThread:
    """The thread, its event loop, and what lives in it."""

    def __init__(self, engine: Engine, options: InferenceOptions) -> None:
        self.engine, self._options = engine, options
        self.handlers: dict[str, Handler] = {}
        self.broker: Broker
        self.server: SocketServer
        self._loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._lock = threading.Lock()
        self._is_closed = False
        self._posted: list[Callable[[], None]] = []
        """Calls that the loop has not taken yet."""
        self._listening: list[asyncio.Task[None]] = []
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="envfleet-inference", daemon=True)

    def start(self) -> None:
        """Return when the engine is ready."""
        self._thread.start()
        self._started.result()

    def post(self, call: Callable[[], None]) -> None:
        """Have something called in the loop's thread."""
        if os.getpid() != self._pid:
            raise InferenceError(
                "engine",
                "this is a copy of the inference manager in a forked process, where nothing "
                "answers; give workers its client(), made before the fork",
            )
        with self._lock:
            if not self._is_closed:
                self._posted.append(call)
                if len(self._posted) == 1:  # waking the loop costs more than most calls
                    self._loop.call_soon_threadsafe(self._take_posted)
                return
        raise InferenceError("engine", "the inference manager was closed")

    def _take_posted(self) -> None:
        with self._lock:
            calls, self._posted = self._posted, []
        for call in calls:
            self._loop.call_soon(call)  # apart, so that one that raises costs no other

    def listen(self, host: str) -> TcpAddress:
        """Have the server listen for other machines too."""
        found: Future[TcpAddress] = Future()

        async def listen() -> None:
            try:
                found.set_result(await self.server.listen(host))
            except BaseException as exc:
                found.set_exception(exc)

        self.post(lambda: self._listening.append(self._loop.create_task(listen())))
        try:
            return found.result(_LISTEN_S)
        except OSError as exc:
            why = exc.strerror or "it took too long"
            raise InferenceError("engine", f"the manager cannot listen at {host}: {why}") from exc

    def close(self) -> None:
        """End all; may be called twice, and from the loop's own thread."""
        if os.getpid() != self._pid:
            return  # a forked copy: what runs belongs to the parent
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first and self._thread.ident is not None:
                with contextlib.suppress(RuntimeError):  # it could not even start
                    self._loop.call_soon_threadsafe(self._end)
        if self._thread.ident is None:
            self._loop.close()
        elif threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S + 5.0)

    def _end(self) -> None:
        self._main.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._main = self._loop.create_task(self._live())
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            self._loop.close()
            if not self._started.done():
                self._started.set_exception(
                    InferenceError("engine", "the inference manager was closed as it started")
                )

    async def _live(self) -> None:
        """Start, serve until cancelled, and end."""
        self.broker = Broker(self.engine, self._options)
        self.server = SocketServer(self.broker, self.handlers)
        try:
            try:
                await self.engine.start()
                await self.server.start()
            except Exception as exc:
                self._started.set_exception(exc)
                return
            self._started.set_result(None)
            await asyncio.Event().wait()
        finally:
            self.broker.close()
            self.server.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self.engine.close()
