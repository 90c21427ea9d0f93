"""The main function of a worker process: come up, wait, serve, answer, and never outlive the parent.

    parent                                worker
      ring entry (+ message) ── bell ──►  wait: spin briefly on a hint, then block in the kernel
                                          serve: rows in shared memory, the rest as a message
      take the bell, read rows ◄── bell ──  done

Commands are served in the order of the ring and answered in that order, so the count that the bell carries
identifies what is done. A worker ignores Ctrl-C (the parent decides), dies with its parent, uses one BLAS
thread, and can be asked by a signal to write its stack, even while native code holds the interpreter.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import cloudpickle

from envfleet.engine.channel import WorkerChannel
from envfleet.engine.messages import Command, EnvFacts, Failure, Op, Reply
from envfleet.engine.options import Autoreset
from envfleet.engine.servant import BuildFailed, Servant
from envfleet.engine.signals import Bell
from envfleet.engine.slab import RING_SPARE, Control, ControlPlan, Data, Kind, Slab

HAS_MESSAGE = 1
"""Ring flag set by the parent: the command's slots and payload follow on the control path."""
HAS_REPLY = 2
"""Ring flag set by the worker: a reply was put on the control path before the bell rang."""
PARTIAL = 4
"""Ring flag set by the parent: only the slots whose ticket is this request."""
STACK_SIGNAL = signal.SIGUSR1 if hasattr(signal, "SIGUSR1") else None
SPIN_LIMIT_NS = 200_000
"""Longer pauses of the parent are slept through. A wake-up costs some 50 us, a spin costs a core."""
_OPS = tuple(Op)
_PR_SET_PDEATHSIG = 1
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Descriptors:
    """File descriptors that travel to a new process, however that process is started."""

    def __init__(self, **fds: int) -> None:
        self.fds = fds

    def __getstate__(self) -> Any:
        # one name may share a descriptor with another, and each descriptor may be passed only once
        return self.fds, {fd: reduction.DupFd(fd) for fd in set(self.fds.values())}

    def __setstate__(self, state: Any) -> None:
        names, handles = state
        fds = {fd: handle.detach() for fd, handle in handles.items()}
        self.fds = {name: fds[fd] for name, fd in names.items()}


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All a worker process needs to come up."""

    worker: int
    first: int
    env_fns: bytes
    autoreset: Autoreset
    control: ControlPlan
    parent_pid: int
    may_spin: bool
    dies_with_thread: bool
    """The launching thread lives as long as the parent does, so the kernel may watch it for us."""


@dataclass(frozen=True, slots=True)
class Ready:
    """First message of a worker: its environments are built."""

    facts: bytes
    """Pickled on its own: the parent may lack what a custom space needs."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """First message of a worker that could not come up."""

    why: str
    """"import" or "build"."""
    failure: Failure


def main(spec: WorkerSpec, descriptors: Descriptors) -> None:
    """Run one worker process until the parent says close or is gone."""
    _settle(spec, descriptors.fds["stack"])
    fds = descriptors.fds
    channel = WorkerChannel(fds["channel"])
    slab = Slab(fds["slab"])
    control = Control(spec.control, slab.map(0, spec.control.nbytes))
    post = control.posts[spec.worker]
    try:
        env_fns = pickle.loads(spec.env_fns)
    except Exception as exc:
        channel.send(_dumps(NotReady("import", Failure.of(spec.first, "import", exc))))
        return
    try:
        servant = Servant(spec.first, env_fns, spec.autoreset, post)
    except BuildFailed as exc:
        channel.send(_dumps(NotReady("build", exc.failure)))
        return
    channel.send(_dumps(Ready(_dumps(servant.facts()))))
    offset, length, kinds = pickle.loads(channel.recv())
    servant.bind(control, Data([Kind(*kind) for kind in kinds], slab.map(offset, length)))
    slab.close()
    gc.collect()
    gc.freeze()  # what start-up built is there to stay: later collections need not look at it
    commands = Bell(fds["commands"], fds["commands_write"])
    done = Bell(fds["done_read"], fds["done"])
    _serve(spec, servant, control, channel, commands, done)


def _serve(
    spec: WorkerSpec,
    servant: Servant,
    control: Control,
    channel: WorkerChannel,
    commands: Bell,
    done: Bell,
) -> None:
    ring, post = control.rings[spec.worker], control.posts[spec.worker]
    size, served = len(ring) // 3, 0
    count = size - RING_SPARE
    tickets = control.tickets[spec.first : spec.first + count]
    handle, ring_done, clock = servant.handle, done.ring, time.perf_counter_ns
    wait = _waiter(post, commands, spec.may_spin)
    busy_until = clock()
    while True:
        count = wait(served)
        for _ in range(count):
            started = clock()
            entry = served % size * 3
            request, op, flags = ring[entry], _OPS[ring[entry + 1]], ring[entry + 2]
            slots = None
            if flags & HAS_MESSAGE:
                slots, payload = pickle.loads(channel.recv())
                command = Command(request, op, slots, payload)
            elif flags & PARTIAL:
                chosen = (tickets == request & 0xFFFFFFFF).nonzero()[0] + spec.first
                command = Command(request, op, chosen.tolist())
            else:
                command = Command(request, op)
            reply = handle(command)
            if reply is not None:
                channel.send(encode_reply(reply))
                ring[entry + 2] = flags | HAS_REPLY
            served += 1
            ended = clock()
            post[2] += ended - started
            post[3] += started - busy_until
            busy_until = ended
            ring_done()
            if op is Op.CLOSE:
                return


def _waiter(post: memoryview, commands: Bell, may_spin: bool) -> Callable[[int], int]:
    """How to wait for commands: spin for about as long as the parent's last pause if that was short."""
    clock, give_way = time.perf_counter_ns, getattr(os, "sched_yield", None)
    if not may_spin or give_way is None:
        return lambda served: commands.take()
    last_pause = SPIN_LIMIT_NS

    def wait(served: int) -> int:
        nonlocal last_pause
        started = clock()
        if last_pause <= SPIN_LIMIT_NS:
            give_up = started + SPIN_LIMIT_NS
            # the hint only shortens the wait; the bell below is what says that a command is there
            while post[0] == served and clock() < give_up:
                give_way()
        count = commands.take()
        last_pause = clock() - started
        return count

    return wait


