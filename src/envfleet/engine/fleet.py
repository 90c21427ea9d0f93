"""The one imperative shell: open, send, recv, call, close.

    caller ── send(actions, slots) ──► rows in shared memory ── command ──► workers
    caller ◄── recv(): Batch ───────── rows, infos, incidents ◄── reply ──── workers

Every slot has at most one command in flight. Commands of one worker are answered in order. Whatever
happens to a worker (an exception, a death, a silence) becomes an incident, `supervise` decides, and the
shell carries it out: raise, rebuild one environment, relaunch a worker, fall back, quarantine.
Not safe for use from several threads at once.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.engine.backends import WorkerHandle
from envfleet.engine.backends.process import refuse_unguarded_main
from envfleet.engine.batch import Batch
from envfleet.engine.crew import Crew
from envfleet.engine.host import State, unpack_rng
from envfleet.engine.incident import Incident
from envfleet.engine.infos import NO_INFO, ON_CONTROL_PATH, Info, PackedInfos, Schema
from envfleet.engine.journal import Journal
from envfleet.engine.messages import Command, EnvFacts, Failure, Op, Reply, read_place
from envfleet.engine.options import (
    PLAIN_RESET,
    Autoreset,
    BackendName,
    Deadlines,
    EnvFn,
    OnFailure,
    ResetPlan,
    RestartPolicy,
    StartMethod,
)
from envfleet.engine.schedule import is_enough
from envfleet.engine.snapshot import Replay, Snapshot
from envfleet.engine.supervise import (
    Ledger,
    Silence,
    Verdict,
    check_every,
    judge,
    limit_for,
    restart_plan,
)
from envfleet.errors import (
    ActionError,
    ConfigError,
    DeadlineExceeded,
    EnvFailed,
    EnvfleetError,
    FleetClosed,
    LayoutMismatch,
    NothingSent,
    RemoteTraceback,
    ResetNeeded,
    SlotQuarantined,
    SnapshotError,
    StillInFlight,
    WorkerDied,
    describe_exit,
)

Slots = npt.NDArray[np.intp]
_MAX_ROUTES = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """The share of one worker in a set of slots."""

    worker: int
    slots: Slots
    rows: slice | None
    """The same as a slice, if the slots are neighbours."""
    is_whole: bool
    positions: slice | Slots
    """Where these slots stand in the set."""


@dataclass(frozen=True, slots=True)
class _Route:
    """A set of slots a caller named, worked out once."""

    slots: Slots
    rows: slice | Slots
    is_all: bool
    parts: tuple[_Part, ...]


@dataclass(slots=True)
class _Pending:
    """One command that has not been answered, or whose answer nobody has asked for yet."""

    command: Command
    part: _Part
    is_wanted: bool = True
    """False once its caller has given up on it: the reply is taken and dropped."""
    reply: Reply | None = None
    is_done: bool = False


@dataclass(slots=True)
class _SlotNews:
    """What came for slots by the control path since they were last received."""

    infos: dict[int, Info] = field(default_factory=dict)
    final_infos: dict[int, Info] = field(default_factory=dict)
    spills: dict[int, dict[int, Any]] = field(default_factory=dict)
    final_spills: dict[int, dict[int, Any]] = field(default_factory=dict)
    incidents: dict[int, Incident] = field(default_factory=dict)


class Fleet:
    """Environments in slots, slots in workers, batches out; slots may hold different environments."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        num_workers: int = 1,
        backend: BackendName = "process",
        start_method: StartMethod = "fork",
        autoreset: Autoreset = "next_step",
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        on_failure: OnFailure = "raise",
        restarts: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        copy: bool = True,
        poison: bool = False,
    ) -> None:
        """Build the environments; returns when all of them are there.

        Args:
            env_fns: One function per slot that builds its environment where it will live.
            num_workers: Among how many workers the slots are dealt.
            backend: "serial" (here), "thread" or "process".
            start_method: How processes are started: "fork", "spawn" or "forkserver".
            autoreset: "next_step", "same_step" or "disabled", as Gymnasium defines them.
            deadlines: How long to wait for what.
            on_failure: "raise", "restart" or "fallback".
            restarts: How many failures of a slot "restart" forgives.
            copy: False returns views of shared memory, valid until the next send to that slot.
            poison: Fill the rows of a slot with junk when it is sent, to find views kept too long.
        """
        refuse_unguarded_main()
        if not env_fns:
            raise ConfigError("a fleet needs at least one environment; got none")
        if not 1 <= num_workers <= len(env_fns):
            raise ConfigError(
                f"num_workers must be between 1 and the number of environments ({len(env_fns)}), "
                f"got {num_workers}"
            )
        self.num_slots = len(env_fns)
        self.autoreset, self.copy = autoreset, copy
        self._deadlines, self._on_failure, self._restarts = deadlines, on_failure, restarts
        self._poison = poison
        self._crew = Crew(
            env_fns,
            backend=backend,
            start_method=start_method,
            num_workers=num_workers,
            autoreset=autoreset,
            deadlines=deadlines,
        )
        self._finalizer = weakref.finalize(self, self._crew.stop)
        n = self.num_slots
        self._control, self._data = self._crew.control, self._crew.data
        self._is_mixed = len(self._data.kinds) > 1
        self._outstanding: list[deque[_Pending]] = [deque() for _ in self._crew.handles]
        self._ready: list[_Pending] = []
        self._num_ready = 0
        self._in_flight = np.zeros(n, np.bool_)
        self._num_in_flight = 0
        self._needs_reset = np.ones(n, np.bool_)
        self._num_needing_reset = n
        self._blocked: dict[int, EnvfleetError] = {}
        self._errors: list[EnvfleetError] = []
        self._news = _SlotNews()
        self._spills: dict[int, dict[int, Any]] = {}
        self._schemas: list[list[Schema]] = [[] for _ in self._crew.handles]
        self._uniform: dict[int, Schema | None] = {}
        self._journal = Journal(n)
        self._queued: dict[int, deque[ResetPlan]] = {}
        self._seeds: list[int | None] = [None] * n
        self._num_restarts = [0] * n
        self._ledgers = [Ledger()] * n
        self._silences: dict[int, Silence] = {}
        self._check_s = check_every(deadlines)
        self._routes: dict[bytes, _Route] = {}
        self._everything = self._make_route(np.arange(n))
        self._request = 0
        self._wait_s = self._copy_s = 0.0
        self.incidents: list[Incident] = []
        """Every failure so far, oldest first."""

    # ---- facts ----------------------------------------------------------------------------------

    @property
    def facts(self) -> list[EnvFacts]:
        """Spaces, metadata and spec of every slot's environment."""
        return self._crew.facts

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Which slots each worker hosts, as half-open ranges."""
        return self._crew.bounds

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return not self._finalizer.alive

    @property
    def timings(self) -> dict[str, float]:
        """Seconds so far: in hosts and waiting for commands (workers), waiting and copying (here)."""
        posts = self._control.posts
        return {
            "env_s": sum(post[2] for post in posts) / 1e9,
            "worker_wait_s": sum(post[3] for post in posts) / 1e9,
            "wait_s": self._wait_s,
            "copy_s": self._copy_s,
        }

    def observations(self) -> Any:
        """What every slot observed last, batched."""
        return self._read_obs(self._everything.slots, self._everything.rows)

    # ---- the hot path ---------------------------------------------------------------------------

    def send(self, actions: Any, slots: Sequence[int] | Slots | None = None) -> None:
        """Start one step of these slots (None: all); `actions` is a batch in the order of `slots`."""
        started_s = time.perf_counter()
        route = self._route(slots)
        self._check_sendable(route)
        spills = self._write_actions(route, actions)
        if self._poison:
            self._poison_rows(route)
        self._post(route, Op.STEP, spills and [spills.get(i) for i in range(len(route.slots))])
        self._copy_s += time.perf_counter() - started_s

    def recv(self, min_slots: int | None = None, timeout_s: float | None = None) -> Batch:
        """Wait for results and return all that are there.

        Args:
            min_slots: Wait for at least this many slots; None waits for all that are in flight.
            timeout_s: After this long return what is there, perhaps nothing.
        """
        self._check_open()
        if not self._ready and not self._num_in_flight:
            raise NothingSent(
                "recv has nothing to wait for: no slot is in flight. Call send first."
            )
        if min_slots is not None and min_slots < 1:
            raise ConfigError(f"min_slots must be 1 or more, got {min_slots}")
        started_s = now_s = time.perf_counter()
        give_up_s = None if timeout_s is None else started_s + timeout_s
        while not is_enough(self._num_ready, self._num_in_flight, min_slots):
            left_s = None if give_up_s is None else give_up_s - now_s
            if left_s is not None and left_s < 0:
                break
            self._advance(left_s, want_all=min_slots is None)
            now_s = time.perf_counter()
        self._wait_s += now_s - started_s
        ready, self._ready = self._ready, []
        self._num_ready = 0
        batch = self._collect(ready)
        self._copy_s += time.perf_counter() - now_s
        return batch

    def _write_actions(self, route: _Route, actions: Any) -> dict[int, Any] | None:
        if self._is_mixed:
            return self._write_mixed_actions(route, actions)
        columns = self._data.actions[0]
        try:
            spills = columns.write_batch(route.rows, actions)
        except LayoutMismatch as exc:
            raise ActionError(
                f"the actions for {len(route.slots)} slots do not fit the action space "
                f"{self.facts[0].action_space}: {exc}"
            ) from exc
        if isinstance(actions, np.ndarray) and spills is None:
            kept: Any = actions.copy()
        else:
            kept = columns.read_each(route.rows, spills)
        self._journal.sent(None if route.is_all else route.slots, kept)
        return spills

    def _write_mixed_actions(self, route: _Route, actions: Any) -> dict[int, Any] | None:
        if len(actions) != len(route.slots):
            raise ActionError(
                f"{len(route.slots)} slots need {len(route.slots)} actions, got {len(actions)}"
            )
        spills: dict[int, Any] = {}
        for position, (slot, action) in enumerate(zip(route.slots.tolist(), actions, strict=True)):
            kind, row = int(self._data.kind_of[slot]), int(self._data.row_of[slot])
            try:
                spill = self._data.actions[kind].writer(row)(action)
            except LayoutMismatch as exc:
                space = self.facts[slot].action_space
                raise ActionError(
                    f"the action for slot {slot} does not fit {space}: {exc}"
                ) from exc
            if spill is not None:
                spills[position] = spill
        self._journal.sent(None if route.is_all else route.slots, list(actions))
        return spills or None

    def _post(self, route: _Route, op: Op, payload: Sequence[Any] | None) -> list[_Pending]:
        """Send one command to every worker that has a share in `route`; `payload` has one item a slot."""
        self._request += 1
        posted = []
        for part in route.parts:
            slots = None if part.is_whole else part.slots.tolist()
            share: Any = None
            if payload is not None:
                items = [payload[i] for i in np.arange(len(route.slots))[part.positions]]
                share = _by_slot(part.slots, items) if op is Op.STEP else items
            posted.append(self._post_part(Command(self._request, op, slots, share), part))
        if op in (Op.STEP, Op.RESET):
            self._in_flight[route.rows if route.is_all else route.slots] = True
            self._num_in_flight += len(route.slots)
        return posted

    def _post_part(self, command: Command, part: _Part) -> _Pending:
        pending = _Pending(command, part)
        self._outstanding[part.worker].append(pending)
        self._crew.handles[part.worker].post(command)
        return pending

    def _advance(self, timeout_s: float | None, *, want_all: bool) -> None:
        """Wait for news of the workers that owe something, take it in, and see to trouble."""
        handles = self._crew.handles
        busy = [handles[worker] for worker, owed in enumerate(self._outstanding) if owed]
        limit_s = self._check_s if timeout_s is None else min(self._check_s, timeout_s)
        self._crew.wait(busy, limit_s, want_all=want_all)
        is_quiet = True
        for handle in busy:
            for reply in handle.take():
                is_quiet = False
                self._complete(handle, reply)
            if handle.is_dead:
                is_quiet = False
                self._on_death(handle)
        if is_quiet:
            self._check_silences()
        elif self._silences:
            self._silences.clear()
        if self._errors:
            raise self._errors.pop(0)

    def _complete(self, handle: WorkerHandle, reply: Reply | None) -> None:
        pending = self._outstanding[handle.worker].popleft()
        pending.is_done, pending.reply = True, reply
        if pending.command.op not in (Op.STEP, Op.RESET):
            if reply is not None and pending.command.op in (Op.REBUILD, Op.QUEUE):
                self._on_failures(handle, pending, reply.failures)
            return
        part = pending.part
        if self._spills:
            for slot in part.slots.tolist():
                self._spills.pop(slot, None)
        if reply is not None:
            self._absorb(handle, reply)
            if reply.failures:
                remaining = self._on_failures(handle, pending, reply.failures)
                if remaining is None:
                    return
                part = remaining
                pending.part = part
        self._in_flight[part.rows if part.rows is not None else part.slots] = False
        self._num_in_flight -= len(part.slots)
        if pending.command.op is Op.RESET:
            self._began(part.slots.tolist(), pending.command.payload, pending.part)
        if pending.is_wanted:
            self._ready.append(pending)
            self._num_ready += len(part.slots)

    def _absorb(self, handle: WorkerHandle, reply: Reply) -> None:
        news = self._news
        news.infos.update(reply.infos)
        news.final_infos.update(reply.final_infos)
        news.final_spills.update(reply.final_spills)
        self._spills.update(reply.spills)
        if reply.schemas:
            self._schemas[handle.worker] += reply.schemas
            self._uniform.clear()

    # ---- collecting -----------------------------------------------------------------------------

    def _collect(self, ready: list[_Pending]) -> Batch:
        slots, rows = self._merge([pending.part for pending in ready])
        control = self._control
        terminated, truncated = control.terminated[rows].copy(), control.truncated[rows].copy()
        valid = control.valid[rows].copy()
        obs = self._read_obs(slots, rows)
        ended = terminated | truncated
        any_ended = bool(ended.any())
        plain: list[tuple[int, Info]] = []
        final_obs = obs
        if any_ended:
            if self.autoreset == "same_step":
                final_obs = self._take_finals(slots, obs, ended, plain)
                self._began_by_queue(slots[ended])
            elif self.autoreset == "disabled":
                self._mark_needing_reset(slots[ended])
        if self.autoreset == "next_step" and not valid.all():
            self._began_by_queue(slots[~valid & ~ended])
        incidents = self._take_news(slots, plain)
        return Batch(
            slots=slots,
            obs=obs,
            rewards=control.rewards[rows].copy(),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            final_obs=final_obs,
            incidents=incidents,
            packed=self._packed_infos(slots, rows),
            plain=plain,
        )

    def _merge(self, parts: list[_Part]) -> tuple[Slots, slice | Slots]:
        if len(parts) == 1:
            part = parts[0]
            return part.slots, part.rows if part.rows is not None else part.slots
        if not parts:
            return np.zeros(0, np.intp), slice(0, 0)
        slots = np.concatenate([part.slots for part in parts])
        slots.sort()
        if slots[-1] - slots[0] + 1 == len(slots):
            return slots, slice(int(slots[0]), int(slots[-1]) + 1)
        return slots, slots

    def _read_obs(self, slots: Slots, rows: slice | Slots) -> Any:
        if self._is_mixed:
            return tuple(self._read_one(slot, self._data.obs) for slot in slots.tolist())
        spills = None
        if self._spills:
            spills = {
                position: self._spills[slot]
                for position, slot in enumerate(slots.tolist())
                if slot in self._spills
            }
        return self._data.obs[0].read_batch(rows, spills, copy=self.copy)

    def _read_one(self, slot: int, columns: Sequence[Any]) -> Any:
        kind, row = int(self._data.kind_of[slot]), int(self._data.row_of[slot])
        spills = self._spills if columns is self._data.obs else self._news.final_spills
        return columns[kind].read(row, spills.get(slot))

    def _take_finals(
        self, slots: Slots, obs: Any, ended: npt.NDArray[np.bool_], plain: list[tuple[int, Info]]
    ) -> Any:
        """same_step: the last observations of ended episodes, for `final_obs` and for the infos."""
        finals = {}
        for position in np.flatnonzero(ended).tolist():
            slot = int(slots[position])
            finals[position] = self._read_one(slot, self._data.final_obs)
            final_info = self._news.final_infos.pop(slot, {})
            plain.append((position, {"final_obs": finals[position], "final_info": final_info}))
            self._news.final_spills.pop(slot, None)
        if self._is_mixed:
            return tuple(finals.get(position, value) for position, value in enumerate(obs))
        return _with_rows(self.facts[0].observation_space, obs, finals)

    def _take_news(self, slots: Slots, plain: list[tuple[int, Info]]) -> tuple[Incident, ...]:
        news = self._news
        if not news.infos and not news.incidents:
            return ()
        incidents = []
        for position, slot in enumerate(slots.tolist()):
            info = news.infos.pop(slot, None)
            if info is not None:
                plain.append((position, info))
            incident = news.incidents.pop(slot, None)
            if incident is not None:
                plain.append((position, {"incident": incident}))
                if incident not in incidents:
                    incidents.append(incident)
        return tuple(incidents)

    def _packed_infos(self, slots: Slots, rows: slice | Slots) -> PackedInfos:
        numbers = self._control.schemas[rows]
        if not numbers.any():
            return PackedInfos()
        numbers = numbers.copy()
        cells = self._control.infos[rows].copy()
        first = int(numbers[0])
        if first not in self._uniform:
            known = {
                (schemas[first - 1] if first <= len(schemas) else None) for schemas in self._schemas
            }
            self._uniform[first] = known.pop() if len(known) == 1 else None
        schema = self._uniform[first]
        if schema is not None and (numbers == first).all():
            return PackedInfos(((schema, np.arange(len(slots)), cells),))
        groups: dict[Schema, list[int]] = {}
        for position, (slot, number) in enumerate(
            zip(slots.tolist(), numbers.tolist(), strict=True)
        ):
            if number not in (NO_INFO, ON_CONTROL_PATH):
                schema = self._schemas[self._worker_of(slot)][number - 1]
                groups.setdefault(schema, []).append(position)
        return PackedInfos(
            tuple((schema, np.array(where), cells[where]) for schema, where in groups.items())
        )

    def _poison_rows(self, route: _Route) -> None:
        if not self._is_mixed:
            self._data.obs[0].poison(route.rows)

    # ---- resets ---------------------------------------------------------------------------------

    def reset(
        self, plans: Sequence[ResetPlan], slots: Sequence[int] | Slots | None = None
    ) -> Batch:
        """Reset these slots (None: all) by their plans and wait for their first observations.

        What these slots still have in flight is waited for and dropped, and so are results of theirs
        that nobody has received; plans queued for their autoresets stay.
        """
        self._check_open()
        route = self._route(slots)
        if len(plans) != len(route.slots):
            raise ConfigError(
                f"{len(route.slots)} slots need as many reset plans, got {len(plans)}"
            )
        self._check_blocked(route)
        self._give_up_on(set(route.slots.tolist()))
        others, self._ready = self._ready, []
        num_others, self._num_ready = self._num_ready, 0
        posted = self._post(route, Op.RESET, plans)
        try:
            while not all(pending.is_done for pending in posted):
                self._advance(None, want_all=True)
        finally:
            mine = [pending for pending in self._ready if pending.command.op is Op.RESET]
            rest = [pending for pending in self._ready if pending.command.op is not Op.RESET]
            self._ready = others + rest
            self._num_ready = num_others + sum(len(pending.part.slots) for pending in rest)
        return self._collect(mine)

    def queue_reset(self, plans: Sequence[ResetPlan], slots: Sequence[int] | None = None) -> None:
        """Use these plans at the next autoreset of these slots; several are used one after another."""
        self._check_open()
        if self.autoreset == "disabled":
            raise ConfigError(
                "with autoreset='disabled' there is no autoreset to queue for; use reset"
            )
        route = self._route(slots)
        if len(plans) != len(route.slots):
            raise ConfigError(
                f"{len(route.slots)} slots need as many reset plans, got {len(plans)}"
            )
        self._ask(route, Op.QUEUE, list(plans))
        for slot, plan in zip(route.slots.tolist(), plans, strict=True):
            self._queued.setdefault(slot, deque()).append(plan)

    def _began(self, slots: list[int], plans: Sequence[ResetPlan], part: _Part) -> None:
        by_slot = dict(zip(part.slots.tolist(), plans, strict=False))
        chosen = [by_slot.get(slot, PLAIN_RESET) for slot in slots]
        for slot, plan in zip(slots, chosen, strict=True):
            if plan.seed is not None:
                self._seeds[slot] = plan.seed
        self._journal.began(slots, chosen)
        self._num_needing_reset -= int(self._needs_reset[slots].sum())
        self._needs_reset[slots] = False

    def _began_by_queue(self, slots: Slots) -> None:
        plans = []
        for slot in slots.tolist():
            queue = self._queued.get(slot)
            plans.append(queue.popleft() if queue else PLAIN_RESET)
            if plans[-1].seed is not None:
                self._seeds[slot] = plans[-1].seed
        self._journal.began(slots.tolist(), plans)

    def _mark_needing_reset(self, slots: Slots | list[int]) -> None:
        self._num_needing_reset += int((~self._needs_reset[slots]).sum())
        self._needs_reset[slots] = True

    def _give_up_on(self, slots: set[int]) -> None:
        """Wait for what `slots` have in flight and drop it, with what they have not been asked for."""
        kept = []
        for pending in self._ready:
            if slots.isdisjoint(pending.part.slots.tolist()):
                kept.append(pending)
            else:
                self._num_ready -= len(pending.part.slots)
        self._ready = kept
        for owed in self._outstanding:
            for pending in owed:
                if not slots.isdisjoint(pending.part.slots.tolist()):
                    pending.is_wanted = False
        while self._in_flight[list(slots)].any():
            self._advance(None, want_all=True)
        for slot in slots:
            self._news.infos.pop(slot, None)
            self._news.final_infos.pop(slot, None)

    # ---- calls ----------------------------------------------------------------------------------

    def call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        slots: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call or read `name` on the environments of these slots."""
        route = self._route(slots)
        shared = (name, tuple(args), dict(kwargs or {}), None)
        values = self._ask_shared(route, shared)
        return [values[slot] for slot in route.slots.tolist()]

    def set_attr(
        self, name: str, values: Sequence[Any], slots: Sequence[int] | None = None
    ) -> None:
        """Set `name` on the environments of these slots, one value each."""
        route = self._route(slots)
        if len(values) != len(route.slots):
            raise ConfigError(f"{len(route.slots)} slots need as many values, got {len(values)}")
        for part in route.parts:
            share = [values[i] for i in np.arange(len(route.slots))[part.positions]]
            self._ask_shared(self._make_route(part.slots), (name, (), {}, share))

    def snapshot(self, slots: Sequence[int] | None = None) -> tuple[Snapshot, ...]:
        """The state of these slots, which must not be in flight."""
        route = self._route(slots)
        self._check_sendable(route)
        values = self._ask(route, Op.SNAPSHOT, None)
        taken = []
        for slot in route.slots.tolist():
            state, status, queued = values[slot]
            if state is None:
                log = self._journal.log_of(slot)
                rng = unpack_rng(self._control.rng[slot].tobytes())
                if not log.is_complete or (log.plan.seed is None and rng is None):
                    raise SnapshotError(
                        f"slot {slot} cannot be pickled and its episode cannot be replayed "
                        "(no seed, or too many actions); give the environment get_state and set_state"
                    )
                state = Replay(log.plan.seed, log.plan.options, rng, log.actions)
            obs = self._read_one(slot, self._data.obs)
            taken.append(Snapshot(state, obs, int(status), queued))
        return tuple(taken)

    def restore(self, snapshots: Sequence[Snapshot], slots: Sequence[int] | None = None) -> None:
        """Bring these slots to the states of `snapshots`."""
        self._check_open()
        route = self._route(slots)
        if len(snapshots) != len(route.slots):
            raise ConfigError(f"{len(route.slots)} slots need as many snapshots")
        self._check_blocked(route)
        self._give_up_on(set(route.slots.tolist()))
        states = [(snap.taken, snap.state, snap.queued, snap.obs) for snap in snapshots]
        replies = self._ask_replies(route, Op.RESTORE, states)
        for reply in replies:
            if reply is not None:
                self._spills.update(reply.spills)
        for slot, snap in zip(route.slots.tolist(), snapshots, strict=True):
            self._queued[slot] = deque(snap.queued)
            if isinstance(snap.taken, Replay):
                plan = ResetPlan(snap.taken.seed, snap.taken.options)
                self._journal.take_back(slot, plan, snap.taken.actions)
            else:
                self._journal.began([slot], [PLAIN_RESET])
                self._control.rng[slot, 0] = 0
            ended = snap.state == State.ENDED
            self._control.terminated[slot] = ended
            self._control.truncated[slot] = False
        self._num_needing_reset -= int(self._needs_reset[route.slots].sum())
        self._needs_reset[route.slots] = False

    def _ask(self, route: _Route, op: Op, payload: Sequence[Any] | None) -> dict[int, Any]:
        values: dict[int, Any] = {}
        for reply in self._ask_replies(route, op, payload):
            if reply is not None:
                values.update(reply.values)
        return values

    def _ask_replies(
        self, route: _Route, op: Op, payload: Sequence[Any] | None
    ) -> list[Reply | None]:
        """Send a command that is not a step, wait for the answers, raise what went wrong."""
        self._check_open()
        self._check_blocked(route)
        self._request += 1
        posted = []
        for part in route.parts:
            share = None
            if payload is not None:
                share = [payload[i] for i in np.arange(len(route.slots))[part.positions]]
            command = Command(self._request, op, part.slots.tolist(), share)
            posted.append(self._post_part(command, part))
        return self._finish(posted)

    def _ask_shared(self, route: _Route, payload: Any) -> dict[int, Any]:
        self._check_open()
        self._check_blocked(route)
        self._request += 1
        posted = [
            self._post_part(Command(self._request, Op.CALL, part.slots.tolist(), payload), part)
            for part in route.parts
        ]
        values: dict[int, Any] = {}
        for reply in self._finish(posted):
            if reply is not None:
                values.update(reply.values)
        return values

    def _finish(self, posted: list[_Pending]) -> list[Reply | None]:
        while not all(pending.is_done for pending in posted):
            self._advance(None, want_all=True)
        for pending in posted:
            if pending.reply is not None and pending.reply.failures:
                raise _env_failed(pending.reply.failures[0])
        return [pending.reply for pending in posted]

    # ---- trouble --------------------------------------------------------------------------------

    def _on_failures(
        self, handle: WorkerHandle, pending: _Pending, failures: list[Failure]
    ) -> _Part | None:
        """Environments raised. Returns the slots of `pending` that are done, None if there are none."""
        part = pending.part
        done = set(part.slots.tolist())
        for failure in failures:
            incident = self._incident(
                "exception", handle, (failure.slot,), failure.slot, failure.doing, failure.reason
            )
            if self.facts[failure.slot].native:
                self._lose(handle, incident, _env_failed(failure), [pending])
                return None
            verdict = self._judge(failure.slot, is_lost=False)
            done.discard(failure.slot)
            if verdict is Verdict.REBUILD:
                self._record(incident)
                self._rebuild(handle, failure.slot, pending)
                continue
            self._record(incident)
            was_in_flight = bool(self._in_flight[failure.slot])
            self._in_flight[failure.slot] = False
            self._num_in_flight -= was_in_flight
            self._mark_needing_reset([failure.slot])
            error: EnvfleetError = _env_failed(failure)
            if verdict is Verdict.QUARANTINE:
                error = self._quarantine(failure.slot, incident, error)
            if pending.is_wanted:
                self._errors.append(error)
        if pending.command.op not in (Op.STEP, Op.RESET) or not done:
            return None
        return self._make_route(np.array(sorted(done))).parts[0]

    def _rebuild(self, handle: WorkerHandle, slot: int, pending: _Pending) -> None:
        """Replace the environment of one slot and give it again what it was doing."""
        part = self._make_route(np.array([slot])).parts[0]
        self._num_restarts[slot] += 1
        plan = restart_plan(self._seeds[slot], self._num_restarts[slot])
        self._queued.setdefault(slot, deque()).appendleft(plan)
        self._request += 1
        order = [(plan, self._spills.get(slot))]
        self._post_part(Command(self._request, Op.REBUILD, [slot], order), part)
        payload = None
        if pending.command.op is Op.RESET:
            where = pending.part.slots.tolist().index(slot)
            payload = [pending.command.payload[where]]
        slots = None if part.is_whole else [slot]
        op = Op.RESET if pending.command.op is Op.RESET else Op.STEP
        again = self._post_part(Command(self._request, op, slots, payload), part)
        again.is_wanted = pending.is_wanted

    def _on_death(self, handle: WorkerHandle) -> None:
        """A worker is gone."""
        owed = list(self._outstanding[handle.worker])
        op, slot = read_place(self._control.posts[handle.worker][1])
        if slot is None:
            slot = int(owed[0].part.slots[0]) if owed else handle.first
        slots = tuple(range(handle.first, handle.first + handle.count))
        exit_code = handle.exit_code()
        stack = handle.stack()
        doing = op.phrase if op is not Op.IDLE or not owed else owed[0].command.op.phrase
        incident = self._incident(
            "death", handle, slots, slot, doing, describe_exit(exit_code), stack, exit_code
        )
        self._lose(
            handle, incident, WorkerDied(handle.worker, slots, exit_code, doing, stack), owed
        )

    def _lose(
        self, handle: WorkerHandle, incident: Incident, error: EnvfleetError, owed: list[_Pending]
    ) -> None:
        """A worker cannot go on: raise, or put another in its place and let its slots come back."""
        self._outstanding[handle.worker].clear()
        self._silences.pop(handle.worker, None)
        while True:
            verdict = self._judge(incident.slot, is_lost=True)
            self._record(incident, *incident.slots)
            if verdict in (Verdict.RAISE, Verdict.QUARANTINE):
                if verdict is Verdict.QUARANTINE:
                    error = self._quarantine(incident.slot, incident, error)
                self._abandon(handle, error)
                return
            try:
                handle = self._crew.replace(handle.worker, in_process=verdict is Verdict.FALL_BACK)
                break
            except EnvfleetError as exc:
                error = exc
                if verdict is Verdict.FALL_BACK:
                    self._abandon(handle, error)
                    return
        if verdict is Verdict.FALL_BACK:
            warnings.warn(
                f"slots {handle.first} to {handle.first + handle.count - 1} go on in this process: "
                f"{error}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._schemas[handle.worker] = []
        self._uniform.clear()
        self._bring_back(handle, owed)

    def _bring_back(self, handle: WorkerHandle, owed: list[_Pending]) -> None:
        """Tell a new worker where its slots stand, and give it again what its predecessor owed."""
        part = self._make_route(np.arange(handle.first, handle.first + handle.count)).parts[0]
        orders, queued = [], []
        control = self._control
        for slot in part.slots.tolist():
            self._num_restarts[slot] += 1
            plan = restart_plan(self._seeds[slot], self._num_restarts[slot])
            orders.append((plan, self._spills.get(slot)))
            queued += [(slot, later) for later in self._queued.get(slot, ())]
            self._queued.setdefault(slot, deque()).appendleft(plan)
            control.schemas[slot] = NO_INFO
        self._request += 1
        self._post_part(Command(self._request, Op.REBUILD, part.slots.tolist(), orders), part)
        for slot, later in queued:
            self._post_part(Command(self._request, Op.QUEUE, [slot], [later]), part)
        for pending in owed:
            pending.is_done = False
            self._outstanding[handle.worker].append(pending)
            handle.post(pending.command)

    def _abandon(self, handle: WorkerHandle, error: EnvfleetError) -> None:
        """Give up a worker's slots for good."""
        self._crew.dismiss(handle.worker)
        for slot in range(handle.first, handle.first + handle.count):
            self._num_in_flight -= bool(self._in_flight[slot])
            self._in_flight[slot] = False
            self._blocked[slot] = error
        self._errors.append(error)

    def _quarantine(self, slot: int, incident: Incident, error: EnvfleetError) -> EnvfleetError:
        failures = len(self._ledgers[slot].failures)
        quarantined = SlotQuarantined(slot, failures, self._restarts.window_s, str(incident))
        quarantined.__cause__ = error
        self._blocked[slot] = quarantined
        return quarantined

    def _judge(self, slot: int, *, is_lost: bool) -> Verdict:
        self._ledgers[slot], verdict = judge(
            self._ledgers[slot],
            time.monotonic(),
            self._on_failure,
            self._restarts,
            is_lost=is_lost,
        )
        return verdict

    def _check_silences(self) -> None:
        now_s = time.monotonic()
        for handle in list(self._crew.handles):
            owed = self._outstanding[handle.worker]
            if not owed:
                continue
            word = self._control.posts[handle.worker][1]
            known = self._silences.get(handle.worker)
            # seen for the first time: it may have stood there for as long as we have waited
            since_s = now_s - self._check_s
            request = owed[0].command.request
            silence = (known or Silence(request, word, since_s)).look(request, word, now_s)
            self._silences[handle.worker] = silence
            op, slot = read_place(word)
            slot = int(owed[0].part.slots[0]) if slot is None else slot
            limit_s, option = limit_for(op, self._deadlines)
            quiet_s = now_s - silence.since_s
            if limit_s is not None and quiet_s >= limit_s:
                self._on_silence(handle, op, slot, limit_s, option)
            elif limit_s is None and quiet_s >= self._deadlines.warn_s and not silence.is_warned:
                self._silences[handle.worker] = Silence(request, word, silence.since_s, True)
                warnings.warn(
                    f"everybody has waited {quiet_s:.0f} s for slot {slot} (worker {handle.worker}) in "
                    f"{op.phrase}; set {option} to end such waits. It stands at:\n{handle.stack()}",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _on_silence(
        self, handle: WorkerHandle, op: Op, slot: int, limit_s: float, option: str
    ) -> None:
        stack = handle.stack()
        owed = list(self._outstanding[handle.worker])
        slots = tuple(range(handle.first, handle.first + handle.count))
        reason = f"no answer for {limit_s:g} s"
        incident = self._incident("timeout", handle, slots, slot, op.phrase, reason, stack)
        error = DeadlineExceeded(slot, handle.worker, op.phrase, limit_s, option, stack)
        self._lose(handle, incident, error, owed)

    def _incident(
        self,
        kind: Any,
        handle: WorkerHandle,
        slots: tuple[int, ...],
        slot: int,
        doing: str,
        reason: str,
        text: str = "",
        exit_code: int | None = None,
    ) -> Incident:
        log = self._journal.log_of(slot)
        rng = unpack_rng(self._control.rng[slot].tobytes())
        try:
            env_fn = cloudpickle.dumps(self._crew.env_fns[slot])
        except Exception:  # it lives in this process or was forked: it need not be picklable
            env_fn = None
        return Incident(
            kind=kind,
            slot=slot,
            slots=slots,
            worker=handle.worker,
            doing=doing,
            reason=reason,
            traceback=text,
            exitcode=exit_code,
            seed=log.plan.seed,
            options=log.plan.options,
            actions=log.actions,
            rng=rng if log.plan.seed is None else None,
            is_complete=log.is_complete,
            env_fn=env_fn,
        )

    def _record(self, incident: Incident, *slots: int) -> None:
        self.incidents.append(incident)
        for slot in slots or (incident.slot,):
            self._news.incidents[slot] = incident

    # ---- slots ----------------------------------------------------------------------------------

    def _worker_of(self, slot: int) -> int:
        for worker, (lo, hi) in enumerate(self._crew.bounds):
            if lo <= slot < hi:
                return worker
        raise ConfigError(f"there is no slot {slot}; slots are 0 to {self.num_slots - 1}")

    def _route(self, slots: Sequence[int] | Slots | None) -> _Route:
        if slots is None:
            return self._everything
        chosen = np.asarray(slots)
        key = chosen.tobytes()
        route = self._routes.get(key)
        if route is None or route.slots.shape != chosen.shape:
            route = self._make_route(self._checked(chosen))
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            self._routes[key] = route
        return route

    def _checked(self, slots: npt.NDArray[Any]) -> Slots:
        if slots.ndim != 1 or not slots.size or slots.dtype.kind not in "iu":
            raise ConfigError(f"slots must be a non-empty list of slot numbers, got {slots!r}")
        if slots.min() < 0 or slots.max() >= self.num_slots:
            raise ConfigError(
                f"slots must lie between 0 and {self.num_slots - 1}, got {slots.tolist()}"
            )
        if len(np.unique(slots)) != len(slots):
            raise ConfigError(f"a slot may be named only once, got {slots.tolist()}")
        return slots.astype(np.intp)

    def _make_route(self, slots: Slots) -> _Route:
        slots = slots.copy()
        is_run = len(slots) == 1 or bool((np.diff(slots) == 1).all())
        rows: slice | Slots = slice(int(slots[0]), int(slots[-1]) + 1) if is_run else slots
        parts = []
        for worker, (lo, hi) in enumerate(self._crew.bounds):
            where = np.flatnonzero((slots >= lo) & (slots < hi))
            if not where.size:
                continue
            mine = slots[where]
            run = len(mine) == 1 or bool((np.diff(mine) == 1).all())
            neighbours = slice(int(mine[0]), int(mine[-1]) + 1) if run else None
            positions: slice | Slots = where
            if len(where) == 1 or (np.diff(where) == 1).all():
                positions = slice(int(where[0]), int(where[-1]) + 1)
            is_whole = run and len(mine) == hi - lo
            parts.append(_Part(worker, mine, neighbours, is_whole, positions))
        is_all = is_run and len(slots) == self.num_slots
        return _Route(slots, rows, is_all, tuple(parts))

    def _check_open(self) -> None:
        if self.is_closed:
            raise FleetClosed("this fleet is closed; open a new one")

    def _check_blocked(self, route: _Route) -> None:
        if self._blocked:
            for slot in route.slots.tolist():
                if slot in self._blocked:
                    raise self._blocked[slot]

    def _check_sendable(self, route: _Route) -> None:
        self._check_open()
        self._check_blocked(route)
        if self._num_in_flight or self._num_ready:
            busy = route.slots[self._in_flight[route.slots]].tolist()
            if self._num_ready:
                waiting = {s for pending in self._ready for s in pending.part.slots.tolist()}
                busy += [slot for slot in route.slots.tolist() if slot in waiting]
            if busy:
                raise StillInFlight(
                    f"slots {busy} have been sent and not yet received; call recv before sending again"
                )
        if self._num_needing_reset:
            idle = route.slots[self._needs_reset[route.slots]].tolist()
            if idle:
                raise ResetNeeded(
                    f"slots {idle} have no running episode; call reset before stepping them"
                )

    def close(self) -> None:
        """Close environments, end workers, give everything back. Idempotent and bounded in time."""
        if self.is_closed:
            return
        self._finalizer.detach()
        owed = [len(outstanding) for outstanding in self._outstanding]
        for failure in self._crew.close(owed):
            warnings.warn(
                f"the environment of slot {failure.slot} raised while closing: {failure.reason}",
                RuntimeWarning,
                stacklevel=2,
            )


def _env_failed(failure: Failure) -> EnvFailed:
    error = EnvFailed(failure.slot, failure.doing, failure.reason)
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error


def _by_slot(slots: Slots, spills: Sequence[Any]) -> dict[int, Any] | None:
    chosen = {
        slot: spill for slot, spill in zip(slots.tolist(), spills, strict=True) if spill is not None
    }
    return chosen or None


def _with_rows(space: Any, batch: Any, rows: dict[int, Any]) -> Any:
    """A copy of a batched observation of `space` with some rows replaced."""
    if isinstance(batch, np.ndarray):
        changed = batch.copy()
        for position, value in rows.items():
            changed[position] = value
        return changed
    if isinstance(space, spaces.Dict):
        return {
            key: _with_rows(part, batch[key], {i: value[key] for i, value in rows.items()})
            for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(
            _with_rows(part, batch[index], {i: value[index] for i, value in rows.items()})
            for index, part in enumerate(space.spaces)
        )
    return tuple(rows.get(position, value) for position, value in enumerate(batch))
