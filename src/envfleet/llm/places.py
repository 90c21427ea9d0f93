"""Where environments live: here, or in the slots of a fleet.

    manager ─► Order(begin? repeat? play?) ─► Player next to its environment ─► Opening or Turn

Each environment stays where it is; an order and its answer are all that travels. A lost environment
is built anew, brought back by its seed and the actions of its episode so far, and asked again, so
its answer is the one that was lost.

Law: whoever is asked answers: by what the environment did, or by a `Failure` once it has cost more
workers than its budget allows. If they were killed, and it lives through the same in a worker of
its own, the environment comes home instead and goes on here until the next reset (`losses.py`).
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet.engine import Batch, Deadlines, Fleet, Incident, ResetPlan
from envfleet.engine.options import RestartPolicy, StartMethod
from envfleet.engine.plan import choose_start_method
from envfleet.errors import EnvfleetError, level_of_caller
from envfleet.llm.losses import Losses
from envfleet.llm.turns import ITS_OWN, Failure, Opening, Player, State, Turn

Answer = Opening | Turn
Standing = tuple[Sequence[tuple[Any, ...]], State]
"""Where an episode stands: the actions of each turn so far, and what the environment shows."""
GIVEN_UP = (EnvfleetError, OSError)
"""What a fleet raises when it gives up slots, the latter when there is no process to be had."""
WORN = 50
"""After so many failures of one slot a fleet is replaced at the next reset."""
_GRACE_S = 0.3
"""How long a reset waits for what a call that was broken off has left behind."""


@dataclass(frozen=True, slots=True)
class Order:
    """What an environment is to do."""

    seed: int
    mode: str
    is_new: bool = False
    """Begin the episode of this seed first."""
    repeat: tuple[tuple[Any, ...], ...] = ()
    """Turns to play first, whose answers are known: the actions of each."""
    named: tuple[Any, ...] | None = None
    """Actions of the turn to play; None: only begin."""
    left: int = 0
    expected: State | None = None
    """What the environment must show after `repeat`, if that is known."""

    def __deepcopy__(self, memo: object) -> Order:
        """Itself: nobody changes it."""
        return self

    def __reduce__(self) -> tuple[type[Order], tuple[Any, ...]]:
        """By its fields, in a tenth of the time that a dataclass takes to list them."""
        values = (self.seed, self.mode, self.is_new, self.repeat, self.named, self.left)
        return Order, (*values, self.expected)

    def anew(self, standing: Standing) -> Order:
        """The same for an environment that has been built anew and has to be brought there."""
        if self.is_new:
            return self
        turns, state = standing
        return replace(self, is_new=True, repeat=tuple(turns), expected=state)

    def pieces(self) -> list[Order]:
        """The same, one after another: the beginning, each turn that is repeated, the one to play.

        Each takes no longer than it took when it was asked for first.
        """
        blank = Order(self.seed, self.mode)
        found = [replace(blank, is_new=self.is_new)]
        found += [replace(blank, repeat=(turn,)) for turn in self.repeat]
        found[-1] = replace(found[-1], expected=self.expected)
        if self.named is not None:
            found.append(replace(blank, named=self.named, left=self.left))
        return found


def carry_out(player: Player, order: Order) -> Answer:
    """Do what is ordered."""
    opening = Opening("")
    if order.is_new:
        opening = player.begin(order.seed, order.mode)
        if opening.failure is not None:
            return _failed(order, opening.failure)
    if order.repeat or order.expected is not None:
        failure = player.repeat(order.repeat, opening.state, order.expected)
        if failure is not None:
            return _failed(order, failure)
    return opening if order.named is None else player.play(order.named, order.left)


class Here:
    """Environments in this process."""

    def __init__(self) -> None:
        self.players: dict[int, Player] = {}

    def take_in(self, env_id: int, env: Any) -> None:
        """Let an environment live here, in the place of the one that did."""
        self.let_go(env_id)
        self.players[env_id] = Player(env)

    def let_go(self, env_id: int) -> None:
        """Close an environment, if it lives here."""
        if env_id in self.players:
            _close(self.players.pop(env_id).env)

    def ask(self, orders: Mapping[int, Order]) -> dict[int, Answer]:
        """Have everybody carry out their order, one after another."""
        return {env_id: carry_out(self.players[env_id], one) for env_id, one in orders.items()}

    def close(self) -> None:
        """Close every environment, and forget it."""
        for player in self.players.values():
            _close(player.env)
        self.players.clear()


class Anything(spaces.Space[Any]):
    """Whatever can be pickled: it crosses on the control path, as it is."""

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
        """It does."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)

    def __hash__(self) -> int:
        return hash(Anything)


