"""How workers reach the manager: a client that pickles as the address of a socket.

    generate ─► ticket, ("generate", request) ─► manager's loop ─► ticket, answer or error
    send     ─► ticket, (topic, payload)      ─► a handler      ─► ticket, result or error

Law: a thread has one connection of its own, and answers may come in any order. When a connection
ends, the manager cancels what it had asked. On one machine it is a unix socket without a name in
the file system, so nothing is left of it; both ends make sure that the other belongs to the same
user before they unpickle. Between machines it is TCP, and both ends must hold a token (tcp.py).
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from typing import Any

from envfleet.errors import InferenceError
from envfleet.llm.inference.tcp import TcpAddress, connect_tcp
from envfleet.llm.inference.types import GenerateRequest, Generation

_HEAD = struct.Struct("!QQ")
GENERATE = "generate"
_CREDENTIALS = struct.Struct("3i")


def frame(ticket: int, message: Any) -> bytes:
    """One message as it travels: its length, its ticket, and its pickle."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data), ticket) + data


def taken(received: bytearray, data: bytes) -> list[tuple[int, bytes]]:
    """Add bytes to those received; take out the messages that are whole: ticket and pickle."""
    received += data
    found, start = [], 0
    while len(received) - start >= _HEAD.size:
        length, ticket = _HEAD.unpack_from(received, start)
        end = start + _HEAD.size + length
        if len(received) < end:
            break
        found.append((ticket, bytes(received[start + _HEAD.size : end])))
        start = end
    del received[:start]
    return found


def is_same_user(connection: Any) -> bool:
    """Whether the other end of a unix socket runs as this user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.getuid())


class InferenceClient:
    """Asks the manager from any thread or process.

    Args:
        address: The path of the manager's socket, where an `@` at the start means that it has no
            file; or where it listens for other machines.
    """

    def __init__(self, address: str | TcpAddress) -> None:
        self._address = address
        self._mine = threading.local()

    def __reduce__(self) -> tuple[type[InferenceClient], tuple[str | TcpAddress]]:
        return InferenceClient, (self._address,)

    def generate(self, request: GenerateRequest) -> Generation:
        """Ask, and wait for the answer.

        Raises:
            InferenceError: There is none.
        """
        answer = self._connection().ask(GENERATE, request)
        assert isinstance(answer, Generation)
        return answer

    def begin(self, request: GenerateRequest) -> int:
        """Ask without waiting; `next_answer` in the same thread returns this number again."""
        return self._connection().post(GENERATE, request)

    def next_answer(self, timeout_s: float | None = None) -> tuple[int, Generation | Exception]:
        """The number and the answer of any request that was begun, as soon as there is one.

        Raises:
            TimeoutError: There was none in time.
        """
        return self._connection().next_reply(timeout_s)

    def send(self, topic: str, payload: Any) -> Any:
        """Hand something to the manager's handler of this topic; returns what the handler does."""
        return self._connection().ask(topic, payload)

    def close(self) -> None:
        """Close this thread's connection; the next call opens another."""
        connection = getattr(self._mine, "connection", None)
        if connection is not None:
            connection.close()
            self._mine.connection = None

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _connection(self) -> _ClientConnection:
        found: _ClientConnection | None = getattr(self._mine, "connection", None)
        # a forked child must not read the answers of its parent
        if found is None or found.is_closed or found.pid != os.getpid():
            found = self._mine.connection = _ClientConnection(self._address)
        return found


class _ClientConnection:
    """One thread's connection."""

    def __init__(self, address: str | TcpAddress) -> None:
        self.pid = os.getpid()
        self.is_closed = False
        self._received = bytearray()
        self._next_ticket = 0
        self._replies: dict[int, Any] = {}
        try:
            if isinstance(address, TcpAddress):
                self._socket = connect_tcp(address)
            else:
                self._socket = _connect_unix(address)
        except OSError as exc:
            raise _gone(exc) from exc

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self.close()

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()

    def post(self, kind: str, payload: Any) -> int:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        data = frame(ticket, (kind, payload))
        try:
            self._socket.sendall(data)
        except BaseException as exc:  # half a message may be on its way
            self.close()
            if isinstance(exc, OSError):
                raise _gone(exc) from exc
            raise
        return ticket

    def ask(self, kind: str, payload: Any) -> Any:
        ticket = self.post(kind, payload)
        try:
            while ticket not in self._replies:
                self._receive(None)
        except BaseException:  # interrupted: the manager is to forget it
            self.close()
            raise
        reply = self._replies.pop(ticket)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def next_reply(self, timeout_s: float | None) -> tuple[int, Any]:
        while not self._replies:
            self._receive(timeout_s)
        return self._replies.popitem()

    def _receive(self, timeout_s: float | None) -> None:
        """Wait for more bytes, and take in the messages that are whole."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(1 << 18)
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        except OSError as exc:
            self.close()
            raise _gone(exc) from exc
        finally:
            if not self.is_closed:
                self._socket.settimeout(None)
        if not data:
            self.close()
            raise _gone(ConnectionError("it ended"))
        for ticket, reply in taken(self._received, data):
            self._replies[ticket] = pickle.loads(reply)


def _connect_unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path.replace("@", "\0", 1))
        if not is_same_user(connection):
            raise ConnectionError("it belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def _gone(exc: OSError) -> InferenceError:
    return InferenceError(
        "engine",
        f"the inference manager of this client cannot be reached ({exc}); it was closed, or its "
        "program has ended",
    )
