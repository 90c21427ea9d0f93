"""The manager's end of `client.py`: sockets on which workers ask and hand things over.

There is one unix socket. A TCP socket is opened when workers on other machines need one, bound to
one address of this machine, and takes nothing from a client that does not hold its token.
"""

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
from envfleet.llm.inference.tcp import (
    HANDSHAKE_S,
    HELLO_BYTES,
    NONCE_BYTES,
    TcpAddress,
    is_client,
    keep_alive,
    new_nonce,
    proof,
)

Handler = Callable[[Any], Any]
_BACKLOG = 512


class SocketServer:
    """Listens for clients of this user, and for those that hold the token."""

    def __init__(self, broker: Broker, handlers: dict[str, Handler]) -> None:
        self._broker, self._handlers = broker, handlers
        self.path = f"@envfleet-{os.getpid()}-{secrets.token_hex(8)}"
        self._servers: list[asyncio.Server] = []
        self._addresses: dict[str, TcpAddress] = {}
        self._connections: set[_ServerConnection] = set()

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        path = self.path.replace("@", "\0", 1)
        server = await loop.create_unix_server(self._connected, path, backlog=_BACKLOG)
        self._servers.append(server)

    async def listen(self, host: str) -> TcpAddress:
        """Listen for other machines too, at this address of this machine.

        Raises:
            OSError: This machine has no such address.
        """
        if host not in self._addresses:
            token = secrets.token_bytes(32)
            server = await asyncio.get_running_loop().create_server(
                lambda: self._connected(token), host, 0, backlog=_BACKLOG
            )
            self._servers.append(server)
            port = server.sockets[0].getsockname()[1]
            self._addresses[host] = TcpAddress(host, port, token)
        return self._addresses[host]

    def close(self) -> None:
        """Stop listening, and end all connections when what was written to them is sent."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.end()

    def _connected(self, token: bytes | None = None) -> _ServerConnection:
        return _ServerConnection(self._broker, self._handlers, self._connections, token)


class _ServerConnection(asyncio.Protocol):
    """One client.

    Without a token it has to belong to this user; with one it has to prove that it holds it.
    """

    def __init__(
        self,
        broker: Broker,
        handlers: dict[str, Handler],
        connections: set[_ServerConnection],
        token: bytes | None,
    ) -> None:
        self._broker, self._handlers, self._connections = broker, handlers, connections
        self._token, self._nonce = token, b""
        self._received = bytearray()
        self._jobs: dict[int, InferenceJob] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = transport.get_extra_info("socket")
        assert isinstance(transport, asyncio.Transport)
        if self._token is None and not is_same_user(connection):
            transport.close()
            return
        self._transport = transport
        self._connections.add(self)
        if self._token is not None:
            keep_alive(connection)
            self._nonce = new_nonce()
            transport.write(self._nonce)
            asyncio.get_running_loop().call_later(HANDSHAKE_S, self._end_stranger)

    def _end_stranger(self) -> None:
        if self._token is not None:
            self.end()

    def _take_hello(self, data: bytes) -> bytes:
        """Hear the proof of a client; what came after it is its first message."""
        self._received += data
        if self._transport is None or self._token is None or len(self._received) < HELLO_BYTES:
            return b""
        hello, rest = bytes(self._received[:HELLO_BYTES]), bytes(self._received[HELLO_BYTES:])
        self._received.clear()
        if not is_client(self._token, self._nonce, hello):
            self._transport.abort()
            self._transport = None
            return b""
        mine = proof(self._token, b"server", self._nonce, hello[:NONCE_BYTES])
        self._transport.write(mine)
        self._token = None
        return rest

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
        if self._token is not None:
            data = self._take_hello(data)
        if self._transport is None or self._token is not None:
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