class Booth(gymnasium.Env[Any, Any]):
    """What a slot of such a fleet holds: it does something by each step, whatever was before."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own form)
    observation_space, action_space = Anything(), Anything()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Nothing: episodes begin by orders."""
        return None, {}


class Seat(Booth):
    """An environment in a slot: a step carries out an order."""

    def __init__(self, make: Callable[[], Any], *, is_late: bool = False) -> None:
        """Build the environment; one that comes late, in the place of another, by `build`."""
        self._make = make
        self._player = None if is_late else Player(make())
        self._problem = ""

    def build(self) -> None:
        """Have an environment, if it can be built."""
        if self._player is None:
            try:
                self._player = Player(self._make())
            except ITS_OWN as exc:
                self._problem = Failure.of("the constructor", exc).error

    def step(self, action: Order) -> tuple[Answer, float, bool, bool, dict[str, Any]]:
        """Carry out an order."""
        if self._player is None:
            self.build()
        if self._player is None:
            return _not_built(action, self._problem), 0.0, False, False, {}
        return carry_out(self._player, action), 0.0, False, False, {}

    def close(self) -> None:
        """Close the environment."""
        if self._player is not None:
            _close(self._player.env)


@dataclass(slots=True)
class _Era:
    """Whether workers start for the first time; each of them is told when it starts."""

    is_first: bool = True


class _SeatMaker:
    """Makes the seat of a slot.

    Only where a fleet starts for the first time may the environment keep its worker from starting:
    then nothing has begun yet. Later a worker has neighbours to serve, whatever one of them does.
    """

    def __init__(self, make: Callable[[], Any], era: _Era) -> None:
        self._make, self._era = make, era
        self._has_made = False

    def __call__(self) -> Seat:
        is_late = self._has_made or not self._era.is_first
        self._has_made = True
        return Seat(self._make, is_late=is_late)


@dataclass(frozen=True, slots=True)
class House:
    """How the workers are to be that environments live in."""

    backend: Literal["thread", "process"]
    max_workers: int
    start_method: StartMethod | None
    step_timeout_s: float | None

    def open(self, env_fns: Sequence[Callable[[], Any]], max_restarts: int) -> Fleet:
        """A fleet of them."""
        return open_fleet(
            env_fns,
            min(self.max_workers, len(env_fns)),
            self.start_method,
            backend=self.backend,
            step_timeout_s=self.step_timeout_s,
            max_restarts=max_restarts,
        )


