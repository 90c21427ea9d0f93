"""The parent's end of one worker process: its bells, its messages, its end.

What a worker process owns ends with it. What the parent holds for it are three descriptors: its
bell for "done", its socket, and one that tells of its end. `stop` gives them up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from envfleet.engine.backends.base import Answer, Launch, RowBinding, SharedMemory
from envfleet.engine.backends.process.bell import Bell, WordBell
from envfleet.engine.backends.process.channel import ParentChannel
from envfleet.engine.backends.process.child_processes import (
    await_end,
    end,
    hold_marked,
    hold_offspring,
    state_of,
)
from envfleet.engine.backends.process.launch import (
    WORKER_NAME,
    ForkProcess,
    main_script,
    started,
    watch_end,
)
from envfleet.engine.backends.process.main import (
    HAS_MESSAGE,
    HAS_REPLY,
    PAGE_SHIFT,
    PARTIAL,
    STACK_SIGNAL,
    Descriptors,
    NotReady,
    Ready,
    ScriptFailed,
    WorkerSpec,
    begin,
    load_facts,
    main,
    without_watcher,
)
from envfleet.engine.memory import unnamed_file
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply, WorkerStatus
from envfleet.engine.rows import WorkerPort
from envfleet.engine.rows_python import HAS_FUTEX
from envfleet.errors import StillInFlight

POSTED, DONE, TAKEN = range(3)
"""What is counted of a worker's commands."""
_STACK_WAIT_S = 0.3
_END_WAIT_S, _REAP_S = 5.0, 0.5
"""How long a killed process may take to end, and its exit code to come from the fork server."""
_STACK_PART = 1 << 24
"""Bytes of the file for each worker; those that nothing is written to take no memory."""


class StackDumps:
    """One unnamed file where every worker writes its stacks, each into a part of its own."""

    def __init__(self) -> None:
        self._fd, self._num_parts = unnamed_file("envfleet-stacks"), 0

    def open(self) -> tuple[int, int]:
        """A descriptor for one more worker, and where its part starts."""
        start = self._num_parts * _STACK_PART
        self._num_parts += 1
        try:  # opened again it has a position of its own
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # no /proc: stacks are written one after another
            return os.dup(self._fd), 0
        os.lseek(fd, start, os.SEEK_SET)
        return fd, start

    def read(self, start: int) -> bytes:
        """What was written from there on."""
        return os.pread(self._fd, 1 << 16, start).partition(b"\0")[0]

    def close(self) -> None:
        """Give up the file."""
        os.close(self._fd)


