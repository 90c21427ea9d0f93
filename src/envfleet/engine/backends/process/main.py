"""The main function of a worker process: come up, wait, serve, never outlive the parent.

    parent                                worker
      ring entry (+ message) ── bell ──►  wait: spin briefly on a hint, then block in the kernel
                                          serve: rows in shared memory, the rest as a message
      take the bell, read rows ◄── bell ──  done

Commands are served in the order of the ring and answered in that order, so the count that the bell
carries identifies what is done. A worker ignores Ctrl-C (the parent decides), dies with its parent,
uses one BLAS thread, and can be asked by a signal to write its stack, even while native code holds
the interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, reduction, spawn
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envfleet.engine.backends.encoding import dumps, encode_reply
from envfleet.engine.backends.process.bell import Bell, WordBell
from envfleet.engine.backends.process.channel import WorkerChannel
from envfleet.engine.backends.process.child_processes import mark_offspring
from envfleet.engine.backends.process.copies import CopyGuard
from envfleet.engine.host import Guard
from envfleet.engine.memory import Control, ControlPlan, Data, Slab
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply
from envfleet.engine.options import Autoreset
from envfleet.engine.rng import has_usual_stream
from envfleet.engine.worker import BuildFailed, Worker

HAS_MESSAGE = 1
"""Ring flag set by the parent: the command's slots and payload follow on the control path."""
HAS_REPLY = 2
"""Ring flag set by the worker: a reply was put on the control path before the bell rang."""
PARTIAL = 4
"""Ring flag set by the parent: only the slots whose ticket is this request."""
_NOT_ALL = HAS_MESSAGE | PARTIAL
PAGE_SHIFT = 8
"""Above these bits the ring flags are the page of a step."""
STACK_SIGNAL = signal.SIGUSR1 if hasattr(signal, "SIGUSR1") else None
SPIN_LIMIT_NS = 1_000_000
"""Longer pauses are slept through: spinning costs a core. But a sleeper takes some 50 us to wake,
and at times it wakes on the core of another worker."""
LATE_NS, ROUNDS_TO_SLEEP = 1_000_000, 64
"""A worker that yields its core and gets it back this late, with no new command, twice within so
many rounds, shares the core with other work. It then sleeps for as many rounds, because a sleeper
is woken at once and a spinner waits for its turn. Once in a while it is only the parent that takes
its time, as a learner does between rollouts."""
_OPS = tuple(Op)
_FILE = re.escape(os.path.basename(__file__))
_PR_SET_PDEATHSIG = 1
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


GUARD_EXIT = 117
"""Exit code of a worker that could not import the main script, or found it opening a fleet."""

Script = dict[str, str]
"""What multiprocessing would tell a child of the main script."""


class Descriptors:
    """File descriptors that travel to a new process, however that process is started."""

    def __init__(self, **fds: int) -> None:
        self.fds = {name: fd for name, fd in fds.items() if fd >= 0}

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
    is_from_server: bool
    mark: str
    """By which its children are known."""


