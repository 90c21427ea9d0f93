"""A real HTTP server that speaks OpenAI's protocol, and misbehaves on demand.

    with MisbehavingServer() as server:
        server.misbehave("status 500", "cut", times=...)   # the next requests, in this order
        ...  # base_url=server.base_url
        server.requests                                     # the bodies that it was sent

What it answers is what a `ScriptedEngine` says, so results can be compared with those of a manager
that asks no server. `python -m tests.misbehaving_server --median-s 0.1` serves in a process of its
own, prints its address, and ends when its standard input does.
"""

import argparse
import asyncio
import json
import sys
import threading
from collections import deque
from typing import Any

from aiohttp import web

from envfleet.llm.inference.scripted import LognormalLatency, ScriptedEngine
from envfleet.llm.inference.types import GenerateRequest, Message, Sampling

FAULTS = (
    "status 429",
    "status 500",
    "status 503",
    "cut",  # the connection ends before an answer begins
    "cut in the middle",  # and after a part of it
    "not http",
    "garbage",  # 200, and what is not JSON
    "garbage event",  # a stream with an event that is not JSON
    "no end",  # a stream that ends without saying why
    "error event",  # an error in the middle of a stream
)
"""Faults that pass. Others are "status N", "status N: body", "hang" and "slow body"."""


