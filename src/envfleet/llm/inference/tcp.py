"""How workers on other machines reach the manager: TCP, and a token that both ends must hold.

    server ── nonce ──────────────────────────────► client
    client ── nonce, proof for the server ────────► server
    server ── proof for the client ───────────────► client

A proof is an HMAC of both nonces with the token, which itself never travels. Law: neither end reads
a message before the other's proof is right. What travels afterwards is not encrypted: the network
between the machines has to be one that is trusted, as for Ray itself.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field

HANDSHAKE_S = 30.0
"""How long the two ends may take to prove themselves, on machines that are busy."""
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = NONCE_BYTES + PROOF_BYTES
_IDLE_S, _EVERY_S, _TIMES = 10, 5, 3
"""After so long without a byte, the other end is asked so often whether it is still there."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Where a manager listens, and the token that opens it."""

    host: str
    port: int
    token: bytes = field(repr=False)


def new_nonce() -> bytes:
    """Bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: bytes, of_end: bytes, of_server: bytes, of_client: bytes) -> bytes:
    """What only an end with the token can say about these nonces."""
    return hmac.digest(token, of_end + of_server + of_client, "sha256")


def is_client(token: bytes, of_server: bytes, hello: bytes) -> bool:
    """Whether the first bytes of a client prove that it holds the token."""
    said, found = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
    return hmac.compare_digest(proof(token, b"client", of_server, said), found)


def connect_tcp(address: TcpAddress) -> socket.socket:
    """A connection to a manager, when both ends have proved themselves.

    Raises:
        OSError: There is none, or it is not the manager that the token is of.
    """
    connection = socket.create_connection((address.host, address.port), HANDSHAKE_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        of_server, mine = _exactly(connection, NONCE_BYTES), new_nonce()
        connection.sendall(mine + proof(address.token, b"client", of_server, mine))
        found = _exactly(connection, PROOF_BYTES)
        if not hmac.compare_digest(found, proof(address.token, b"server", of_server, mine)):
            raise ConnectionError("it is not the manager that this client is of")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = connection.recv(size - len(found))
        if not data:
            raise ConnectionError("it ended before both ends had proved themselves")
        found += data
    return found


def keep_alive(connection: socket.socket) -> None:
    """Have the connection end, within half a minute, if the machine at its other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _EVERY_S),
        ("TCP_KEEPCNT", _TIMES),
        ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _EVERY_S * _TIMES)),
    ):
        with suppress(AttributeError):  # not every system has it
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