@dataclass(frozen=True, slots=True)
class Ready:
    """First message of a worker: its environments are built."""

    facts: bytes
    """Pickled on its own: the parent may lack what a custom space needs."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """First message of a worker that could not come up."""

    why: Literal["import", "build"]
    failure: EnvFailure


@dataclass(frozen=True, slots=True)
class ScriptFailed:
    """First and last message of a worker that could not import the main script."""

    failure: EnvFailure


def load_facts(blob: bytes) -> list[EnvFacts]:
    """What `Ready` carries."""
    facts: list[EnvFacts] = pickle.loads(blob)
    return facts


def begin(script: Script, spec: WorkerSpec, descriptors: Descriptors) -> None:
    """Run a worker that starts with a new interpreter: import the main script first.

    multiprocessing would import it before a child runs anything of ours, and one that cannot be
    imported would print a traceback for each child and give the parent no reason. So workers import
    it themselves, in the same way, and send the reason.
    """
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # what the script starts is refused for a better reason
    process._inheriting = True
    _write_stacks_to(descriptors.fds["stack"])
    try:
        with _no_wandb_runs():
            spawn.prepare(script)
    except BaseException as exc:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # the parent may be gone
            failed = ScriptFailed(EnvFailure.of(spec.first, "start-up", exc))
            WorkerChannel(descriptors.fds["channel"]).send(pickle.dumps(failed))
        os._exit(GUARD_EXIT)
    del process._inheriting
    main(spec, descriptors)


@contextlib.contextmanager
def _no_wandb_runs() -> Iterator[None]:
    """A script without a main guard would start a Weights & Biases run in every worker."""
    name, off = "WANDB_MODE", "disabled"
    before = os.environ.get(name)
    os.environ[name] = off
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif os.environ.get(name) == off:
            del os.environ[name]


def main(spec: WorkerSpec, descriptors: Descriptors) -> None:
    """Run one worker process until the parent says close or is gone."""
    gc.freeze()  # looking at what a fork inherits would copy it
    _settle(spec, descriptors.fds["stack"])
    fds = descriptors.fds
    channel = WorkerChannel(fds["channel"])
    slab = Slab(fds["slab"])  # stays open for copies
    copies = CopyGuard(spec.first, fds["slab"])
    doing: Literal["import", "build"] = "import"
    try:
        env_fns = pickle.loads(spec.env_fns)
        doing = "build"
        control_map = slab.map(0, spec.control.nbytes)
        copies.keep_off(control_map, 0)
        control = Control(spec.control, control_map)
        status = control.status[spec.worker]
        worker = Worker(spec.first, env_fns, spec.autoreset, status, Guard())
        ready = dumps(Ready(dumps(worker.facts())))
        copies.end_if_copy()
    except BuildFailed as exc:
        copies.end_if_copy()
        _decline(channel, NotReady(doing, exc.failure))
        return
    except BaseException as exc:
        copies.end_if_copy()
        _decline(channel, NotReady(doing, EnvFailure.of(spec.first, "start-up", exc)))
        return
    try:
        channel.send(ready)
        offset, length, space_groups, page_plan = pickle.loads(channel.recv())
    except (OSError, EOFError):  # Ctrl-C while the parent waited: it has given this worker up
        return
    data_map = slab.map(offset, length)
    copies.keep_off(data_map, offset)
    worker.bind(control, Data(space_groups, data_map, page_plan=page_plan))
    gc.collect()
    gc.freeze()  # what start-up built is there to stay: later collections need not look at it
    with contextlib.suppress(OSError):
        os.nice(1)  # where cores are few, the process that hands out work goes first
    commands: Bell | WordBell = WordBell(control.status[spec.worker])
    if "commands" in fds:
        commands = Bell(fds["commands"], fds["commands_write"])
    done = Bell(fds["done_read"], fds["done"])
    _serve(spec, worker, control, channel, commands, done, copies)


def _decline(channel: WorkerChannel, why: NotReady) -> None:
    with contextlib.suppress(OSError):  # the parent may be gone
        channel.send(dumps(why))


def _serve(
    spec: WorkerSpec,
    worker: Worker,
    control: Control,
    channel: WorkerChannel,
    commands: Bell | WordBell,
    done: Bell,
    copies: CopyGuard,
) -> None:
    ring, status = control.rings[spec.worker], control.status[spec.worker]
    size, served = len(ring) // 3, 0
    num_slots = sum(host.count for host in worker.hosts)
    tickets = control.tickets[spec.first : spec.first + num_slots]
    step, ring_done, clock = worker.step, done.ring, time.perf_counter_ns
    wait = _waiter(status, commands, spec.may_spin)
    busy_until = clock()
    while True:
        count = wait(served)
        for _ in range(count):
            started = clock()
            entry = served % size * 3
            op, flags = _OPS[ring[entry + 1]], ring[entry + 2]
            if op is Op.STEP and not flags & _NOT_ALL:
                reply = step(None, None, flags >> PAGE_SHIFT)
                status[2] += clock() - started
            else:
                reply = _handled(spec, worker, channel, tickets, ring[entry], op, flags)
            if copies.is_copy:
                copies.end_if_copy()
            if reply is not None:
                channel.send(encode_reply(reply))
                ring[entry + 2] = flags | HAS_REPLY
            served += 1
            ended = clock()
            status[3] += started - busy_until
            busy_until = ended
            ring_done()
            if op is Op.CLOSE:
                return
            worker.idle()


def _handled(
    spec: WorkerSpec,
    worker: Worker,
    channel: WorkerChannel,
    tickets: npt.NDArray[np.uint32],
    request: int,
    op: Op,
    flags: int,
) -> Reply | None:
    """Carry out any command."""
    if flags & HAS_MESSAGE:
        slots, blob = pickle.loads(channel.recv())
        try:
            command = Command(request, op, slots, pickle.loads(blob))
        except BaseException as exc:  # its payload cannot be read here
            asked = range(spec.first, spec.first + len(tickets)) if slots is None else slots
            return Reply(failures=[EnvFailure.of(slot, op.phrase, exc) for slot in asked])
    elif flags & PARTIAL:
        chosen = (tickets == request & 0xFFFFFFFF).nonzero()[0] + spec.first
        command = Command(request, op, chosen.tolist())
    else:
        command = Command(request, op, page=flags >> PAGE_SHIFT)
    return worker.handle(command)


def _waiter(status: memoryview, commands: Bell | WordBell, may_spin: bool) -> Callable[[int], int]:
    """How to wait for commands: spin first, if the parent's last pause was short."""
    clock, give_way = time.perf_counter_ns, getattr(os, "sched_yield", None)
    if not may_spin or give_way is None:
        return lambda served: commands.take()
    last_pause, rounds_to_sleep, rounds_in_time = SPIN_LIMIT_NS, 0, ROUNDS_TO_SLEEP

    def wait(served: int) -> int:
        nonlocal last_pause, rounds_to_sleep, rounds_in_time
        started = now = clock()
        rounds_in_time += 1
        if rounds_to_sleep:
            rounds_to_sleep -= 1
        elif last_pause <= SPIN_LIMIT_NS:
            give_up = started + SPIN_LIMIT_NS
            while status[0] == served and now < give_up:
                give_way()
                before, now = now, clock()
                if now - before > LATE_NS and status[0] == served:
                    if rounds_in_time <= ROUNDS_TO_SLEEP:
                        rounds_to_sleep = ROUNDS_TO_SLEEP
                    rounds_in_time = 0
                    break
        count = commands.take()
        last_pause = clock() - started
        return count

    return wait


