"""Environments that live in the slots of a fleet.

A lost environment is rebuilt, brought back by its seed and the actions of its episode so far, and
asked again, so its reply is the one that was lost.

Law: every request gets a reply: what the environment did, or an `EnvFailure` once the environment
has cost more workers than its budget allows. If those workers were killed, and the environment
survives the same request in a worker of its own, it moves to this process instead and stays there
until the next reset (`losses.py`).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet.engine import Batch, Deadlines, Fleet, Incident, ResetPlan
from envfleet.engine.options import RestartPolicy, StartMethod
from envfleet.engine.plan import choose_start_method
from envfleet.errors import EnvfleetError
from envfleet.llm.local import close_env
from envfleet.llm.losses import Losses
from envfleet.llm.turns import (
    ENV_ERRORS,
    EnvFailure,
    EpisodePlayer,
    EpisodeSoFar,
    TurnReply,
    TurnRequest,
    execute,
)

FLEET_ERRORS = (EnvfleetError, OSError)
"""What a fleet raises when it gives up slots, or when no process can be started."""
MAX_SLOT_INCIDENTS = 50
"""After this many failures of one slot the fleet is replaced at the next reset."""
_GRACE_S = 0.3
"""How long a reset waits for the replies to a call that was interrupted."""


class AnyPicklable(spaces.Space[Any]):
    """Any value that can be pickled; it is sent in a message, not through shared memory."""

    def __init__(self) -> None:
        super().__init__(None, None)

    @property
    def is_np_flattenable(self) -> bool:
        """It may have any size."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> Any:
        """Nothing."""
        return None

    def contains(self, x: Any) -> bool:
        """Everything is in it."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyPicklable)

    def __hash__(self) -> int:
        return hash(AnyPicklable)


class JobEnv(gymnasium.Env[Any, Any]):
    """An environment in a slot whose steps are independent jobs; it has no episodes."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own form)
    observation_space, action_space = AnyPicklable(), AnyPicklable()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Do nothing."""
        return None, {}


class EnvInSlot(JobEnv):
    """A text environment in a slot: a step carries out a `TurnRequest`."""

    def __init__(self, make: Callable[[], Any], *, is_late: bool = False) -> None:
        """Build the environment; one that replaces a lost one waits for `build`."""
        self._make = make
        self._player = None if is_late else EpisodePlayer(make())
        self._problem = ""

    def build(self) -> None:
        """Build the environment, unless it is there."""
        if self._player is None:
            try:
                self._player = EpisodePlayer(self._make())
            except ENV_ERRORS as exc:
                self._problem = EnvFailure.of("the constructor", exc).error

    def step(self, action: TurnRequest) -> tuple[TurnReply, float, bool, bool, dict[str, Any]]:
        """Carry out a request."""
        if self._player is None:
            self.build()
        if self._player is None:
            return _not_built(action, self._problem), 0.0, False, False, {}
        return execute(self._player, action), 0.0, False, False, {}

    def close(self) -> None:
        """Close the environment."""
        if self._player is not None:
            close_env(self._player.env)


@dataclass(slots=True)
class _StartPhase:
    """Whether the workers start for the first time; every worker gets it when it starts."""

    is_first: bool = True


class _SlotEnvFn:
    """Makes the environment of a slot.

    A constructor that fails may stop its worker only at the first start, when no episode is under
    way. Later the worker must start all the same, because it hosts other environments too.
    """

    def __init__(self, make: Callable[[], Any], phase: _StartPhase) -> None:
        self._make, self._phase = make, phase
        self._has_made = False

    def __call__(self) -> EnvInSlot:
        is_late = self._has_made or not self._phase.is_first
        self._has_made = True
        return EnvInSlot(self._make, is_late=is_late)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How the workers are started that environments live in."""

    backend: Literal["thread", "process"]
    max_workers: int
    start_method: StartMethod | None
    step_timeout_s: float | None

    def open(self, env_fns: Sequence[Callable[[], Any]], max_restarts: int) -> Fleet:
        """Open a fleet."""
        return open_fleet(
            env_fns,
            min(self.max_workers, len(env_fns)),
            self.start_method,
            backend=self.backend,
            step_timeout_s=self.step_timeout_s,
            max_restarts=max_restarts,
        )


