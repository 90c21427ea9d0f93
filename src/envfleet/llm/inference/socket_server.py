"""The manager's end of `client.py`: one unix socket, on which workers ask and hand things over."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
from collections.abc import Callable
from typing import Any

from envfleet.errors import InferenceError
from envfleet.llm.inference.broker import Broker, InferenceJob, Outcome
from envfleet.llm.inference.client import GENERATE, frame, is_same_user, taken

Handler = Callable[[Any], Any]


class SocketServer:
    """Listens for clients of this user."""

    def __init__(self, broker: Broker, handlers: dict[str, Handler]) -> None:
        self._broker, self._handlers = broker, handlers
        self.path = f"@envfleet-{os.getpid()}-{secrets.token_hex(8)}"
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[_ServerConnection] = set()

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        path = self.path.replace("@", "\0", 1)
        self._server = await loop.create_unix_server(self._connected, path, backlog=512)

    def close(self) -> None:
        """Stop listening, and end all connections when what was written to them is sent."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.end()

    def _connected(self) -> _ServerConnection:
        return _ServerConnection(self._broker, self._handlers, self._connections)


class _ServerConnection(asyncio.Protocol):
    """One client."""

    def __init__(
        self, broker: Broker, handlers: dict[str, Handler], connections: set[_ServerConnection]
    ) -> None:
        self._broker, self._handlers, self._connections = broker, handlers, connections
        self._received = bytearray()
        self._jobs: dict[int, InferenceJob] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not is_same_user(transport.get_extra_info("socket")):
            transport.close()
            return
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        for job in list(self._jobs.values()):
            self._broker.cancel(job)
        self._jobs.clear()

    def end(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        for ticket, message in taken(self._received, data):
            try:
                kind, payload = pickle.loads(message)
            except Exception as exc:
                problem = f"what a client sent cannot be read: {type(exc).__name__}: {exc}"
                self._reply(ticket, InferenceError("engine", problem))
                continue
            if kind == GENERATE:
                self._ask(ticket, payload)
            else:
                self._reply(ticket, self._handled(kind, payload))

    def _ask(self, ticket: int, request: Any) -> None:
        def on_end(outcome: Outcome) -> None:
            self._jobs.pop(ticket, None)
            self._reply(ticket, outcome)

        job = self._broker.submit(request, on_end)
        if not job.is_over:
            self._jobs[ticket] = job

    def _handled(self, topic: str, payload: Any) -> Any:
        handler = self._handlers.get(topic)
        if handler is None:
            return InferenceError(
                "engine", f"the manager has no handler of {topic!r}; give it one by on_message"
            )
        try:
            return handler(payload)
        except Exception as exc:
            return exc

    def _reply(self, ticket: int, reply: Any) -> None:
        if self._transport is None:
            return
        try:
            data = frame(ticket, reply)
            if isinstance(reply, Exception):
                pickle.loads(pickle.dumps(reply))  # some can be written and not read again
        except Exception as exc:
            problem = f"{type(reply).__name__}: {reply}, which cannot be pickled ({exc})"
            data = frame(ticket, InferenceError("engine", problem))
        self._transport.write(data)