class MisbehavingServer:
    """Serves from a thread of this process.

    Args:
        engine: Gives the answers.
        owned_by: Which kind of server it says it is: "", "vllm", "llamacpp", "sglang".
        lists_models: Whether it tells which models there are.
        key: If given, the only one that is let in.
    """

    def __init__(
        self,
        engine: ScriptedEngine | None = None,
        *,
        owned_by: str = "",
        lists_models: bool = True,
        key: str | None = None,
    ) -> None:
        self._engine = engine or ScriptedEngine()
        self._owned_by, self._lists_models, self._key = owned_by, lists_models, key
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_in_flight = self.max_in_flight = self.num_cut_off = 0
        self.retry_after: str | None = None
        self.released = threading.Event()
        """Lets requests that hang go on."""
        self.arrived = threading.Semaphore(0)
        """Released once for each request that arrives."""
        self.base_url = ""
        self._faults: deque[str] = deque()
        self._always: str | None = None

    def misbehave(self, *faults: str) -> None:
        """The next requests meet these faults, one each, and later ones none."""
        self._faults.extend(faults)

    def always_misbehave(self, fault: str | None) -> None:
        """Every request meets this fault, until None is given."""
        self._always = fault

    # ---- its thread -----------------------------------------------------------------------------

    def __enter__(self) -> "MisbehavingServer":
        started: threading.Event = threading.Event()

        def run() -> None:
            asyncio.run(self._live(started))

        self._thread = threading.Thread(target=run, name="misbehaving-server")
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.released.set()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _live(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner = await self.opened()
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def opened(self) -> web.AppRunner:
        """Serve in the event loop that is running."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        # without the access log, which would cost more than the answers; cancelled handlers tell
        # that a client has gone
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    async def _models(self, request: web.Request) -> web.Response:
        if not self._lists_models:
            raise web.HTTPNotFound
        data = [{"id": "script-1", "object": "model", "owned_by": self._owned_by}]
        return web.json_response({"object": "list", "data": data})

    # ---- answers --------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        fault = self._faults.popleft() if self._faults else self._always
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        self.arrived.release()
        try:
            return await self._answer_or_not(request, body, fault)
        except (asyncio.CancelledError, ConnectionResetError):
            self.num_cut_off += 1
            raise asyncio.CancelledError from None  # of which aiohttp writes no log
        finally:
            self.num_in_flight -= 1

    async def _answer_or_not(
        self, request: web.Request, body: dict[str, Any], fault: str | None
    ) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._key is not None and key != self._key:
            # some servers do say it
            said = {"error": {"message": f"Incorrect API key provided: {key}", "code": 401}}
            return web.json_response(said, status=401)
        if fault is not None and fault.startswith("status "):
            status, _, text = fault.removeprefix("status ").partition(": ")
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return web.Response(status=int(status), text=text or "a fault", headers=headers)
        if fault in ("cut", "not http"):
            assert request.transport is not None
            if fault == "not http":
                request.transport.write(b"I am a teapot\r\n\r\n")
                request.transport.close()
            else:
                request.transport.abort()
            raise ConnectionResetError
        if fault == "garbage":
            return web.Response(text="<html>not a model</html>", content_type="text/html")
        if fault == "hang":
            while not self.released.is_set():
                await asyncio.sleep(0.005)
        answer = await self._engine.generate(_request(body))
        events = list(_events(body, answer, self._owned_by))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if fault in (None, "hang"):  # in one piece: a test of speed is of the client's
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            await response.write("".join([*lines, "data: [DONE]\n\n"]).encode())
            await response.write_eof()
            return response
        middle = len(events) // 2
        for place, event in enumerate(events):
            if place == middle:
                if fault == "cut in the middle":
                    assert request.transport is not None
                    request.transport.abort()
                    raise ConnectionResetError
                if fault == "garbage event":
                    await response.write(b'data: {"choices": [\n\n')
                if fault == "error event":
                    await response.write(b'data: {"error": {"message": "out of memory"}}\n\n')
                if fault == "no end":
                    await response.write_eof()
                    return response
                while fault == "slow body" and not self.released.is_set():
                    await response.write(b": still thinking\n\n")
                    await asyncio.sleep(0.005)
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _request(body: dict[str, Any]) -> GenerateRequest:
    messages = [Message(one["role"], one["content"]) for one in body.get("messages", ())]
    prefill = messages.pop().content if messages and messages[-1].role == "assistant" else ""
    prompt = body.get("prompt")
    return GenerateRequest(
        request_id="",
        messages=tuple(messages),
        prompt_ids=None if prompt is None else tuple(prompt),
        prefill=prefill,
        sampling=Sampling(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            seed=body["seed"],
            stop=tuple(body.get("stop", ())),
        ),
    )


def _events(body, answer, owned_by):
    """The answer as a server streams it; the parts are of a few tokens each."""
    is_chat, size = "messages" in body, 8
    tokens = answer.token_ids or tuple(answer.text.encode())
    for start in range(0, max(1, len(tokens)), size):
        part = tokens[start : start + size]
        text = bytes(part).decode(errors="replace")
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        if answer.log_probs is not None:
            probs = answer.log_probs[start : start + size]
            if is_chat:
                listed = [{"token": chr(i), "logprob": p} for i, p in zip(part, probs, strict=True)]
                if owned_by == "llamacpp":
                    listed = [{**one, "id": i} for one, i in zip(listed, part, strict=True)]
                choice["logprobs"] = {"content": listed}
            else:
                choice["logprobs"] = {"token_logprobs": list(probs)}
        event: dict[str, Any] = {"object": "chunk", "choices": [choice]}
        if body.get("return_token_ids") and owned_by == "vllm":
            choice["token_ids"] = list(part)
            if start == 0:
                event["prompt_token_ids"] = list(answer.prompt_ids or ())
        yield event
    delta: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    yield {"choices": [{"index": 0, **delta, "finish_reason": answer.stop_reason}]}
    usage = {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_tokens,
    }
    yield {"choices": [], "usage": usage}


async def _serve(arguments: argparse.Namespace) -> None:
    latency = None
    if arguments.median_s > 0:
        latency = LognormalLatency(arguments.median_s, arguments.sigma)
    engine = ScriptedEngine(latency=latency, tells_tokens=False)
    runner = await (server := MisbehavingServer(engine)).opened()
    sys.stdout.write(server.base_url + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--median-s", type=float, default=0.0)
    parser.add_argument("--sigma", type=float, default=1.25)
    asyncio.run(_serve(parser.parse_args()))