class RemoteEnvs:
    """Environments in the slots of a fleet.

    A lost environment is rebuilt and its episode is replayed turn by turn, each turn with the same
    deadline as before; then it is asked again. An environment whose workers were killed too often
    is tried in a worker of its own. If that worker dies too, the environment has failed; if not,
    the environment may move to this process.
    """

    def __init__(
        self,
        env_fns: Mapping[int, Callable[[], Any]],
        options: FleetOptions,
        max_restarts: int,
        tried: Losses | None = None,
    ) -> None:
        """Build the environment of every id.

        Args:
            env_fns: The constructor of each environment, by id.
            options: How the workers are started.
            max_restarts: How many workers each environment may cost in one episode.
            tried: The losses so far of one environment that is tried in a worker of its own.
        """
        self._env_fns, self._options, self._max_restarts = dict(env_fns), options, max_restarts
        self._slots = {env_id: slot for slot, env_id in enumerate(env_fns)}
        self._ids = list(env_fns)
        self._is_trial = tried is not None
        self._losses = Losses(max_restarts) if tried is None else tried
        self._phase = _StartPhase()
        self._trial: RemoteEnvs | None = None
        self.fleet = self._open()
        self._phase.is_first = False
        self._requests: dict[int, TurnRequest] = {}
        self._parts: dict[int, deque[TurnRequest]] = {}
        """What is left of requests that are sent in parts."""
        self._pending: set[int] = set()
        """Environments that were sent a request and have not replied."""
        self._unbuilt: set[int] = set()
        """Environments that have a new worker and are not built yet."""
        self._num_seen = 0
        """How many of the fleet's incidents have been handled."""

    @property
    def ids(self) -> list[int]:
        """The environments that live here."""
        return list(self._slots)

    @property
    def fleets(self) -> list[Fleet]:
        """The fleet, and that of an environment which is tried alone."""
        return [self.fleet] if self._trial is None else [self.fleet, self._trial.fleet]

    def refresh(self) -> None:
        """Get ready for new episodes."""
        self._losses.begin_episodes()
        self._end_stuck()
        if self.fleet.quarantined or has_many_incidents(self.fleet):
            self._reopen()
        slots = self._reachable(self._ids)
        try:
            if slots:
                self.fleet.reset([ResetPlan()] * len(slots), slots)
            self._note_losses()
            self._build(self._unbuilt)
        except FLEET_ERRORS:
            self._note_losses()  # `recv` handles them
        self._pending.clear()

    def send(self, requests: Mapping[int, TurnRequest]) -> None:
        """Send requests to these environments."""
        self._requests, self._parts = dict(requests), {}
        gone = self.fleet.quarantined
        ready = {
            one: request
            for one, request in requests.items()
            if one not in self._unbuilt and self._slots[one] not in gone
        }
        if ready:
            with suppress(*FLEET_ERRORS):  # `recv` handles them
                self._post(ready)

    def recv(
        self, so_far_of: Callable[[int], EpisodeSoFar]
    ) -> tuple[dict[int, TurnReply], dict[int, str]]:
        """The replies, and the environments that have to move to this process, with the reason."""
        replies: dict[int, TurnReply] = {}
        suspects: dict[int, str] = {}
        while True:
            self._settle_losses(replies, suspects)
            missing = self._requests.keys() - replies.keys() - suspects.keys()
            if not missing:
                break
            lost = sorted(missing - self._pending)
            try:
                if lost:
                    again = {one: self._requests[one].with_replay(so_far_of(one)) for one in lost}
                    self._bring_back(again)
                else:
                    self._take_in(self.fleet.recv(min_slots=1), missing, replies)
            except FLEET_ERRORS:
                if not self._has_news(missing):
                    raise
        leaving: dict[int, str] = {}
        for env_id, why in suspects.items():
            reply = self._tried_alone(env_id, so_far_of, why)
            if reply.failure is None:
                leaving[env_id] = why
            else:
                replies[env_id] = reply
        return replies, leaving

    def close(self) -> None:
        """End the fleet."""
        self.fleet.close()

    # ---- requests -------------------------------------------------------------------------------

    def _post(self, requests: Mapping[int, TurnRequest]) -> None:
        self._pending |= requests.keys()
        slots = [self._slots[env_id] for env_id in requests]
        try:
            self.fleet.send(action_batch(list(requests.values())), slots)
        except FLEET_ERRORS:
            self._pending -= requests.keys()
            raise

    def _take_in(self, batch: Batch, missing: Set[int], replies: dict[int, TurnReply]) -> None:
        """Take replies in, and send the next part to environments that have one."""
        further: dict[int, TurnRequest] = {}
        for row, slot in enumerate(batch.slots.tolist()):
            env_id = self._ids[slot]
            self._pending.discard(env_id)
            if not batch.valid[row] or env_id not in missing:
                continue  # lost, or settled already
            reply, parts = batch.obs[row], self._parts.get(env_id)
            if parts and reply.failure is None:
                further[env_id] = parts.popleft()
            elif parts:
                replies[env_id] = self._requests[env_id].failed(reply.failure)
            else:
                replies[env_id] = reply
        if further:
            self._post(further)

    def _bring_back(self, requests: Mapping[int, TurnRequest]) -> None:
        """Rebuild lost environments, and start the replay of their episodes."""
        self._pending |= requests.keys()
        try:
            self._build(requests)
            slots = [self._slots[env_id] for env_id in requests]
            self.fleet.reset([ResetPlan()] * len(slots), slots)
        except FLEET_ERRORS:
            self._pending -= requests.keys()
            raise
        self._parts |= {one: deque(request.split()) for one, request in requests.items()}
        self._post({one: self._parts[one].popleft() for one in requests})

    def _build(self, ids: Iterable[int]) -> None:
        """Build the environments whose workers are new.

        A call is not repeated if the worker dies of it, and it has the deadline of a start.
        """
        unbuilt = self._unbuilt.intersection(ids)
        slots = self._reachable(unbuilt)
        if slots:
            before = len(self.fleet.incidents)
            self.fleet.call("build", slots=slots)
            lost = {slot for one in self.fleet.incidents[before:] for slot in one.slots}
            self._unbuilt -= {self._ids[slot] for slot in slots if slot not in lost}

    def _reachable(self, ids: Iterable[int]) -> list[int]:
        """Their slots, without those that the fleet has given up."""
        gone = self.fleet.quarantined
        return sorted(slot for slot in (self._slots[one] for one in ids) if slot not in gone)

    # ---- losses ---------------------------------------------------------------------------------

    def _note_losses(self) -> Sequence[Incident]:
        """The incidents since this was called last."""
        if len(self.fleet.incidents) == self._num_seen:
            return ()
        incidents = self.fleet.incidents[self._num_seen :]
        self._num_seen += len(incidents)
        self._unbuilt |= {self._ids[slot] for incident in incidents for slot in incident.slots}
        return incidents

    def _has_news(self, missing: Set[int]) -> bool:
        gone = self.fleet.quarantined
        is_any_gone = any(self._slots[one] in gone for one in missing)
        return is_any_gone or len(self.fleet.incidents) > self._num_seen

    def _settle_losses(self, replies: dict[int, TurnReply], suspects: dict[int, str]) -> None:
        """Decide on environments that have cost too many workers to be asked again."""
        for incident in self._note_losses():
            env_id = self._ids[incident.slot]
            if env_id not in self._requests or env_id in replies or env_id in suspects:
                continue
            verdict = self._losses.add(env_id, incident, len(self._parts.get(env_id, ())))
            if verdict.what == "failed":
                request = self._requests[env_id]
                replies[env_id] = request.failed(EnvFailure(_doing(request), verdict.why))
                self._pending.discard(env_id)
            elif verdict.what == "alone" and not self._is_trial:
                suspects[env_id] = verdict.why
                self._pending.discard(env_id)
        for slot, error in self.fleet.quarantined.items():
            env_id = self._ids[slot]
            if env_id in self._requests and env_id not in replies and env_id not in suspects:
                suspects[env_id] = _reason(error)
                self._pending.discard(env_id)

    def _tried_alone(
        self, env_id: int, so_far_of: Callable[[int], EpisodeSoFar], why: str
    ) -> TurnReply:
        """The reply of an environment in a worker of its own."""
        request = self._requests[env_id]
        if self._is_trial:
            return _not_built(request, why)
        try:
            env_fns = {env_id: self._env_fns[env_id]}
            self._trial = RemoteEnvs(env_fns, self._options, self._max_restarts, self._losses)
        except FLEET_ERRORS as exc:
            return _not_built(request, _reason(exc))
        try:
            self._trial.send({env_id: request})
            replies, _ = self._trial.recv(so_far_of)
            return replies[env_id]
        finally:
            trial, self._trial = self._trial, None
            trial.close()

    # ---- new workers ----------------------------------------------------------------------------

    def _end_stuck(self) -> None:
        """End workers that are still busy with a call that was interrupted."""
        give_up_s = time.monotonic() + _GRACE_S
        with suppress(*FLEET_ERRORS):
            while self._pending and (left_s := give_up_s - time.monotonic()) > 0:
                batch = self.fleet.recv(min_slots=1, timeout_s=left_s)
                self._pending -= {self._ids[slot] for slot in batch.slots.tolist()}
        if self._pending and not end_workers(
            self.fleet, [self._slots[one] for one in self._pending]
        ):
            self._reopen()

    def _reopen(self) -> None:
        """Replace the fleet, if a new one can be started."""
        try:
            fleet = self._open()
        except FLEET_ERRORS:
            return
        self.fleet.close()
        self.fleet, self._num_seen = fleet, 0
        self._unbuilt = set(self._ids)

    def _open(self) -> Fleet:
        env_fns = [_SlotEnvFn(make, self._phase) for make in self._env_fns.values()]
        return self._options.open(env_fns, self._max_restarts)