class Seats:
    """Environments in the slots of a fleet; each stays with one worker for as long as both live.

    An environment that is lost is built again, led through its episode turn by turn, each with the
    deadline that it had at first, and asked again. Once it has cost too many workers that somebody
    may have killed, it is tried in a worker of its own: who ends that one too fails, and who does
    not may come home.
    """

    def __init__(
        self,
        makers: Mapping[int, Callable[[], Any]],
        house: House,
        max_restarts: int,
        tried: Losses | None = None,
    ) -> None:
        """Build the environment of every id.

        Args:
            makers: How, by id.
            house: Where.
            max_restarts: How many workers each may cost in one episode.
            tried: Given for the worker that one has of its own: what it has cost so far.
        """
        self._makers, self._house, self._max_restarts = dict(makers), house, max_restarts
        self._slots = {env_id: slot for slot, env_id in enumerate(makers)}
        self._ids = list(makers)
        self._is_trial = tried is not None
        self._losses = Losses(max_restarts) if tried is None else tried
        self._era = _Era()
        self._trial: Seats | None = None
        self.fleet = self._open()
        self._era.is_first = False
        self._ordered: dict[int, Order] = {}
        self._pieces: dict[int, deque[Order]] = {}
        """What is left to do of orders that are given piece by piece."""
        self._owing: set[int] = set()
        """Who has been asked for something and not answered."""
        self._unbuilt: set[int] = set()
        """Who has a new worker and is not there yet."""
        self._num_seen = 0
        """How many of the fleet's incidents are known."""

    @property
    def ids(self) -> list[int]:
        """Who lives here."""
        return list(self._slots)

    @property
    def fleets(self) -> list[Fleet]:
        """The fleet, and that of whoever is tried alone."""
        return [self.fleet] if self._trial is None else [self.fleet, self._trial.fleet]

    def refresh(self) -> None:
        """Forget the past: a new episode begins for everybody."""
        self._losses.begin_episodes()
        self._end_stuck()
        if self.fleet.quarantined or is_worn(self.fleet):
            self._reopen()
        slots = self._reachable(self._ids)
        try:
            if slots:
                self.fleet.reset([ResetPlan()] * len(slots), slots)
            self._note_losses()
            self._build(self._unbuilt)
        except GIVEN_UP:
            self._note_losses()  # `recv` sees to them
        self._owing.clear()

    def send(self, orders: Mapping[int, Order]) -> None:
        """Have these environments begin with their orders."""
        self._ordered, self._pieces = dict(orders), {}
        gone = self.fleet.quarantined
        ready = {
            one: order
            for one, order in orders.items()
            if one not in self._unbuilt and self._slots[one] not in gone
        }
        if ready:
            with suppress(*GIVEN_UP):  # `recv` sees to them
                self._post(ready)

    def recv(
        self, standing_of: Callable[[int], Standing]
    ) -> tuple[dict[int, Answer], dict[int, str]]:
        """Everybody's answer, and who has to come home, with the reason."""
        answers: dict[int, Answer] = {}
        suspects: dict[int, str] = {}
        while True:
            self._judge(answers, suspects)
            missing = self._ordered.keys() - answers.keys() - suspects.keys()
            if not missing:
                break
            lost = sorted(missing - self._owing)
            try:
                if lost:
                    again = {one: self._ordered[one].anew(standing_of(one)) for one in lost}
                    self._bring_back(again)
                else:
                    self._take_in(self.fleet.recv(min_slots=1), missing, answers)
            except GIVEN_UP:
                if not self._has_news(missing):
                    raise
        leaving: dict[int, str] = {}
        for env_id, why in suspects.items():
            answer = self._tried_alone(env_id, standing_of, why)
            if answer.failure is None:
                leaving[env_id] = why
            else:
                answers[env_id] = answer
        return answers, leaving

    def close(self) -> None:
        """End the fleet."""
        self.fleet.close()

    # ---- asking ---------------------------------------------------------------------------------

    def _post(self, orders: Mapping[int, Order]) -> None:
        self._owing |= orders.keys()
        slots = [self._slots[env_id] for env_id in orders]
        try:
            self.fleet.send(batch_of(list(orders.values())), slots)
        except GIVEN_UP:
            self._owing -= orders.keys()
            raise

    def _take_in(self, batch: Batch, missing: Set[int], answers: dict[int, Answer]) -> None:
        """Take what has come back, and go on with those that have more to do."""
        further: dict[int, Order] = {}
        for row, slot in enumerate(batch.slots.tolist()):
            env_id = self._ids[slot]
            self._owing.discard(env_id)
            if not batch.valid[row] or env_id not in missing:
                continue  # lost, or judged already
            answer, pieces = batch.obs[row], self._pieces.get(env_id)
            if pieces and answer.failure is None:
                further[env_id] = pieces.popleft()
            elif pieces:
                answers[env_id] = _failed(self._ordered[env_id], answer.failure)
            else:
                answers[env_id] = answer
        if further:
            self._post(further)

    def _bring_back(self, orders: Mapping[int, Order]) -> None:
        """Build environments that were lost, and lead them to where they stood, by pieces."""
        self._owing |= orders.keys()
        try:
            self._build(orders)
            slots = [self._slots[env_id] for env_id in orders]
            self.fleet.reset([ResetPlan()] * len(slots), slots)
        except GIVEN_UP:
            self._owing -= orders.keys()
            raise
        self._pieces |= {one: deque(order.pieces()) for one, order in orders.items()}
        self._post({one: self._pieces[one].popleft() for one in orders})

    def _build(self, ids: Iterable[int]) -> None:
        """Have environments built whose workers are new.

        By a call: one that dies is not called again, and it has the time that a start has.
        """
        unbuilt = self._unbuilt.intersection(ids)
        slots = self._reachable(unbuilt)
        if slots:
            before = len(self.fleet.incidents)
            self.fleet.call("build", slots=slots)
            lost = {slot for one in self.fleet.incidents[before:] for slot in one.slots}
            self._unbuilt -= {self._ids[slot] for slot in slots if slot not in lost}

    def _reachable(self, ids: Iterable[int]) -> list[int]:
        """Their slots, but of those that were given up."""
        gone = self.fleet.quarantined
        return sorted(slot for slot in (self._slots[one] for one in ids) if slot not in gone)

    # ---- losses ---------------------------------------------------------------------------------

    def _note_losses(self) -> Sequence[Incident]:
        """What has happened since this was asked last."""
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

    def _judge(self, answers: dict[int, Answer], suspects: dict[int, str]) -> None:
        """Settle those that have cost too many workers to be asked again."""
        for incident in self._note_losses():
            env_id = self._ids[incident.slot]
            if env_id not in self._ordered or env_id in answers or env_id in suspects:
                continue
            verdict = self._losses.add(env_id, incident, len(self._pieces.get(env_id, ())))
            if verdict.what == "failed":
                order = self._ordered[env_id]
                answers[env_id] = _failed(order, Failure(_doing(order), verdict.why))
                self._owing.discard(env_id)
            elif verdict.what == "alone" and not self._is_trial:
                suspects[env_id] = verdict.why
                self._owing.discard(env_id)
        for slot, error in self.fleet.quarantined.items():
            env_id = self._ids[slot]
            if env_id in self._ordered and env_id not in answers and env_id not in suspects:
                suspects[env_id] = _reason(error)
                self._owing.discard(env_id)

    def _tried_alone(self, env_id: int, standing_of: Callable[[int], Standing], why: str) -> Answer:
        """What one answers in a worker of its own, before it may do the same in this process."""
        order = self._ordered[env_id]
        if self._is_trial:
            return _not_built(order, why)
        try:
            makers = {env_id: self._makers[env_id]}
            self._trial = Seats(makers, self._house, self._max_restarts, self._losses)
        except GIVEN_UP as exc:
            return _not_built(order, _reason(exc))
        try:
            self._trial.send({env_id: order})
            answers, _ = self._trial.recv(standing_of)
            return answers[env_id]
        finally:
            trial, self._trial = self._trial, None
            trial.close()

    # ---- new workers ----------------------------------------------------------------------------

    def _end_stuck(self) -> None:
        """End workers that still owe something to a call that was broken off."""
        give_up_s = time.monotonic() + _GRACE_S
        with suppress(*GIVEN_UP):
            while self._owing and (left_s := give_up_s - time.monotonic()) > 0:
                batch = self.fleet.recv(min_slots=1, timeout_s=left_s)
                self._owing -= {self._ids[slot] for slot in batch.slots.tolist()}
        if self._owing and not end_workers(self.fleet, [self._slots[one] for one in self._owing]):
            self._reopen()

    def _reopen(self) -> None:
        """Start over with new workers, if they are to be had."""
        try:
            fleet = self._open()
        except GIVEN_UP:
            return
        self.fleet.close()
        self.fleet, self._num_seen = fleet, 0
        self._unbuilt = set(self._ids)

    def _open(self) -> Fleet:
        seats = [_SeatMaker(make, self._era) for make in self._makers.values()]
        return self._house.open(seats, self._max_restarts)


