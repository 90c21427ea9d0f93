"""What runs in a Ray actor: an engine `Worker` with rows of its own.

Environments are built and stepped by one thread, command by command. Two more threads answer
meanwhile: `watch` says where the first one stands, and `live` never returns, so that its end tells
the parent of the actor's.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import threading
import traceback
from typing import Any

from envfleet.engine.backends.encoding import dumps, encode_reply
from envfleet.engine.backends.process.main import NotReady, Ready
from envfleet.engine.backends.row_messages import RowMessages
from envfleet.engine.host import Guard
from envfleet.engine.memory import Control, ControlPlan, Data
from envfleet.engine.messages import Command, EnvFailure, Op
from envfleet.engine.options import Autoreset
from envfleet.engine.worker import BuildFailed, Worker

Answered = tuple[bytes | list[EnvFailure] | None, bytes]
"""A reply, as bytes or as the failures of what could not be read, and what it carries of rows."""


class ActorHost:
    """One worker; the class that becomes an actor."""

    def __init__(self, plan: ControlPlan, worker: int, first: int) -> None:
        self._index, self._first = worker, first
        self._control = Control(plan, mmap.mmap(-1, plan.nbytes))
        self._status = self._control.status[worker]
        self._thread: int | None = None

    def build(self, env_fns: bytes, autoreset: Autoreset) -> tuple[int, str, bytes]:
        """Build the environments: this process, its node, and a pickled `Ready` or `NotReady`."""
        import ray

        self._thread = threading.get_ident()
        node = str(ray.get_runtime_context().get_node_id())
        doing: Any = "import"
        try:
            functions = pickle.loads(env_fns)
            doing = "build"
            self._worker = Worker(self._first, functions, autoreset, self._status, Guard())
            said: Ready | NotReady = Ready(dumps(self._worker.facts()))
        except BaseException as exc:
            said = NotReady(
                doing,
                exc.failure
                if isinstance(exc, BuildFailed)
                else EnvFailure.of(self._first, "start-up", exc),
            )
        return os.getpid(), node, dumps(said)

    def bind(self, message: bytes) -> None:
        """Make room for the rows."""
        groups, length, page_plan = pickle.loads(message)
        data = Data(groups, mmap.mmap(-1, length), page_plan=page_plan)
        self._worker.bind(self._control, data)
        self._count = sum(one.count for one in self._worker.hosts)
        self._rows = RowMessages(self._control, data, self._index, self._first, self._count)

    def handle(self, words: bytes) -> Answered:
        """Carry out one command."""
        request, op, slots, page, payload, carried = pickle.loads(words)
        try:
            command = Command(request, Op(op), slots, pickle.loads(payload), page)
        except BaseException as exc:  # the payload cannot be read here
            command = Command(request, Op(op), slots)
            asked = range(self._first, self._first + self._count) if slots is None else slots
            failures = [EnvFailure.of(slot, command.op.phrase, exc) for slot in asked]
            return failures, self._rows.answered(command)
        self._rows.heed(command, carried)
        reply = self._worker.handle(command)
        self._worker.idle()
        return None if reply is None else encode_reply(reply), self._rows.answered(command)

    def watch(self) -> int:
        """The status word, which says what the worker does and for which slot."""
        return int(self._status[1])

    def stack(self) -> str:
        """Where the thread of the environments stands."""
        frame = sys._current_frames().get(self._thread or -1)
        return "".join(traceback.format_stack(frame)) if frame else "between two commands"

    def echo(self) -> None:
        """Nothing: one round trip."""

    def live(self) -> None:
        """Never returns."""
        threading.Event().wait()
