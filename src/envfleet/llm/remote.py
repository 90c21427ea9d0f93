"""Environments that live in the slots of a fleet.

    EpisodeRequest ─► send_reset(plans) ─┐
    TurnRequest    ─► send(actions) ─────┴─► recv ─► EpisodeStart or Turn

The fleet brings back an environment that is lost with its worker, and asks it again
(`on_failure="resume"`), so its reply is the one that was lost.

Law: every request gets a reply: what the environment did, or an `EpisodeFailure` if the fleet has
given the environment up.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet.engine import Batch, Deadlines, Fleet, Incident, ResetPlan
from envfleet.engine.options import RestartPolicy
from envfleet.engine.plan import choose_start_method
from envfleet.errors import EnvfleetError, SlotQuarantined
from envfleet.layout import Field, cell, register
from envfleet.llm.local import close_env
from envfleet.llm.settings import Settings
from envfleet.llm.turns import (
    NOT_REPEATED,
    EpisodeFailure,
    EpisodeRequest,
    EpisodeStart,
    Request,
    State,
    Turn,
    TurnPlayer,
    TurnReply,
)

FLEET_ERRORS = (EnvfleetError, OSError)
"""What a fleet raises when it gives up slots, or when no process can be started."""
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of workers that were killed from outside: by the kernel, short of memory, say."""
_TURN_BYTES = 1000
"""The room for a turn in shared memory."""
_GRACE_S = 0.3
"""How long a reset waits for the replies to a call that was interrupted."""


class RemoteValue(spaces.Space[Any]):
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
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class TurnSpace(RemoteValue):
    """Turns: the names of their actions, and how many actions the episode still allows."""


class _TurnCodec:
    """Puts a turn into shared memory; one that is too long for its row is sent in a message."""

    def encode(self, value: Any) -> bytes:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def decode(self, data: bytes) -> Any:
        return pickle.loads(data) if data else None


@register(TurnSpace)
def _describe_turn(space: TurnSpace) -> Field:
    return cell(_TURN_BYTES, _TurnCodec())


class RemoteEnv(gymnasium.Env[State, tuple[Any, ...]]):
    """A text environment in a slot: it observes its state, and the rest of a reply is its info.

    What travels is made of plain types, which are quicker to pickle than a dataclass.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own form)
    observation_space, action_space = RemoteValue(), TurnSpace()

    def __init__(self, make: Callable[[], Any]) -> None:
        """Build the environment."""
        self._player = TurnPlayer(make())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Begin the episode of this seed, in the mode that the options name."""
        assert seed is not None
        assert options is not None
        start = self._player.begin(seed, options["mode"])
        return start.state, _info(start.failure, start.answer)

    def step(self, action: tuple[Any, ...]) -> tuple[State, float, bool, bool, dict[str, Any]]:
        """Play a turn: the names of its actions, and how many the episode still allows.

        The end of an episode is part of the reply; the fleet does not hear of it.
        """
        turn = self._player.play(*action)
        reply = (turn.actions, turn.num_valid, turn.reward, turn.info, turn.is_done)
        info = _info(turn.failure, *reply, turn.is_success)
        return turn.state, 0.0, False, False, info

    def close(self) -> None:
        """Close the environment."""
        close_env(self._player.env)


def _info(failure: EpisodeFailure | None, *reply: Any) -> dict[str, Any]:
    if failure is None:
        return {"reply": reply}
    return {"reply": reply, "failure": (failure.doing, failure.error)}


def _reply(request: Request, state: State, info: Mapping[str, Any]) -> TurnReply:
    """The reply to a request, from what an `RemoteEnv` observed and informed of."""
    failure = EpisodeFailure(*info["failure"]) if "failure" in info else None
    reply: tuple[Any, ...] = info["reply"]
    if isinstance(request, EpisodeRequest):
        return EpisodeStart(state, reply[0], failure)
    actions, num_valid, reward, turn_info, is_done, is_success = reply
    return Turn(state, actions, num_valid, reward, turn_info, is_done, failure, is_success)


