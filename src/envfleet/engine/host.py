"""Scalar environments in one place: step, reset, autoreset, snapshots.

A host writes the rows of its own slots and nothing else. It never raises because of an environment:
a failure is part of the reply, and the failed slot waits for a reset or a rebuild. Autoreset is
Gymnasium's. In `next_step` the call after an end resets and ignores its action. In `same_step` the
end and the reset happen in one call, and the last observation is kept in a row of its own.
`disabled` leaves resets to the caller.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from envfleet.engine import rng
from envfleet.engine import snapshot as snapshots
from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.host_rows import HostRows, one_number
from envfleet.engine.infos import Info, SchemaRegistry
from envfleet.engine.interrupts import is_from_handler
from envfleet.engine.memory import Control, Data
from envfleet.engine.messages import EnvFacts, EnvFailure, Op, Reply, read_reset, status_word
from envfleet.engine.options import PLAIN_RESET, Autoreset, EnvFn, ResetPlan
from envfleet.engine.pickle_trial import survives_pickling
from envfleet.engine.rows import AUTORESETS, EnvRow, HostState, step_rows


def _directly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@dataclass(frozen=True, slots=True)
class Guard:
    """How a backend calls methods of environments, and which exceptions are not theirs."""

    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = _directly
    """Applied to a method before it is called."""
    passes: tuple[type[BaseException], ...] = ()
    """Not raised by an environment: Ctrl-C in this thread, the end of a worker. All other
    exceptions are failures of the environment that was called."""
    has_handlers: bool = False
    """Handlers of signals run in this thread, and what they raise is not the environment's."""

    def let_pass(self, exc: BaseException) -> None:
        """Raise `exc` again if no environment raised it."""
        if isinstance(exc, self.passes) or (self.has_handlers and is_from_handler(exc)):
            raise exc

    def around(self, env: Any) -> Any:
        """An object whose `step` and `reset` call those of `env`, guarded."""
        return env if self.wrap is _directly else _Guarded(env, self.wrap)