def open_fleet(
    env_fns: Sequence[Callable[[], Any]],
    num_workers: int,
    start_method: StartMethod | None,
    *,
    backend: Literal["thread", "process"] = "process",
    step_timeout_s: float | None = None,
    max_restarts: int = 0,
) -> Fleet:
    """A fleet that restarts its slots after any loss."""
    return Fleet(
        env_fns,
        num_workers=num_workers,
        backend=backend,
        start_method=choose_start_method(start_method),
        autoreset="disabled",
        deadlines=Deadlines(step_s=step_timeout_s, reset_s=Deadlines().start_s),
        on_failure="restart",
        # `losses.py` counts losses by their cause. This limit is for a fleet whose workers are
        # killed over and over.
        restarts=RestartPolicy(max_restarts=2 * MAX_SLOT_INCIDENTS + 2 * max_restarts),
    )


def has_many_incidents(fleet: Fleet) -> bool:
    """Whether a fleet should be replaced before the next rollout.

    A fleet counts the failures of a slot over many rollouts, and keeps a record of each.
    """
    incidents = fleet.incidents
    if len(incidents) < MAX_SLOT_INCIDENTS:
        return False
    by_slot = Counter(incident.slot for incident in incidents)
    return len(incidents) >= 10 * MAX_SLOT_INCIDENTS or max(by_slot.values()) >= MAX_SLOT_INCIDENTS


def end_workers(fleet: Fleet, slots: Iterable[int]) -> bool:
    """Kill the processes that host these slots; False if they are hosted by threads."""
    asked = set(slots)
    for pid, (first, end) in zip(fleet.worker_pids(), fleet.bounds, strict=True):
        if asked.isdisjoint(range(first, end)):
            continue
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def _not_built(request: TurnRequest, reason: str) -> TurnReply:
    error = f"it was lost and could not be built again: {reason}"
    return request.failed(EnvFailure("the constructor", error))


def _doing(request: TurnRequest) -> str:
    return "reset" if request.names is None else "step"


def _reason(error: BaseException) -> str:
    """The first line of an error's text."""
    return " ".join(str(error).partition("\n")[0].split())


def action_batch(requests: Sequence[Any]) -> Any:
    """Objects of any kind as a batch of actions."""
    batch = np.empty(len(requests), object)
    for place, request in enumerate(requests):
        batch[place] = request
    return batch