def open_fleet(
    env_fns: Sequence[Callable[[], Any]],
    num_workers: int,
    start_method: StartMethod | None,
    *,
    backend: Literal["thread", "process"] = "process",
    step_timeout_s: float | None = None,
    max_restarts: int = 0,
) -> Fleet:
    """A fleet whose slots come back after any loss, and wait for orders."""
    return Fleet(
        env_fns,
        num_workers=num_workers,
        backend=backend,
        start_method=choose_start_method(start_method),
        autoreset="disabled",
        deadlines=Deadlines(step_s=step_timeout_s, reset_s=Deadlines().start_s),
        on_failure="restart",
        # Losses are counted where it is known what they were due to (`losses.py`), and no
        # environment can keep a worker from coming back. This ends what is killed over and over.
        restarts=RestartPolicy(max_restarts=2 * WORN + 2 * max_restarts),
    )


def is_worn(fleet: Fleet) -> bool:
    """Whether so much has happened to a fleet that the next rollout needs another.

    A fleet counts failures of a slot over many rollouts, and keeps what it knows of each.
    """
    incidents = fleet.incidents
    if len(incidents) < WORN:
        return False
    by_slot = Counter(incident.slot for incident in incidents)
    return len(incidents) >= 10 * WORN or max(by_slot.values()) >= WORN


