"""Where environments live: here, or in the slots of a fleet.

    manager ─► Order(begin? repeat? play?) ─► Player next to its environment ─► Opening or Turn

Each environment stays where it is; an order and its answer are all that travels. A lost environment
is built anew, brought back by its seed and the actions of its episode so far, and asked again, so
its answer is the one that was lost.

Law: whoever is asked answers: by what the environment did, or by a `Failure` once it has cost more
workers than its budget allows. If something outside killed them, the environment comes home instead
and goes on here (`losses.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet.engine import Deadlines, Fleet, Incident, ResetPlan
from envfleet.engine.auto import choose_start_method
from envfleet.engine.options import RestartPolicy, StartMethod
from envfleet.errors import EnvfleetError, level_of_caller
from envfleet.llm.losses import Losses
from envfleet.llm.turns import Failure, Opening, Player, State, Turn

Answer = Opening | Turn
Standing = tuple[Sequence[Any], State]
"""Where an episode stands: all actions so far, and what the environment shows."""
GIVEN_UP = (EnvfleetError, OSError)
"""What a fleet raises when it gives up slots, the latter when there is no process to be had."""
_LEAST_RESTARTS = 20


@dataclass(frozen=True, slots=True)
class Order:
    """What an environment is to do."""

    seed: int
    mode: str
    is_new: bool = False
    """Begin the episode of this seed first."""
    repeat: tuple[Any, ...] = ()
    """Actions to take first, whose answers are known."""
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
        actions, state = standing
        return replace(self, is_new=True, repeat=tuple(actions), expected=state)


def carry_out(player: Player, order: Order) -> Answer:
    """Do what is ordered."""
    opening = Opening("")
    if order.is_new:
        opening = player.begin(order.seed, order.mode)
        failure = opening.failure or player.repeat(order.repeat, order.expected)
        if failure is not None:
            return _failed(order, failure)
    return opening if order.named is None else player.play(order.named, order.left)


class Here:
    """Environments in this process."""

    def __init__(self) -> None:
        self.players: dict[int, Player] = {}

    def take_in(self, env_id: int, env: Any) -> None:
        """Let an environment live here, in the place of the one that did."""
        if env_id in self.players:
            _close(self.players[env_id].env)
        self.players[env_id] = Player(env)

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

    def __init__(self, make: Callable[[], Any]) -> None:
        self._player = Player(make())

    def step(self, action: Order) -> tuple[Answer, float, bool, bool, dict[str, Any]]:
        """Carry out an order."""
        return carry_out(self._player, action), 0.0, False, False, {}

    def close(self) -> None:
        """Close the environment."""
        _close(self._player.env)


class Seats:
    """Environments in the slots of a fleet; each stays with one worker for as long as both live."""

    def __init__(
        self,
        makers: Mapping[int, Callable[[], Any]],
        *,
        backend: Literal["thread", "process"],
        max_workers: int,
        start_method: StartMethod | None,
        step_timeout_s: float | None,
        max_restarts: int,
    ) -> None:
        """Build the environment of every id."""
        self._slots = {env_id: slot for slot, env_id in enumerate(makers)}
        self._ids = list(makers)
        self._losses = Losses(max_restarts)
        self.fleet = open_fleet(
            [_seat_of(make) for make in makers.values()],
            min(max_workers, len(makers)),
            start_method,
            backend=backend,
            step_timeout_s=step_timeout_s,
            max_restarts=max_restarts,
        )
        self._is_ordered: dict[int, Order] = {}

    @property
    def ids(self) -> list[int]:
        """Who lives here."""
        return list(self._slots)

    def refresh(self) -> None:
        """Forget the past: a new episode begins for everybody."""
        self._losses.begin_episodes()
        self.fleet.reset([ResetPlan()] * self.fleet.num_slots)

    def send(self, orders: Mapping[int, Order]) -> None:
        """Have these environments begin with their orders."""
        self._is_ordered = dict(orders)
        self._losses.begin_turn()
        gone = self.fleet.quarantined
        reached = {one: order for one, order in orders.items() if self._slots[one] not in gone}
        if reached:
            slots = [self._slots[env_id] for env_id in reached]
            self.fleet.send(batch_of(list(reached.values())), slots)

    def recv(
        self, standing_of: Callable[[int], Standing]
    ) -> tuple[dict[int, Answer], dict[int, str]]:
        """Everybody's answer, and who has to come home, with the reason."""
        answers: dict[int, Answer] = {}
        leaving: dict[int, str] = {}
        self._bury(answers)
        while missing := self._is_ordered.keys() - answers.keys() - leaving.keys():
            try:
                batch = self.fleet.recv(min_slots=1)
                lost: list[int] = []
                for row, slot in enumerate(batch.slots.tolist()):
                    env_id = self._ids[slot]
                    if batch.valid[row]:
                        answers[env_id] = batch.obs[row]
                    elif env_id in missing:
                        lost.append(env_id)
                self._judge(batch.incidents, answers, leaving)
                again = [one for one in lost if one not in answers and one not in leaving]
                if again:
                    ordered = self._is_ordered
                    self._ask_again({one: ordered[one].anew(standing_of(one)) for one in again})
            except GIVEN_UP:
                if not self._bury(answers):
                    raise
        return answers, leaving

    def _bury(self, answers: dict[int, Answer]) -> bool:
        """Answer for those whom nobody can build again; whether there are any."""
        has_any = False
        for slot, error in self.fleet.quarantined.items():
            env_id = self._ids[slot]
            if env_id in self._is_ordered and env_id not in answers:
                order, has_any = self._is_ordered[env_id], True
                reason = " ".join(str(error).partition("\n")[0].split())
                doing = "reset" if order.named is None else "step"
                error_said = f"it was lost and could not be built again: {reason}"
                answers[env_id] = _failed(order, Failure(doing, error_said))
        return has_any

    def close(self) -> None:
        """End the fleet."""
        self.fleet.close()

    def _ask_again(self, orders: Mapping[int, Order]) -> None:
        slots = [self._slots[env_id] for env_id in orders]
        self.fleet.reset([ResetPlan()] * len(slots), slots)
        self.fleet.send(batch_of(list(orders.values())), slots)

    def _judge(
        self,
        incidents: Sequence[Incident],
        answers: dict[int, Answer],
        leaving: dict[int, str],
    ) -> None:
        """Settle those that have cost too many workers to be asked again."""
        for incident in incidents:
            env_id = self._ids[incident.slot]
            if env_id not in self._is_ordered or env_id in answers or env_id in leaving:
                continue
            verdict = self._losses.add(env_id, incident)
            if verdict.what == "here":
                leaving[env_id] = verdict.why
            elif verdict.what == "failed":
                order = self._is_ordered[env_id]
                doing = "reset" if order.named is None else "step"
                answers[env_id] = _failed(order, Failure(doing, verdict.why))


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
        deadlines=Deadlines(step_s=step_timeout_s),
        on_failure="restart",
        # this room counts for itself, by what a loss was due to; this is for those that cannot even
        # be built again
        restarts=RestartPolicy(max_restarts=max(_LEAST_RESTARTS, 2 * max_restarts)),
    )


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


def _seat_of(make: Callable[[], Any]) -> Callable[[], Seat]:
    return lambda: Seat(make)


def batch_of(orders: Sequence[Any]) -> Any:
    """Orders as a batch of actions, whatever they are made of."""
    batch = np.empty(len(orders), object)
    for place, order in enumerate(orders):
        batch[place] = order
    return batch