class RemoteEnvs:
    """Environments in the slots of a fleet, by id."""

    def __init__(
        self,
        env_fns: Mapping[int, Callable[[], Any]],
        backend: Literal["thread", "process"],
        settings: Settings,
    ) -> None:
        """Build the environment of every id."""
        self._env_fns, self._backend, self._settings = dict(env_fns), backend, settings
        self.ids = list(env_fns)
        """The environments that live here."""
        self._slots = {env_id: slot for slot, env_id in enumerate(env_fns)}
        self._asked: dict[int, Request] = {}
        """Requests that have no reply yet."""
        self._replies: dict[int, TurnReply] = {}
        """Replies that have not been received."""
        self.fleet = self._open()

    @property
    def is_busy(self) -> bool:
        """Whether there is something to receive."""
        return bool(self._asked or self._replies)

    def refresh(self) -> None:
        """Get ready for new episodes.

        A fleet that has had losses is replaced: the new one has every slot, and for each of them
        the whole number of restarts.
        """
        self._drop()
        if self.fleet.incidents:
            self._reopen()

    def send(self, requests: Mapping[int, Request]) -> None:
        """Send requests: all of them begin episodes, or all play turns."""
        if not requests:
            return
        self._asked |= requests
        is_reset = isinstance(next(iter(requests.values())), EpisodeRequest)
        gone = set(self.fleet.quarantined)
        if not is_reset:
            gone.update(self.fleet.without_episode)
        slots = [slot for one in requests if (slot := self._slots[one]) not in gone]
        if slots:
            asked: list[Any] = [requests[self.ids[slot]] for slot in slots]
            if is_reset:
                plans = [ResetPlan(one.seed, {"mode": one.mode}) for one in asked]
                self.fleet.send_reset(plans, slots)
            else:
                self.fleet.send(action_batch([(one.names, one.num_left) for one in asked]), slots)
        if len(slots) < len(requests):
            self._fail_lost()

    def recv(
        self, min_envs: int | None = None, timeout_s: float | None = None
    ) -> dict[int, TurnReply]:
        """The replies that are there: at least `min_envs` (None: all), unless the time is up."""
        give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._asked and (min_envs is None or len(self._replies) < min_envs):
            left_s = max(0.0, give_up_s - time.monotonic())
            try:
                self._take_in(
                    self.fleet.recv(
                        None if min_envs is None else min_envs - len(self._replies),
                        None if timeout_s is None else left_s,
                    )
                )
            except FLEET_ERRORS:
                if self.fleet.is_closed:
                    raise
                self._fail_lost()
            if not left_s:
                break
        replies, self._replies = self._replies, {}
        return replies

    def close(self) -> None:
        """End the fleet."""
        self.fleet.close()

    def _take_in(self, batch: Batch) -> None:
        infos = batch.each_info
        for row, slot in enumerate(batch.slots.tolist()):
            env_id = self.ids[slot]
            request = self._asked.pop(env_id)
            self._replies[env_id] = _reply(request, batch.obs[row], infos[row])

    # ---- losses ---------------------------------------------------------------------------------

    def _fail_lost(self) -> None:
        """Reply for the environments that the fleet has given up."""
        in_flight = set(self.fleet.in_flight)
        lost = [one for one in self._asked if self._slots[one] not in in_flight]
        for env_id in lost:
            request = self._asked.pop(env_id)
            self._replies[env_id] = request.failed(self._failure(self._slots[env_id], request))

    def _failure(self, slot: int, request: Request) -> EpisodeFailure:
        error = self.fleet.quarantined.get(slot)
        if error is None:  # the fleet resumed it, and it was not where it had been
            problem = NOT_REPEATED.format("it shows something else now")
            return EpisodeFailure(request.doing, problem)
        reason = " ".join(str(error).partition("\n")[0].split())
        if isinstance(error, SlotQuarantined):
            last = [one for one in self.fleet.incidents if one.slot == error.slot][-1]
            if last.doing not in ("a restart", "the constructor"):
                return EpisodeFailure(request.doing, describe_loss(last, error.restarts))
            reason = last.reason
        return EpisodeFailure(
            "the constructor", f"it was lost and could not be built again: {reason}"
        )

    def _drop(self) -> None:
        """Forget the replies to a call that was interrupted."""
        if self._asked:
            self.recv(timeout_s=_GRACE_S)
        if self._asked:  # some environments are still busy
            end_workers(self.fleet, [self._slots[one] for one in self._asked])
            self._asked.clear()
            self.fleet.drop()
            self._reopen()
        self._replies.clear()

    def _reopen(self) -> None:
        """Replace the fleet, if a new one can be started."""
        try:
            fleet = self._open()
        except FLEET_ERRORS:
            return
        old, self.fleet = self.fleet, fleet
        old.close()

    def _open(self) -> Fleet:
        settings = self._settings
        return Fleet(
            [partial(RemoteEnv, make) for make in self._env_fns.values()],
            num_workers=min(settings.max_workers, len(self._env_fns)),
            backend=self._backend,
            start_method=choose_start_method(settings.start_method),
            autoreset="disabled",
            deadlines=Deadlines(step_s=settings.step_timeout_s, reset_s=settings.step_timeout_s),
            on_failure="resume",
            # for one rollout, however long it takes: `refresh` replaces the fleet
            restarts=RestartPolicy(max_restarts=settings.max_restarts, window_s=math.inf),
        )


def describe_loss(incident: Incident, count: int) -> str:
    """Why an environment has failed that was lost so often in one episode, last like this."""
    times = f"{'once' if count == 1 else f'{count} times'} in one episode"
    if incident.kind == "exception":
        return f"{incident.reason} in {incident.doing}, {times}"
    if incident.kind == "timeout":
        return f"its worker passed its deadline {times}"
    if incident.exitcode in FROM_OUTSIDE:
        return f"its worker was killed {times} (exit code {incident.exitcode})"
    return f"its worker died {times}"


def end_workers(fleet: Fleet, slots: Iterable[int]) -> None:
    """Kill the processes that host these slots; a thread cannot be ended."""
    asked = set(slots)
    for pid, (first, end) in zip(fleet.worker_pids(), fleet.bounds, strict=True):
        if pid is not None and not asked.isdisjoint(range(first, end)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def action_batch(actions: Sequence[Any]) -> Any:
    """Objects of any kind as a batch of actions."""
    batch = np.empty(len(actions), object)
    for place, action in enumerate(actions):
        batch[place] = action
    return batch