class _Guarded:
    """An environment whose `step` and `reset` run under a guard."""

    def __init__(self, env: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.step = wrap(lambda action: env.step(action))
        self.reset = wrap(lambda **arguments: env.reset(**arguments))


ReturnOrder = snapshots.Snapshot | tuple[ResetPlan, Any, bool]
"""How a slot whose environment is gone goes on; see `EnvHost.resume`."""


class SlotState(IntEnum):
    """What a step means for a slot."""

    RUNNING = 0
    ENDED = 1
    """next_step: the episode is over and the next step resets."""
    OWES_TRUNCATION = 2
    """The environment was rebuilt; the next step reports the lost episode as truncated."""
    UNUSABLE = 3
    """It raised, or was never reset."""


class EnvHost(HostRows):
    """Scalar environments of the slots `first .. first + len(env_fns) - 1`."""

    def __init__(
        self,
        first: int,
        envs: Sequence[Any],
        env_fns: Sequence[EnvFn],
        autoreset: Autoreset,
        guard: Guard,
        schemas: SchemaRegistry,
    ) -> None:
        """`schemas` belongs to the worker: its hosts number their schemas together."""
        super().__init__(first, len(envs), schemas)
        self._fns, self._autoreset, self._guard = list(env_fns), autoreset, guard
        self._envs = list(envs)
        self._state = bytearray([SlotState.UNUSABLE] * self.count)
        self._queues: dict[int, deque[ResetPlan]] = {}
        """Plans for the next autoresets of rows, where there are any."""
        self._restart_plans: dict[int, ResetPlan] = {}
        """How slots whose environment was replaced begin again, unless their caller resets them."""
        self._is_trusted: dict[tuple[Any, ...], bool] = {}
        """Whether pickles of these kinds of environments, wrappers first, will do."""
        self._ends: list[tuple[int, bool, bool]] = []
        """Ends in the step under way: row, terminated, truncated."""
        self._invalid: list[int] = []
        """Rows of the step under way that are not transitions."""
        self._ended: list[int] = []
        """Rows whose episodes ended in the last step."""
        self._starts = np.zeros((self.count, rng.CELL_BYTES), np.uint8)
        """Generator states that the next episodes of `_ready` rows start from."""
        self._start_of = list(self._starts)
        self._has_plan = bytearray(self.count)
        """Rows with a queue or a restart plan, as the step under way began."""
        self._ready = bytearray(self.count)
        """Rows that have ended and will be reset plainly, if no other command comes before."""
        self._after_end = SlotState.ENDED if autoreset == "next_step" else SlotState.RUNNING

    def facts(self) -> list[EnvFacts]:
        """Spaces, metadata and spec of each slot's environment."""
        return [
            EnvFacts(
                env.observation_space,
                env.action_space,
                dict(env.metadata or {}),
                getattr(env, "render_mode", None),
                getattr(env, "spec", None),
                native=False,
            )
            for env in self._envs
        ]

    def bind(self, control: Control, data: Data, status: memoryview) -> None:
        """Take the shared rows of this host's slots."""
        self.bind_rows(control, data)
        self._status = status
        mine = slice(self.first, self.first + self.count)
        self._rng = list(control.rng[mine])
        self._env_rows = [
            EnvRow(
                row,
                status_word(Op.STEP, self.first + row),
                status_word(Op.RESET, self.first + row),
                self._guard.around(env),
                data.obs[group].array_of(index),
                data.final_obs[group].array_of(index),
                self._rng[row],
            )
            for row, (env, (group, index)) in enumerate(zip(self._envs, self._where, strict=True))
        ]
        self._host_state = HostState(
            AUTORESETS.index(self._autoreset),
            self._state,
            self._has_info,
            self._ready,
            self._has_plan,
            self._starts,
            np.frombuffer(status, np.uint64),
            self._rewards,
            self._invalid,
            self._ends,
            self._schemas.form,
            control.infos[mine],
            control.schemas[mine],
            control.final_infos[mine],
            control.final_schemas[mine],
        )

    # ---- commands -------------------------------------------------------------------------------

    def step(self, slots: Sequence[int] | None, spills: dict[int, Any] | None) -> Reply | None:
        """Step these slots (None: all) with the actions in their rows."""
        rows = range(self.count) if slots is None else [slot - self.first for slot in slots]
        self._ends.clear()
        self._invalid.clear()
        if self._queues or self._restart_plans or 1 in self._has_plan:
            self._has_plan[:] = self._all_clear
            for row in (*self._queues, *self._restart_plans):
                self._has_plan[row] = 1
        env_rows = self._env_rows if slots is None else [self._env_rows[row] for row in rows]
        step_rows(
            self._host_state,
            env_rows,
            self._actions(slots, spills),
            self._take,
            self._take_reset,
            self._step_unusual,
            self._fail,
            self._keep_start,
        )
        self._mark(rows, self._ends, self._invalid)
        self._ended = [row for row, *_ in self._ends]
        return self._take_reply()

    def idle(self) -> None:
        """The parent waits for nothing: look up now what the next autoresets need."""
        for row in self._ended:
            has_plan = row in self._queues or row in self._restart_plans
            if not has_plan and self._state[row] == SlotState.ENDED:
                try:
                    rng.keep(self._envs[row], self._start_of[row])
                except Exception:  # the reset will raise it again, and report it
                    continue
                self._ready[row] = 1
        self._ended = []

    def reset(self, slots: Sequence[int] | None, plans: Sequence[ResetPlan]) -> Reply | None:
        """Reset these slots by their plans; a manual reset cancels a pending autoreset."""
        rows = range(self.count) if slots is None else [slot - self.first for slot in slots]
        for row, plan in zip(rows, plans, strict=True):
            # a new environment has a random generator state: without a seed it would not repeat
            self._try_reset(row, plan.seeded_like(self._restart_plans.get(row)))
            self._rewards[row] = 0.0
        self._mark(rows, [], rows)
        return self._take_reply()

    def queue(self, slots: Sequence[int], plans: Sequence[ResetPlan | None]) -> Reply | None:
        """Keep a plan for each slot's next autoreset that has none yet, in order.

        None takes back the plan that came last.
        """
        for slot, plan in zip(slots, plans, strict=True):
            if plan is None:  # the last one is taken back
                row = slot - self.first
                self._set_queue(row, tuple(self._queues[row])[:-1])
                continue
            self._queues.setdefault(slot - self.first, deque()).append(plan.detached())
            self._ready[slot - self.first] = 0
        return None

    def rebuild(self, slots: Sequence[int], orders: Sequence[ReturnOrder]) -> Reply | None:
        """Replace environments by new ones, and go on as `resume` says."""
        for slot, order in zip(slots, orders, strict=True):
            self._status[1] = status_word(Op.REBUILD, slot)
            try:
                self._replace(slot - self.first)
            except BaseException as exc:
                self._fail(slot - self.first, "the constructor", exc)
            else:
                self._come_back(slot - self.first, order)
        return self._take_reply()

    def resume(self, slots: Sequence[int], orders: Sequence[ReturnOrder]) -> Reply | None:
        """Take the place of environments that are gone.

        By a snapshot the new environment is driven to where the lost one stood. Otherwise the slot
        owes a truncated row, and an order is (how to reset next, what the last observation
        spilled, whether the episode had ended already, so that nothing is owed).
        """
        for slot, order in zip(slots, orders, strict=True):
            self._come_back(slot - self.first, order)
        return self._take_reply()

    def _come_back(self, row: int, order: ReturnOrder) -> None:
        self._ready[row] = 0
        if isinstance(order, snapshots.Snapshot):
            self._set_queue(row, order.queued)  # these hold whether or not it comes back
            self._return_to(row, order, Op.RESUME.phrase)
            return
        plan, spill, has_ended = order
        self._restart_plans[row] = plan
        self._state[row] = SlotState.ENDED if has_ended else SlotState.OWES_TRUNCATION
        if spill is None:
            self._last_spill.pop(row, None)
        else:
            self._last_spill[row] = spill

    def call(self, slots: Sequence[int], name: str, args: Any, kwargs: Any) -> Reply | None:
        """Call `name` on each environment, through its wrappers; what is no function is read."""

        def called(env: Any) -> Any:
            attribute = env.get_wrapper_attr(name)
            if not callable(attribute):
                return attribute
            mine, named = detached_copy((args, kwargs)) if args or kwargs else (args, kwargs)
            return self._guard.wrap(attribute)(*mine, **named)

        return self._ask_each(slots, Op.CALL, f"call of {name!r}", called)

    def get(self, slots: Sequence[int], name: str) -> Reply | None:
        """Read `name` from each environment, through its wrappers."""
        doing = f"get of {name!r}"
        return self._ask_each(slots, Op.GET, doing, lambda env: env.get_wrapper_attr(name))

    def apply(self, slots: Sequence[int], function: Callable[[Any], Any]) -> Reply | None:
        """Call `function` with each environment."""
        return self._ask_each(slots, Op.APPLY, "apply", self._guard.wrap(function))

    def _ask_each(
        self, slots: Sequence[int], op: Op, doing: str, ask: Callable[[Any], Any]
    ) -> Reply | None:
        self._ready[:] = bytes(self.count)
        for slot in slots:
            self._status[1] = status_word(op, slot)
            try:
                self._reply.values[slot] = ask(self._envs[slot - self.first])
            except BaseException as exc:
                self._note(slot, doing, exc)
        return self._take_reply()

    def set_attr(self, slots: Sequence[int], pairs: Sequence[tuple[str, Any]]) -> Reply | None:
        """Set a name where it is found among the wrappers."""
        self._ready[:] = bytes(self.count)
        for slot, (name, value) in zip(slots, pairs, strict=True):
            self._status[1] = status_word(Op.SET, slot)
            try:
                self._envs[slot - self.first].set_wrapper_attr(name, detached_copy(value))
            except BaseException as exc:
                self._note(slot, f"set_attr of {name!r}", exc)
        return self._take_reply()

    def snapshot(self, slots: Sequence[int]) -> Reply | None:
        """Take each environment's state, by the best way it offers."""
        for slot in slots:
            row = slot - self.first
            self._status[1] = status_word(Op.SNAPSHOT, slot)
            try:
                taken = snapshots.take(self._envs[row])
            except BaseException as exc:
                self._note(slot, "snapshot", exc)
            else:
                if isinstance(taken, snapshots.Pickled) and not self._trusts(row, taken.blob):
                    taken = None
                queued = tuple(self._queues.get(row, ()))
                self._reply.values[slot] = (taken, SlotState(self._state[row]), queued)
        return self._take_reply()

    def _trusts(self, row: int, blob: bytes) -> bool:
        """Whether a pickle will do; each kind is tried once in an episode and once after one."""
        env, is_running = self._envs[row], self._state[row] == SlotState.RUNNING
        kind = is_running, *map(type, snapshots.layers_of(env))
        if kind not in self._is_trusted:
            is_trusted = survives_pickling(env, blob, is_running=is_running) is not False
            self._is_trusted[kind] = is_trusted
        return self._is_trusted[kind]

    def rehearse(self, slots: Sequence[int], states: Sequence[snapshots.Snapshot]) -> Reply | None:
        """Say for each slot whether a replay leads another environment to where it stands."""
        for slot, wanted in zip(slots, states, strict=True):
            self._status[1] = status_word(Op.REHEARSE, slot)
            is_first = slot == slots[0]
            self._reply.values[slot] = self._repeats(slot - self.first, wanted, is_first)
        return self._take_reply()

    def _repeats(self, row: int, wanted: snapshots.Snapshot, goes_on: bool) -> bool | None:
        """None if there cannot be a second environment here.

        With `goes_on` the next episode has to begin as it does in a third one.
        """
        assert isinstance(wanted.taken, snapshots.Replay)
        try:
            env = self._guard.wrap(self._fns[row])()
        except BaseException as exc:
            self._guard.let_pass(exc)
            return None
        try:
            env, obs = snapshots.drive(env, wanted.taken, self._guard.wrap, self._at_step(row))
            if obs is snapshots.UNSEEN:
                return True
            if not snapshots.are_alike(self._written(row, obs), wanted.obs):
                return False
            return not goes_on or self._begins_next_alike(row, env, wanted.taken)
        except BaseException as exc:
            self._guard.let_pass(exc)
            return False
        finally:
            self._write_obs[row](wanted.obs)
            with contextlib.suppress(Exception):
                self._guard.wrap(env.close)()

    def _begins_next_alike(self, row: int, env: Any, replay: snapshots.Replay) -> bool:
        """Whether the episode after the replayed one is the same elsewhere; True if unknown."""
        others = []
        try:
            others.append(self._guard.wrap(self._fns[row])())
            other, _ = snapshots.drive(others[0], replay, self._guard.wrap, self._at_step(row))
            first, second = (
                detached_copy(self._guard.wrap(one.reset)()[0]) for one in (env, other)
            )
            return snapshots.are_alike(first, second)
        except BaseException as exc:
            self._guard.let_pass(exc)
            return True
        finally:
            for other in others:
                with contextlib.suppress(Exception):
                    self._guard.wrap(other.close)()

    def restore(self, slots: Sequence[int], states: Sequence[snapshots.Snapshot]) -> Reply | None:
        """Put states back; for a replay the environment is built anew and driven there."""
        self._ready[:] = bytes(self.count)
        for slot, wanted in zip(slots, states, strict=True):
            row = slot - self.first
            self._status[1] = status_word(Op.RESTORE, slot)
            if isinstance(wanted.taken, snapshots.Replay):
                try:
                    self._replace(row)
                except BaseException as exc:
                    self._fail(row, "restore", exc)
                    continue
            self._return_to(row, wanted, "restore")
        return self._take_reply()

    def _return_to(self, row: int, wanted: snapshots.Snapshot, doing: str) -> None:
        """Bring the environment of a row to a state; a new one, if that is a replay."""
        taken, spill = wanted.taken, None
        try:
            if isinstance(taken, snapshots.Replay):
                self._drive(row, taken, wanted)
            elif taken is not None:
                self._adopt(row, snapshots.put_back(self._envs[row], taken))
            if taken is not None:
                spill = self._write_obs[row](wanted.obs)
        except BaseException as exc:
            self._fail(row, doing, exc)
            return
        if spill is not None:
            self._spill(row, spill)
        self._state[row] = wanted.state
        self._restart_plans.pop(row, None)
        if wanted.lineage.pending is not None:
            self._restart_plans[row] = wanted.lineage.pending
        self._set_queue(row, wanted.queued)

    def _drive(self, row: int, replay: snapshots.Replay, wanted: snapshots.Snapshot) -> None:
        """Replay an episode in a new environment; it must end where the old one was."""
        self._status[1] = status_word(Op.RESET, self.first + row)
        at_step = self._at_step(row)
        env, obs = snapshots.drive(self._envs[row], replay, self._guard.wrap, at_step)
        if env is not self._envs[row]:
            self._adopt(row, env)
        if obs is not snapshots.UNSEEN:
            self._check_replay(row, obs, wanted)

    def _at_step(self, row: int) -> Callable[[int], None]:
        """Says which action of a replay is next."""

        def say(number: int) -> None:
            self._status[1] = status_word(Op.STEP, self.first + row, number)

        return say

    def close(self) -> Reply | None:
        """Close every environment; one that fails to does not keep the others open."""
        for row, env in enumerate(self._envs):
            self._status[1] = status_word(Op.CLOSE, self.first + row)
            try:
                self._guard.wrap(env.close)()
            except BaseException as exc:
                self._note(self.first + row, "close", exc)
        return self._take_reply()

    # ---- parts of a step ------------------------------------------------------------------------

    def _take(self, row: int, result: Any) -> None:
        """Store what a step returned."""
        obs, reward, is_terminated, is_truncated, info = result
        try:
            self._reward_of[row] = reward
        except Exception:  # None, arrays of one, whole numbers beyond all floats
            self._reward_of[row], info = one_number(reward, info, self._envs[row])
        spill = self._write_obs[row](obs)
        if spill is not None:
            self._spill(row, spill)
        if is_terminated or is_truncated:
            self._ends.append((row, bool(is_terminated), bool(is_truncated)))
            self._end(row, obs, info)
        elif info or self._has_info[row]:
            self._inform(row, info)

    def _step_unusual(self, row: int) -> None:
        """Step a slot that is not simply running."""
        self._rewards[row] = 0.0
        self._invalid.append(row)
        state = self._state[row]
        if state == SlotState.ENDED:
            self._try_reset(row, self._next_plan(row))
        elif state == SlotState.OWES_TRUNCATION:
            self._ends.append((row, False, True))
            if row in self._last_spill:
                self._reply.spills[self.first + row] = self._last_spill[row]
            self._end(row, self._last_obs(row) if self._autoreset == "same_step" else None, {})
        else:
            self._fail(row, "step", RuntimeError("the slot was stepped before it was reset"))

    def _end(self, row: int, obs: Any, info: Info) -> None:
        """An episode is over: in `same_step` keep what it ended with, and reset."""
        if self._autoreset == "same_step":
            self._put_final(row, obs, info)
            self._try_reset(row, self._next_plan(row))
        else:
            self._state[row] = self._after_end
            self._inform(row, info)

    def _try_reset(self, row: int, plan: ResetPlan) -> None:
        slot = self.first + row
        self._status[1] = status_word(Op.RESET, slot)
        env = self._envs[row]
        try:
            if plan.seed is None:
                self._keep_start(row)
            else:
                self._rng[row].data[:] = rng.SEED_SAYS_ALL
            self._ready[row] = 0
            self._take_reset(row, plan.apply(self._guard.wrap(env.reset)))
        except BaseException as exc:
            self._fail(row, "reset", exc)
            return
        self._restart_plans.pop(row, None)

    def _take_reset(self, row: int, result: Any) -> None:
        """Store what a reset returned; the slot is running then."""
        obs, info = read_reset(result)
        spill = self._write_obs[row](obs)
        self._inform(row, info)
        self._state[row] = SlotState.RUNNING
        if spill is not None:
            self._spill(row, spill)

    def _set_queue(self, row: int, plans: Sequence[ResetPlan]) -> None:
        self._queues.pop(row, None)
        if plans:
            self._queues[row] = deque(plans)

    def _next_plan(self, row: int) -> ResetPlan:
        if row in self._restart_plans:
            return self._restart_plans[row]
        queue = self._queues.get(row)
        plan = queue.popleft() if queue else PLAIN_RESET
        if not queue:
            self._queues.pop(row, None)
        return plan

    def _keep_start(self, row: int) -> None:
        """Keep the generator state of the coming episode in memory that outlives this process."""
        if self._autoreset == "same_step":
            self._marks[1][row] = 1  # as in `_put_final`, which C does itself
        if self._ready[row]:
            self._rng[row][:] = self._start_of[row]
        else:
            rng.keep(self._envs[row], self._rng[row])

    def _check_replay(self, row: int, obs: Any, wanted: snapshots.Snapshot) -> None:
        """Refuse an environment that is not where it was, unless it is to be reset in any case."""
        found = self._written(row, obs)
        if wanted.lineage.pending is None and not snapshots.are_alike(found, wanted.obs):
            raise snapshots.does_not_repeat(self.first + row)

    def _fail(self, row: int, doing: str, exc: BaseException) -> None:
        self._note(self.first + row, doing, exc)
        self._state[row] = SlotState.UNUSABLE
        self._rewards[row] = 0.0
        self._inform(row, {})

    def _note(self, slot: int, doing: str, exc: BaseException) -> None:
        self._guard.let_pass(exc)
        self._reply.failures.append(EnvFailure.of(slot, doing, exc))

    def _replace(self, row: int) -> None:
        old = self._envs[row]
        try:
            self._guard.wrap(old.close)()
        except BaseException as exc:  # it is being replaced because it is broken
            self._guard.let_pass(exc)
        self._adopt(row, self._guard.wrap(self._fns[row])())

    def _adopt(self, row: int, env: Any) -> None:
        self._envs[row] = env
        self._ready[row] = 0
        self._env_rows[row] = self._env_rows[row]._replace(env=self._guard.around(env))