class ProcessHandle:
    """The parent's end of one worker process."""

    def __init__(
        self,
        launch: Launch,
        shared_memory: SharedMemory,
        context: Any,
        spec: WorkerSpec,
        stack_dumps: StackDumps,
    ) -> None:
        slab_fd = shared_memory.slab.fd
        assert slab_fd is not None
        self.worker, self.first, self.count = launch.worker, launch.first, len(launch.env_fns)
        self.facts: list[EnvFacts] | None = None
        self.start_failure: tuple[str, EnvFailure] | None = None
        self.script_failure: EnvFailure | None = None
        """Why it could not import the main script; it ends with `GUARD_EXIT` then."""
        self.is_dead = False
        self._ring = shared_memory.control.rings[launch.worker]
        self._post_words = shared_memory.control.status[launch.worker]
        self._tickets = shared_memory.control.tickets
        self._post_words[0] = self._post_words[1] = 0
        self._size = len(self._ring) // 3
        counts = np.zeros(3, np.uint64)
        self._counts = counts.data
        """Commands posted, done and taken; the compiled steps count here too."""
        self._stack_dumps, self._mark = stack_dumps, spec.mark
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            self.commands: Bell | WordBell = (
                WordBell(self._post_words) if HAS_FUTEX else Bell.create(take_waits=True)
            )
            undo.callback(self.commands.close)
            self.done = Bell.create(take_waits=False)
            undo.callback(self.done.close)
            self.channel, their_channel = ParentChannel.pair()
            undo.callback(self.channel.close)
            theirs.callback(os.close, their_channel)
            stack_fd, self._stack_start = stack_dumps.open()
            theirs.callback(os.close, stack_fd)
            descriptors = Descriptors(
                channel=their_channel,
                slab=slab_fd,
                commands=self.commands.fd,
                commands_write=self.commands.write_fd,
                done=self.done.write_fd,
                done_read=self.done.fd,
                stack=stack_fd,
            )
            is_fork = context.get_start_method() == "fork"
            new_process: Any = ForkProcess if is_fork else context.Process
            self.process = new_process(
                target=main if is_fork else begin,
                args=(spec, descriptors) if is_fork else (main_script(), spec, descriptors),
                name=f"{WORKER_NAME}{launch.worker}",
                daemon=True,
            )
            with started(self.process, context.get_start_method()):
                undo.callback(self.process.join, 5.0)
                undo.callback(self.process.kill)
            # a fork of this process that ends would end all workers in that list; ours end with us
            multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]
            self.exit_fd = watch_end(self.process, context.get_start_method())
            undo.pop_all()
        self.pid: int | None = self.process.pid
        self.port: WorkerPort = (
            np.frombuffer(self._ring, np.uint64),
            np.frombuffer(self._post_words, np.uint64),
            counts,
            self.commands.fd,
            self.done.fd,
            self.count,
        )
        """All that the compiled steps need."""
        self._is_open = True
        self.on_stop: Callable[[], None] = lambda: None
        """Called before anything is given up, so that no other part watches it any more."""

    def bind(self, binding: RowBinding) -> None:
        """Tell the worker where its rows lie."""
        # plans, not spaces: one registered in this process only would be planned otherwise there
        message = (binding.offset, binding.length, binding.data.space_groups, binding.page_plan)
        self.channel.send(cloudpickle.dumps(message))

    def post(self, command: Command) -> None:
        """Write the ring entry and ring; steps need no message."""
        posted, _, taken = self._counts
        if posted - taken >= self._size:
            raise StillInFlight(
                f"worker {self.worker} has {self._size} unanswered commands; receive some first"
            )
        entry = posted % self._size * 3
        flags = 0
        if command.payload is not None or (command.slots is not None and command.op is not Op.STEP):
            flags = HAS_MESSAGE
            blob = cloudpickle.dumps(command.payload)
            self.channel.send(pickle.dumps((command.slots, blob)))
        elif command.slots is not None:
            flags = PARTIAL
            self._tickets[command.slots] = command.request & 0xFFFFFFFF
        ring = self._ring
        ring[entry], ring[entry + 1], ring[entry + 2] = command.request, command.op, flags
        self._counts[POSTED] = self._post_words[0] = posted + 1
        self.commands.ring()

    @property
    def last(self) -> Command:
        """What was posted last; of a step its request and its page."""
        posted = self._counts[POSTED]
        if not posted:
            return Command(0, Op.IDLE)
        entry = (posted - 1) % self._size * 3
        request, op, flags = self._ring[entry : entry + 3].tolist()
        return Command(request, Op(op), page=flags >> PAGE_SHIFT)

    def peek(self) -> Answer:
        """What `take` would find first; its bell does not ring again."""
        _, done, taken = self._counts
        if taken >= done:
            return Answer.NONE
        has_reply = self._ring[taken % self._size * 3 + 2] & HAS_REPLY
        return Answer.SPECIAL if has_reply else Answer.PLAIN

    def note_done(self) -> None:
        """Take the done-bell, in case it rings."""
        self._counts[DONE] += self.done.take()

    def take(self) -> list[Reply | None]:
        """Replies in the order of commands; those without anything to say are None."""
        _, done, taken = self._counts
        replies: list[Reply | None] = []
        for number in range(taken, done):
            flags = self._ring[number % self._size * 3 + 2]
            reply = None
            if flags & HAS_REPLY:
                if not self.channel.inbox:
                    self.channel.pump()
                reply = self._decode(self.channel.inbox.popleft())
            replies.append(reply)
            self._counts[TAKEN] = number + 1
        return replies

    def take_back(self) -> None:
        """Undo a `take` that found one plain answer."""
        self._counts[TAKEN] -= 1

    def status(self) -> WorkerStatus:
        """What the process says that it is doing."""
        word = self._post_words[1] if self._is_open else 0
        return WorkerStatus.of_word(word, is_alive=not self.is_dead)

    def _decode(self, message: bytes) -> Reply:
        try:
            reply: Reply = pickle.loads(message)
        except BaseException as exc:  # it has a class that this process cannot import or rebuild
            failure = EnvFailure.of(self.first, "reading a reply", exc)
            return Reply(failures=[failure])
        return reply

    def note_message(self) -> None:
        """The control path is ready: move bytes, and notice the worker's first message."""
        self.channel.pump()
        if self.facts is None and self.start_failure is None and self.channel.inbox:
            message = pickle.loads(self.channel.inbox.popleft())
            if isinstance(message, Ready):
                self.facts = load_facts(message.facts)
            elif isinstance(message, NotReady):
                self.start_failure = (message.why, message.failure)
            elif isinstance(message, ScriptFailed):
                self.script_failure = message.failure

    def note_end(self) -> None:
        """The process has ended: what it finished before still counts."""
        with contextlib.suppress(OSError):
            self.note_message()
        self.note_done()
        self.is_dead = True

    def exit_code(self) -> int | None:
        """The process's exit code; negative for a signal."""
        self.process.join(_REAP_S)
        code: int | None = self.process.exitcode
        return code

    def stack(self) -> str:
        """What faulthandler wrote when the process crashed, or writes now that it is asked to."""
        if self.process.is_alive() and STACK_SIGNAL is not None and not self.is_dead:
            if state_of(self.process.pid) == "T":
                return (
                    "the process is stopped (SIGSTOP, or a debugger); it cannot say where it stands"
                )
            self._read_stack()
            os.kill(self.process.pid, STACK_SIGNAL)
            deadline = time.monotonic() + _STACK_WAIT_S
            dump = self._read_stack()
            while not dump and time.monotonic() < deadline:
                time.sleep(0.005)
                dump = self._read_stack()
            time.sleep(0.01)
            return without_watcher(dump + self._read_stack()).strip()
        return without_watcher(self._read_stack()).strip()

    def _read_stack(self) -> str:
        """What was written since it was read last."""
        dump = self._stack_dumps.read(self._stack_start)
        self._stack_start += len(dump)
        return dump.decode(errors="replace")

    def stop(self) -> None:
        """Kill what still runs, and what that has started; reap it; close every descriptor."""
        if not self._is_open:
            return
        self._is_open = False
        self.on_stop()
        # a worker that has closed its environments has left what it wanted to leave
        posted, _, taken = self._counts
        has_closed = posted == taken and self.last.op is Op.CLOSE
        if self.process.is_alive():
            offspring = [] if has_closed else hold_offspring(self.process.pid)
            self.process.kill()
            end(offspring)
        elif not has_closed:
            end(hold_marked(self._mark))
        has_ended = await_end(self.process.pid, _END_WAIT_S)
        self.process.join(_REAP_S if has_ended else _END_WAIT_S)
        popen = self.process._popen
        with contextlib.suppress(ValueError):  # stuck in the kernel, or its server is stopped
            self.process.close()
        popen.close()
        self.commands.close()
        self.done.close()
        self.channel.close()
        del self._ring, self._post_words, self._tickets, self.port, self.on_stop
