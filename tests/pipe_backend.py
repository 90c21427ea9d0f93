"""A backend over pipes whose workers share no memory with the parent: the seam, tried out.

Each worker is a process that hosts an engine `Worker` on memory of its own. Commands carry actions
and replies carry rows, as `RowMessages` packs them. A worker reports what it is about to do before
it enters an environment, so the parent knows it even if that kills the worker.
"""

import contextlib
import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import time
import weakref
from collections import deque
from typing import Any

import cloudpickle

from envfleet.engine.backends.base import Answer, Backend, register
from envfleet.engine.backends.encoding import dumps, encode_env_fns, encode_reply
from envfleet.engine.backends.process.channel import ParentChannel, WorkerChannel
from envfleet.engine.backends.process.main import NotReady, Ready, load_facts
from envfleet.engine.backends.row_messages import RowMessages
from envfleet.engine.host import Guard
from envfleet.engine.memory import Control, Data, unnamed_file
from envfleet.engine.messages import Command, EnvFailure, Op, Reply, WorkerStatus
from envfleet.engine.worker import BuildFailed, Worker
from tests.gates import PATIENCE_S

_PR_SET_PDEATHSIG = 1
_open_handles: "weakref.WeakSet[PipeHandle]" = weakref.WeakSet()


# ---- a worker -----------------------------------------------------------------------------------


def run_worker(fd, stack_fd, parent_pid, plan, worker, first, blob, autoreset):
    """Run one worker process until the parent says close or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return
    for handle in _open_handles:  # copies of the parent's, which nobody shall keep open
        handle.channel.close()
        os.close(handle.stack_fd)
    faulthandler.enable(file=stack_fd)
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=True, chain=False)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    channel = WorkerChannel(fd)
    control = Control(plan, mmap.mmap(-1, plan.nbytes))
    status, reported = control.status[worker], 0

    def reporting(function):
        """The environment's function; what it is called for is reported first."""

        def call(*args, **kwargs):
            nonlocal reported
            if status[1] != reported:
                reported = status[1]
                channel.send(pickle.dumps(("status", reported)))
            return function(*args, **kwargs)

        return call

    doing: Any = "import"
    try:
        env_fns = pickle.loads(blob)
        doing = "build"
        host = Worker(first, env_fns, autoreset, status, Guard(reporting))
        ready = dumps(("start", Ready(dumps(host.facts()))))
    except BaseException as exc:
        failure = (
            exc.failure if isinstance(exc, BuildFailed) else EnvFailure.of(first, "start-up", exc)
        )
        channel.send(dumps(("start", NotReady(doing, failure))))
        return
    with contextlib.suppress(EOFError, OSError):  # the parent has gone
        channel.send(ready)
        groups, length, page_plan = pickle.loads(channel.recv())
        data = Data(groups, mmap.mmap(-1, length), page_plan=page_plan)
        host.bind(control, data)
        count = sum(one.count for one in host.hosts)
        rows = RowMessages(control, data, worker, first, count)
        while True:
            request, op, slots, page, payload, carried = pickle.loads(channel.recv())
            reported = 0
            try:
                command = Command(request, Op(op), slots, pickle.loads(payload), page)
            except BaseException as exc:  # the payload cannot be read here
                command = Command(request, Op(op), slots)
                asked = range(first, first + count) if slots is None else slots
                failures = [EnvFailure.of(slot, command.op.phrase, exc) for slot in asked]
                channel.send(pickle.dumps(("failed", failures, rows.answered(command))))
                continue
            rows.heed(command, carried)
            reply = host.handle(command)
            said = None if reply is None else encode_reply(reply)
            channel.send(pickle.dumps(("reply", said, rows.answered(command))))
            if command.op is Op.CLOSE:
                return
            host.idle()


# ---- the parent ---------------------------------------------------------------------------------