def end_workers(fleet: Fleet, slots: Iterable[int]) -> bool:
    """End the processes that host these slots, for others to take their places; False: threads."""
    asked = set(slots)
    for pid, (first, end) in zip(fleet.worker_pids(), fleet.bounds, strict=True):
        if asked.isdisjoint(range(first, end)):
            continue
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def bring_home(
    here: Here, env_id: int, make: Callable[[], Any], order: Order, standing: Standing, why: str
) -> Answer:
    """Build an environment here as it stood elsewhere, and ask it there."""
    warnings.warn(
        f"environment {env_id} goes on in this process, with its state: {why}. Look into what "
        "kills the workers (memory, most often), or set es_manager.sequential_env_types",
        RuntimeWarning,
        stacklevel=level_of_caller(),
    )
    return built_as_it_stood(here, env_id, make, order.anew(standing))


def built_as_it_stood(here: Here, env_id: int, make: Callable[[], Any], order: Order) -> Answer:
    """Build an environment here and have it carry out an order that brings it back."""
    try:
        here.take_in(env_id, make())
    except Exception as exc:
        return _failed(order, Failure.of("the constructor", exc))
    return carry_out(here.players[env_id], order)


def _close(env: Any) -> None:
    """One that cannot be closed is no reason to leave the others open."""
    try:
        getattr(env, "close", lambda: None)()
    except Exception as exc:
        warnings.warn(
            f"{type(env).__name__} failed in close: {Failure.of('close', exc).error}",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )


def _failed(order: Order, failure: Failure) -> Answer:
    return Opening("", failure=failure) if order.named is None else Turn("", failure=failure)


def _not_built(order: Order, reason: str) -> Answer:
    error = f"it was lost and could not be built again: {reason}"
    return _failed(order, Failure("the constructor", error))


def _doing(order: Order) -> str:
    return "reset" if order.named is None else "step"


def _reason(error: BaseException) -> str:
    """What an error says in its first line."""
    return " ".join(str(error).partition("\n")[0].split())


def batch_of(orders: Sequence[Any]) -> Any:
    """Orders as a batch of actions, whatever they are made of."""
    batch = np.empty(len(orders), object)
    for place, order in enumerate(orders):
        batch[place] = order
    return batch
