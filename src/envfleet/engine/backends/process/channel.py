"""The control path: whole messages over a socket pair, for all that is not on the hot path.

The worker's end blocks. The parent's end never does: what does not fit into the socket is kept and
sent when the worker reads. So the two sides cannot wait for each other for ever.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable

_LENGTH = struct.Struct("=Q")
_CHUNK = 1 << 16


class WorkerChannel:
    """The worker's end: send and receive whole messages, waiting as long as it takes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, message: bytes) -> None:
        """Write one message."""
        view = memoryview(_LENGTH.pack(len(message)) + message)
        while view:
            view = view[os.write(self._fd, view) :]

    def recv(self) -> bytes:
        """Read one message; EOFError when the parent is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = os.read(self._fd, count - len(parts))
            if not part:
                raise EOFError("the parent closed the control path")
            parts += part
        return bytes(parts)


class ParentChannel:
    """The parent's end: never blocks; whole messages that have arrived wait in `inbox`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unread = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._has_backlog = False
        self.inbox: deque[bytes] = deque()
        self.is_broken = False
        self.on_backlog: Callable[[bool], None] = lambda has_backlog: None
        """Called when there begin or cease to be unsent bytes, for which to watch for room."""

    @classmethod
    def pair(cls) -> tuple[ParentChannel, int]:
        """The parent's end, and the descriptor of the worker's."""
        mine, theirs = socket.socketpair()
        return cls(mine), theirs.detach()

    @property
    def fd(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Queue one message and write what the socket takes."""
        self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
        self.pump()

    def pump(self) -> None:
        """Move bytes in both directions, as many as go without waiting."""
        had_backlog = self._has_backlog
        try:
            self._write()
            self._read()
        except (BrokenPipeError, ConnectionResetError):
            self._break()
        self._has_backlog = bool(self._unsent)
        if had_backlog != self._has_backlog and not self.is_broken:
            self.on_backlog(self._has_backlog)

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            rest = self._unsent[0][sent:]
            if rest:
                self._unsent[0] = rest
            else:
                self._unsent.popleft()

    def _read(self) -> None:
        while True:
            try:
                part = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            if not part:
                self._break()
                break
            self._unread += part
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            end = _LENGTH.size + length
            if len(self._unread) < end:
                return
            self.inbox.append(bytes(self._unread[_LENGTH.size : end]))
            del self._unread[:end]

    def _break(self) -> None:
        self.is_broken = True
        self._unsent.clear()

    def close(self) -> None:
        """Give up the socket."""
        self._socket.close()
        del self.on_backlog  # it refers to the watch