def _settle(spec: WorkerSpec, stack_fd: int) -> None:
    """Make this process a good worker: signals, stack dumps, threads, an end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _write_stacks_to(stack_fd)
    # an environment may need children of its own, which a daemonic process may not have
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    mark_offspring(spec.mark)
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    if spec.is_from_server:
        _let_server_end()
    if has_usual_stream():
        # a fork begins with its parent's: repeatable still, but not what its neighbours draw
        state = np.random.get_state(legacy=False)["state"]
        seed = np.random.SeedSequence([*state["key"], state["pos"], spec.worker])
        np.random.seed(seed.generate_state(8))
    # The kernel ends us with the thread that started us, which lives as long as its process. Where
    # there is no such service a thread watches, but not a hang in native code or a stopped process.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent_fd = _parent_fd(spec.parent_pid)
    watcher = threading.Thread(target=_end_with, args=(spec.parent_pid, parent_fd), daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads to be had
        watcher.start()


def _write_stacks_to(stack_fd: int) -> None:
    faulthandler.enable(file=stack_fd, all_threads=True)
    if STACK_SIGNAL is not None and hasattr(faulthandler, "register"):
        faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True, chain=False)


def _parent_fd(pid: int) -> int | None:
    """A descriptor that is readable when the parent has ended, where there are such descriptors."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return None
    # the parent keeps no pipe for multiprocessing to tell us of its end
    parent: Any = multiprocessing.parent_process()
    if parent is not None:
        parent._sentinel = fd
    return fd


def _let_server_end() -> None:
    """Give up our share of the pipe that keeps the fork server alive: it ends with the parent."""
    server: Any = forkserver._forkserver
    fd, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    if fd is not None:
        os.close(fd)


def without_watcher(dump: str) -> str:
    """What faulthandler wrote, less the thread that only waits for the end of the parent."""
    frame = re.compile(rf'{_FILE}", line \d+ in {_end_with.__name__}$', re.MULTILINE)
    threads = dump.split("\n\n")
    return "\n\n".join(thread for thread in threads if not frame.search(thread))


def _end_with(pid: int, fd: int | None) -> None:
    if fd is not None:
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