class PipeHandle:
    """The parent's end of one worker."""

    def __init__(self, launch, shared_memory):
        self.worker, self.first, self.count = launch.worker, launch.first, len(launch.env_fns)
        self.facts = self.start_failure = None
        self.is_dead = False
        self.last = Command(0, Op.IDLE)
        self._shared_memory = shared_memory
        self._posted: deque[Any] = deque()
        self._done: deque[Any] = deque()
        self._word, self._is_open = 0, True
        blob = encode_env_fns(launch)
        self.channel, theirs = ParentChannel.pair()
        self.stack_fd = unnamed_file("envfleet-test-stack")
        arguments = (theirs, self.stack_fd, os.getpid(), shared_memory.plan)
        self.process = multiprocessing.get_context("fork").Process(
            target=run_worker,
            args=(*arguments, launch.worker, launch.first, blob, launch.autoreset),
            daemon=True,
        )
        self.process.start()
        multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]
        os.close(theirs)
        self.pid = self.process.pid
        _open_handles.add(self)

    def bind(self, binding):
        data = binding.data
        self._rows: RowMessages = RowMessages(
            binding.control, data, self.worker, self.first, self.count
        )
        message = (data.space_groups, binding.length, binding.page_plan)
        self.channel.send(cloudpickle.dumps(message))

    def post(self, command):
        payload = cloudpickle.dumps(command.payload)
        slots = None if command.slots is None else list(command.slots)
        carried = self._rows.asked(command)
        words = (command.request, int(command.op), slots, command.page, payload, carried)
        self.channel.send(pickle.dumps(words))
        self._posted.append(command)
        self.last = command

    def pump(self):
        """Take in what has arrived; whether there was anything."""
        if self.is_dead:
            return False
        self.channel.pump()
        has_news = bool(self.channel.inbox)
        while self.channel.inbox:
            kind, *what = pickle.loads(self.channel.inbox.popleft())
            if kind == "status":
                (self._word,) = what
            elif kind == "start":
                self._note_start(*what)
            else:
                self._word = 0
                self._done.append((kind, *what))
        if self.channel.is_broken:
            self.process.join(PATIENCE_S)
            self.is_dead = has_news = True
        return has_news

    def _note_start(self, message):
        if isinstance(message, Ready):
            self.facts = load_facts(message.facts)
        else:
            self.start_failure = (message.why, message.failure)

    def peek(self):
        if not self._done:
            return Answer.NONE
        kind, said, *_ = self._done[0]
        return Answer.PLAIN if kind == "reply" and said is None else Answer.SPECIAL

    def take(self):
        replies = []
        while self._done:
            kind, said, carried = self._done[0]
            reply = self._decoded(kind, said)
            if carried is not None:
                self._rows.absorb(self._posted.popleft(), carried)
            replies.append(reply)
            self._done.popleft()
        return replies

    def _decoded(self, kind, said):
        if kind == "failed":
            return Reply(failures=said)
        try:
            return None if said is None else pickle.loads(said)
        except BaseException as exc:
            return Reply(failures=[EnvFailure.of(self.first, "reading a reply", exc)])

    def take_back(self):
        self._done.appendleft(("reply", None, None))  # its rows are in their place

    def status(self):
        return WorkerStatus.of_word(self._word, is_alive=not self.is_dead)

    def exit_code(self):
        self.process.join(PATIENCE_S)
        return self.process.exitcode

    def stack(self):
        start = 0
        if not self.is_dead and self.process.is_alive():
            start = os.fstat(self.stack_fd).st_size
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            give_up_s = time.monotonic() + 0.5
            while os.fstat(self.stack_fd).st_size == start and time.monotonic() < give_up_s:
                time.sleep(0.005)
            time.sleep(0.01)
        return os.pread(self.stack_fd, 1 << 16, start).decode(errors="replace").strip()

    def stop(self):
        if not self._is_open:
            return
        self._is_open = False
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.process.close()
        self.channel.close()
        os.close(self.stack_fd)
        _open_handles.discard(self)
        self.__dict__.pop("_rows", None)
        del self._shared_memory


class PipeBackend(Backend[Any]):
    """Worker processes that are sent everything they need."""

    NAME = "pipes"
    shares_memory = False
    needs_pickle = can_interrupt = survives_crash = has_own_clock = True

    def launch(self, launch):
        handle = self.handles[launch.worker] = PipeHandle(launch, self.shared_memory)
        return handle

    def wait(self, pending, timeout_s, *, want_all):
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            watched = [one for one in self.handles.values() if one._is_open and not one.is_dead]
            # all of them are pumped: one that is not waited for may need room for what it is sent
            news = [one for one in watched if one.pump()]
            if news or any(one.peek() is not Answer.NONE or one.is_dead for one in pending):
                return
            left_s = None if give_up_s is None else give_up_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            self._sleep(watched, left_s)

    def _sleep(self, watched, left_s):
        poll = select.poll()
        for one in watched:
            mask = select.POLLOUT if one.channel._has_backlog else 0
            poll.register(one.channel.fd, select.POLLIN | mask)
        poll.poll(None if left_s is None else left_s * 1000)


register(PipeBackend.NAME, PipeBackend)