def encode_reply(reply: Reply) -> bytes:
    """Pickle a reply; what cannot be pickled is replaced by what it looked like, never the whole reply."""
    try:
        return _dumps(reply)
    except Exception:
        return _dumps(_readable(reply))


def _readable(reply: Reply) -> Reply:
    failures = list(reply.failures)
    values = {}
    for slot, value in reply.values.items():
        try:
            _dumps(value)
        except Exception as exc:
            failures.append(Failure.of(slot, "sending a result", exc))
        else:
            values[slot] = value
    return Reply(
        failures=failures,
        infos={slot: _readable_info(info) for slot, info in reply.infos.items()},
        final_infos={slot: _readable_info(info) for slot, info in reply.final_infos.items()},
        spills=reply.spills,
        final_spills=reply.final_spills,
        schemas=reply.schemas,
        values=values,
    )


@dataclass(frozen=True, slots=True)
class Unpicklable:
    """Stands in an info for a value that could not travel between processes."""

    type_name: str
    text: str


def _readable_info(value: Any) -> Any:
    try:
        _dumps(value)
        return value
    except Exception:
        if isinstance(value, dict):
            return {key: _readable_info(item) for key, item in value.items()}
        return Unpicklable(type(value).__name__, repr(value)[:500])


def _dumps(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # classes of __main__, closures
        return cloudpickle.dumps(value)


def load_facts(blob: bytes) -> list[EnvFacts]:
    """What `Ready` carries."""
    facts: list[EnvFacts] = pickle.loads(blob)
    return facts


def _settle(spec: WorkerSpec, stack_fd: int) -> None:
    """Make this process a good worker: signals, stack dumps, threads, and an end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=stack_fd, all_threads=True)
    if STACK_SIGNAL is not None and hasattr(faulthandler, "register"):
        faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True, chain=False)
    # an environment may need children of its own, which a daemonic process may not have
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    if spec.dies_with_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # the kernel's notice comes at the end of a thread and not under forkserver; this one needs the
    # interpreter, so a hang in native code escapes it. Together they leave nothing behind.
    threading.Thread(target=_end_with, args=(spec.parent_pid,), daemon=True).start()


def _end_with(pid: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            os._exit(1)
        except OSError:
            pass
        else:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll()
            os._exit(1)
    while True:
        try:
            os.kill(pid, 0)
        except OSError:
            os._exit(1)
        time.sleep(0.5)
