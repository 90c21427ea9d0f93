"""The workers of one fleet: started together, replaced one by one, ended for certain.

`Workers` owns every resource of a fleet: the shared block, the backend, the workers. If opening
fails halfway, everything is given up. `stop` is idempotent, bounded, and safe to call from a
finalizer or at exit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence, Set
from typing import Any

import cloudpickle
import gymnasium

from envfleet.engine.backends.base import (
    Backend,
    FastPath,
    Launch,
    RowBinding,
    SharedMemory,
    WorkerHandle,
    backend_named,
    made,
)
from envfleet.engine.backends.encoding import always_travels
from envfleet.engine.backends.serial import JointFastPath, SerialBackend
from envfleet.engine.interrupts import uninterrupted
from envfleet.engine.memory import Control, ControlPlan, Data, PagePlan, Slab, group_spaces
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op
from envfleet.engine.options import Autoreset, Deadlines, EnvFn, StartMethod
from envfleet.engine.slots import deal
from envfleet.errors import (
    ConfigError,
    EnvConstructionFailed,
    EnvNotImportable,
    EnvNotRegistered,
    RemoteTraceback,
    StartTimeout,
    WorkerDied,
)

_UNREGISTERED = ("NameNotFound", "NamespaceNotFound", "VersionNotFound", "UnregisteredEnv")


class AbsentEnv(gymnasium.Env[Any, Any]):
    """Stands in the place of an environment that has been given up; it is never asked anything."""

    observation_space = action_space = gymnasium.spaces.Discrete(1)


class Workers:
    """Workers, the block they share, and how they are started and replaced."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        backend: str,
        start_method: StartMethod,
        num_workers: int,
        autoreset: Autoreset,
        deadlines: Deadlines,
        page_plan: PagePlan,
        num_here: int,
        backend_options: Any = None,
    ) -> None:
        self.env_fns, self.deadlines = tuple(env_fns), deadlines
        self.bounds = deal(len(self.env_fns), num_workers, num_here or None)
        self._autoreset, self._page_plan = autoreset, page_plan
        self.owner_pid = os.getpid()
        self.handles: list[WorkerHandle] = []
        self._here: set[int] = {num_workers - 1} if num_here else set()
        """Workers that are hosts in this process, beside those of the backend."""
        self._dismissed: set[int] = set()
        self._launched_s: dict[int, float] = {}
        """When workers were launched that are to replace others and are not there yet."""
        self.is_stopped = False
        self._backend: Backend[Any] | None = None
        self._joint: JointFastPath | None = None
        kind = backend_named(backend)
        self._start_method = start_method if kind.survives_crash else None
        # other processes map the block; threads have it, and without sharing it is the parent's
        self._slab = Slab.create(is_shared=kind.shares_memory and kind.needs_pickle)
        try:
            plan = ControlPlan.of(self.bounds)
            self._slab.grow(plan.nbytes, len(self.env_fns))
            self.control = Control(plan, self._slab.map(0, plan.nbytes))
            self._shared_memory = SharedMemory(self._slab, plan, self.control)
            self._local: Backend[Any] = SerialBackend(
                self._shared_memory, num_workers, start_method
            )
            self._backend = self._local
            if kind is not SerialBackend:
                self._backend = made(
                    kind, self._shared_memory, num_workers, start_method, backend_options
                )
            launched_s = time.monotonic()
            for worker in range(num_workers):
                self.handles.append(self._backend_of(worker).launch(self._launch(worker)))
            self.facts: list[EnvFacts] = [
                facts for handle in self.handles for facts in self._await(handle, launched_s)
            ]
            self._binding = self._bind_all(plan.nbytes)
        except BaseException:
            self.stop()
            raise

    @property
    def round_trip_s(self) -> float | None:
        """What the backend says of it, if it is worth telling."""
        assert self._backend is not None
        return self._backend.round_trip_s()

    @property
    def data(self) -> Data:
        """The bound columns."""
        return self._binding.data

    @property
    def why_not_here(self) -> str:
        """Why a copy of the process that opened the fleet cannot use it."""
        return (
            f"this fleet belongs to process {self.owner_pid}; this process is a copy of it "
            "(os.fork), and the workers answer only to the original. Open a fleet here"
        )

    def pids(self) -> list[int | None]:
        """The process of each worker, if it has one and has not been dismissed."""
        gone = self._dismissed
        return [None if handle.worker in gone else handle.pid for handle in self.handles]

    @property
    def timings(self) -> dict[str, float]:
        """Seconds so far, of all workers together: in environments, and waiting for commands."""
        words = self.control.status
        return {
            "env_s": sum(word[2] for word in words) / 1e9,
            "worker_wait_s": sum(word[3] for word in words) / 1e9,
        }

    def wait(
        self, pending: Sequence[WorkerHandle], timeout_s: float | None, *, want_all: bool
    ) -> None:
        """Wait for news of `pending`; those that live in this process are served first."""
        assert self._backend is not None
        if not self._here:
            self._backend.wait(pending, timeout_s, want_all=want_all)
            return
        local = [handle for handle in pending if handle.worker in self._here]
        if local:
            self._local.wait(local, timeout_s, want_all=False)
            timeout_s = 0.0
            pending = [handle for handle in pending if handle not in local]
        self._backend.wait(pending, timeout_s, want_all=want_all)

    @property
    def fast_path(self) -> FastPath:
        """How all workers are asked for plain steps; some may be being replaced."""
        assert self._backend is not None
        if not self._here or self._backend is self._local:
            return self._backend
        if self._joint is None:
            self._joint = JointFastPath(self._backend, self._local, self._here)
        return self._joint

    def check_payload(self, payload: Any, what: str) -> None:
        """Refuse what could not reach a worker, before anything is under way."""
        needs_pickle = self._backend is not None and self._backend.needs_pickle
        if needs_pickle and not always_travels(payload):
            try:
                cloudpickle.dumps(payload)
            except Exception as exc:
                raise ConfigError(
                    f"{what} cannot be sent to a worker process: {exc}. Pass plain data, or use "
                    "backend='thread' or 'serial'"
                ) from exc

    def dismiss(self, worker: int) -> None:
        """End one worker and everything held for it."""
        if worker in self._dismissed:
            return
        self._dismissed.add(worker)
        self._launched_s.pop(worker, None)
        self.handles[worker].stop()

    def replace(self, worker: int, *, in_process: bool, absent: Set[int]) -> None:
        """Dismiss a worker and launch a new one in its place; `has_come` says when it is there.

        It builds no environments for slots that are `absent`.
        """
        self.dismiss(worker)
        if in_process:
            self._here.add(worker)
            self._joint = None
        self.handles[worker] = self._backend_of(worker).launch(self._launch(worker, absent))
        self._dismissed.discard(worker)
        self._launched_s[worker] = time.monotonic()

    def has_come(self, worker: int) -> bool:
        """Whether a replaced worker is up (it is bound then), or the error that keeps it down."""
        handle = self.handles[worker]
        if not self._is_up(handle, self._launched_s[worker]):
            return False
        handle.bind(self._binding)
        del self._launched_s[worker]
        return True

    def close(self, owed: Sequence[int]) -> list[EnvFailure]:
        """Ask every worker to close its environments, wait a bounded time, end what is left.

        `owed` says how many replies each worker still owes, so that the last one is recognised.
        """
        if os.getpid() != self.owner_pid:
            return []  # in a forked copy: the workers answer to the original
        try:
            return self._ask_to_close(owed)
        finally:
            self.stop()

    def _ask_to_close(self, owed: Sequence[int]) -> list[EnvFailure]:
        failures: list[EnvFailure] = []
        gone = self._dismissed | self._launched_s.keys()  # those that are not bound cannot be asked
        closing = [h for h in self.handles if not h.is_dead and h.worker not in gone]
        for handle in closing:
            handle.post(Command(0, Op.CLOSE))
        give_up_s = time.monotonic() + self.deadlines.close_s
        waiting = {handle.worker: owed[handle.worker] + 1 for handle in closing}
        while waiting and (left_s := give_up_s - time.monotonic()) > 0:
            pending = [handle for handle in closing if handle.worker in waiting]
            self.wait(pending, left_s, want_all=False)
            for handle in pending:
                for reply in handle.take():
                    waiting[handle.worker] -= 1
                    if waiting[handle.worker] == 0 and reply is not None:
                        failures += [one for one in reply.failures if one.doing == Op.CLOSE.phrase]
                if waiting[handle.worker] <= 0 or handle.is_dead:
                    del waiting[handle.worker]
        return failures

    def stop(self) -> None:
        """End all workers at once; a forked copy of this process leaves them to the original."""
        if os.getpid() != self.owner_pid or self.is_stopped:
            return
        self.is_stopped = True
        with uninterrupted:
            for handle in self.handles:
                self.dismiss(handle.worker)
            if self._backend is not None:
                self._backend.close()
            self._slab.close()
        # a map holds a descriptor of its own until the last view of it is gone
        self.handles = []
        for name in ("control", "_shared_memory", "_binding", "_local", "_backend", "_joint"):
            self.__dict__.pop(name, None)

    def _backend_of(self, worker: int) -> Backend[Any]:
        assert self._backend is not None
        return self._local if worker in self._here else self._backend

    def _launch(self, worker: int, absent: Set[int] = frozenset()) -> Launch:
        lo, hi = self.bounds[worker]
        env_fns = [AbsentEnv if slot in absent else self.env_fns[slot] for slot in range(lo, hi)]
        return Launch(worker, lo, env_fns, self._autoreset)

    def _bind_all(self, offset: int) -> RowBinding:
        space_groups = group_spaces([(f.observation_space, f.action_space) for f in self.facts])
        length = Data.measure(space_groups, self._page_plan)
        self._slab.grow(offset + length, len(self.facts))
        data = Data(space_groups, self._slab.map(offset, length), page_plan=self._page_plan)
        binding = RowBinding(self.control, data, offset, length, self._page_plan)
        for handle in self.handles:
            handle.bind(binding)
        return binding

    def _await(self, handle: WorkerHandle, launched_s: float) -> list[EnvFacts]:
        assert self._backend is not None
        while not self._is_up(handle, launched_s):
            left_s = launched_s + self.start_limit_s - time.monotonic()
            self._backend.wait([handle], max(left_s, 0.0), want_all=False)
        assert handle.facts is not None
        return handle.facts

    def _is_up(self, handle: WorkerHandle, launched_s: float) -> bool:
        """Whether the environments are built, or the error that says why they will never be."""
        if handle.facts is not None:
            return True
        slots = range(handle.first, handle.first + handle.count)
        if handle.start_failure is not None:
            is_here = not self._backend_of(handle.worker).has_own_clock
            raise _start_error(*handle.start_failure, slots, is_here=is_here)
        if handle.is_dead:
            raise self._death_at_start(handle, slots)
        if time.monotonic() >= launched_s + self.start_limit_s:
            limit_s, stack = self.start_limit_s, handle.stack()
            raise StartTimeout(handle.worker, slots, limit_s, stack, self._start_method)
        return False

    @property
    def start_limit_s(self) -> float:
        """How long a worker may take to come up."""
        return max(self.deadlines.start_s, self.deadlines.reset_s or 0.0)

    def _death_at_start(self, handle: WorkerHandle, slots: Sequence[int]) -> Exception:
        known = self._backend_of(handle.worker).death_at_start(handle)
        if known is not None:
            return known
        exit_code, (op, slot, *_) = handle.exit_code(), handle.status()
        doing = "start-up" if slot is None else f"{op.phrase} of slot {slot}"
        # a fleet restarts what it has had, not what never came up
        return WorkerDied(
            handle.worker, slots, exit_code, doing, handle.stack(), restart_helps=False
        )


def _start_error(
    why: str, failure: EnvFailure, slots: Sequence[int], *, is_here: bool
) -> Exception:
    error: Exception
    if why == "import":
        error = EnvNotImportable(slots, failure.reason)
    elif failure.kind in _UNREGISTERED:
        error = EnvNotRegistered(failure.slot, failure.reason)
    elif failure.kind == ConfigError.__name__:
        error = ConfigError(failure.reason.partition(": ")[2])
    else:
        has_neighbour = failure.slot != slots[0]
        error = EnvConstructionFailed(
            failure.slot, failure.reason, is_here, has_neighbour=has_neighbour
        )
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error
