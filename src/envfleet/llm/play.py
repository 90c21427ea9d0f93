"""Plays trajectories: each goes on as soon as it can; none waits for another.

    task ─► seat ─► reset ─► prompt ─► model ─► parse ─► step ─┬─► ... ─► end
                               ▲──────────── turn is over ─────┘

The same code plays in this process and in workers. Turns that are known already, from a journal,
are answered from there: nothing is asked twice, and the environment must do again what it did.
Law: a trajectory depends on its task and on the model's answers to it only. One that fails ends
with a reason, and no other is affected.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from envfleet.errors import InferenceError
from envfleet.llm.inference.continuation import new_messages
from envfleet.llm.inference.types import GenerateRequest, Generation, Message
from envfleet.llm.parsing import parse_response
from envfleet.llm.play_rules import PlayRules, TrajectoryTask, save_images
from envfleet.llm.prompts import PromptInput
from envfleet.llm.seats import EnvSeats, SeatReply, SeatsLost
from envfleet.llm.trajectories import (
    FailureReason,
    Trajectory,
    TrajectoryFailure,
    TrajectoryTurn,
    TurnTimes,
)
from envfleet.llm.turns import (
    IMAGE_MARK,
    NOT_REPEATED,
    EpisodeRequest,
    EpisodeStart,
    State,
    Turn,
    TurnRequest,
)

Ask = Callable[[GenerateRequest], "Future[Generation]"]
POLL_S = 2e-3
"""How long to wait for the model before looking at environments in workers again."""
TICK_S = 0.25
_SAME = ("state", "actions_left", "actions", "reward", "penalty", "is_valid")
"""What a turn that is played again must have in common with its record."""


class PlayListener(Protocol):
    """Hears of everything that happens to trajectories."""

    def begun(self, trajectory: Trajectory) -> None:
        """It has begun; not called for one that is taken up again."""
        ...

    def turned(self, trajectory: Trajectory, turn: TrajectoryTurn) -> None:
        """A turn that was not known is over."""
        ...

    def ended(self, trajectory: Trajectory) -> None:
        """It is over."""
        ...


class TaskSource(Protocol):
    """Where tasks come from."""

    def next(self) -> TrajectoryTask | None:
        """The next one; None if there is none now."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether there will be none."""
        ...


@dataclass(slots=True, eq=False)
class _Live:
    """A trajectory that is being played."""

    task: TrajectoryTask
    trajectory: Trajectory
    seat: int
    begun_s: float
    state: State = ""
    num_actions: int = 0
    num_invalid: int = 0
    """Turns in a row that named no known action."""
    asked: Future[Generation] | None = None
    asked_s: float = 0.0
    messages: tuple[Message, ...] = ()
    """Of the coming turn, without those before the last answer."""
    whole: tuple[Message, ...] = ()
    """All that the model was shown last."""
    generation: Generation | None = None
    num_named: int = 0
    llm_response: str = ""
    transport_s: float = 0.0
    images: tuple[str, ...] = field(default=())


class Play:
    """Plays the tasks of a source until there are none."""

    def __init__(
        self,
        rules: PlayRules,
        seats: EnvSeats,
        ask: Ask,
        listener: PlayListener,
        source: TaskSource,
        *,
        max_live: int,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to play.

        Args:
            rules: What all trajectories have in common.
            seats: The environments.
            ask: Asks the model; must not block.
            listener: Hears of what happens, in this thread.
            source: Gives tasks.
            max_live: How many trajectories are played at once.
            on_tick: Called at least four times a second.
        """
        self._rules, self._seats, self._ask, self._listener = rules, seats, ask, listener
        self._source, self._max_live, self._on_tick = source, max_live, on_tick
        self._by_seat: dict[int, _Live] = {}
        self._answers: queue.SimpleQueue[tuple[_Live, Future[Generation]]] = queue.SimpleQueue()
        self._num_asked = 0
        self._seatless: list[TrajectoryTask] = []
        """Those for which there was no environment yet; one that is taken will be free."""
        self._held: list[Callable[[], None]] = []
        """What lockstep does once everything that was asked has been answered."""

    def run(self) -> None:
        """Play everything."""
        try:
            while True:
                self._begin_more()
                if self._by_seat:
                    self._handle(self._wait())
                elif self._source.is_over:
                    return
                else:
                    time.sleep(POLL_S)
                self._on_tick()
        finally:
            for live in self._by_seat.values():
                if live.asked is not None:
                    live.asked.cancel()

    # ---- waiting --------------------------------------------------------------------------------

    def _wait(self) -> list[Callable[[], None]]:
        """What is to be done next; waits for it a short while."""
        found: list[Callable[[], None]] = [
            partial(self._replied, reply) for reply in self._seats.recv()
        ]
        timeout_s = POLL_S if self._seats.num_away else TICK_S
        try:
            is_first = not found and self._num_asked > 0
            if not found and not self._num_asked:
                time.sleep(timeout_s)  # only environments in workers are busy
            while True:
                answer = self._answers.get(is_first, timeout_s if is_first else None)
                found.append(partial(self._answered, *answer))
                self._num_asked -= 1
                is_first = False
        except queue.Empty:
            return found

    def _handle(self, found: Sequence[Callable[[], None]]) -> None:
        if self._rules.options.rollout_mode == "lockstep":
            self._held += found
            if self._num_asked or self._seats.num_away:
                return
            found, self._held = self._held, []
        for do in found:
            do()

    # ---- one trajectory -------------------------------------------------------------------------

    def _begin_more(self) -> None:
        seatless, self._seatless = self._seatless, []
        for one in seatless:
            self._begin(one)
        while len(self._by_seat) + len(self._seatless) < self._max_live:
            task = self._source.next()
            if task is None:
                return
            self._begin(task)

    def _begin(self, task: TrajectoryTask) -> None:
        trajectory = task.new_trajectory()
        seat, problem = -1, ""
        try:
            found = self._seats.take(task.tag)
            if found is None:
                self._seatless.append(task)
                return
            seat = found
        except SeatsLost as exc:
            problem = str(exc)
        live = _Live(task, trajectory, seat, time.monotonic())
        if not task.is_begun:
            self._listener.begun(trajectory)
        if problem:
            self._fail(live, "env", problem)
            return
        self._by_seat[seat] = live
        self._seats.send(seat, EpisodeRequest(task.seed, self._rules.mode))

    def _replied(self, found: SeatReply) -> None:
        live = self._by_seat[found.seat]
        if isinstance(found.reply, EpisodeStart):
            if found.reply.failure is not None:
                self._fail(live, "env", f"reset: {found.reply.failure.error}")
                return
            live.state = found.reply.state
            self._prompt(live)
        else:
            self._turned(live, found.reply, found.env_s)

    def _prompt(self, live: _Live) -> None:
        """Ask the model about the state of an environment, unless its answer is known."""
        rules, turns = self._rules, live.trajectory.turns
        number = len(turns)
        shown = live.state if isinstance(live.state, str) else IMAGE_MARK * len(live.state)
        tag = rules.prompts[live.task.tag]
        given = PromptInput(
            tag,
            rules.proxy,
            turns,
            shown,
            rules.tags[live.task.tag].max_actions_per_traj - live.num_actions,
            rules.options.max_context_window,
        )
        try:
            messages = tuple(rules.write(given))
        except Exception as exc:  # the user's own function
            self._fail(live, "env", f"the prompt cannot be written: {type(exc).__name__}: {exc}")
            return
        so_far = self._tokens_so_far(live, messages)
        live.messages, live.whole = new_messages(messages), messages
        if not isinstance(live.state, str):
            live.images = save_images(rules, live.trajectory, live.state)
        live.asked_s = time.monotonic()
        if number < len(live.task.known):
            self._step(live, live.task.known[number].generation)
            return
        timeout_s = rules.inference.trajectory_timeout_s
        if timeout_s is not None:
            timeout_s = max(1e-3, timeout_s - (live.asked_s - live.begun_s))
        request = rules.request(live.trajectory, messages, so_far, timeout_s)
        try:
            live.asked = self._ask(request)
        except InferenceError as exc:  # the manager was closed
            self._fail(live, exc.reason, str(exc))
            return
        self._num_asked += 1
        live.asked.add_done_callback(lambda done: self._answers.put((live, done)))

    def _tokens_so_far(self, live: _Live, messages: tuple[Message, ...]) -> tuple[int, ...] | None:
        """The tokens that a conversation goes on from; None if it was written anew."""
        turns = live.trajectory.turns
        if not turns or not self._rules.continues_tokens:
            return None
        last = turns[-1].generation
        grown = (*live.whole, Message("assistant", turns[-1].llm_response))
        if last.prompt_ids is None or last.token_ids is None or messages[: len(grown)] != grown:
            return None
        return (*last.prompt_ids, *last.token_ids)

    def _answered(self, live: _Live, answer: Future[Generation]) -> None:
        live.asked = None
        try:
            generation = answer.result()
        except InferenceError as exc:
            self._fail(live, exc.reason, str(exc))
            return
        except (Exception, CancelledError) as exc:
            self._fail(live, "engine", f"{type(exc).__name__}: {exc}")
            return
        times = generation.times
        spent_s = times.queue_s + times.prefill_s + times.decode_s
        live.transport_s = max(0.0, time.monotonic() - live.asked_s - spent_s)
        self._step(live, generation)

    def _step(self, live: _Live, generation: Generation) -> None:
        rules = self._rules
        parsed = parse_response(
            rules.prefill + generation.text,
            action_sep=rules.proxy.action_sep,
            max_actions=rules.proxy.max_actions_per_turn,
            enable_think=rules.proxy.enable_think,
        )
        live.generation, live.llm_response = generation, parsed.llm_response
        live.num_named = len(parsed.actions)
        left = rules.tags[live.task.tag].max_actions_per_traj - live.num_actions
        self._seats.send(live.seat, TurnRequest(parsed.actions, left))

    def _turned(self, live: _Live, played: Turn, env_s: float) -> None:
        """A turn is over: record it, and go on."""
        rules, trajectory, generation = self._rules, live.trajectory, live.generation
        assert generation is not None
        times = TurnTimes(
            start_s=live.asked_s - rules.started_s, env_s=env_s, transport_s=live.transport_s
        )
        most = rules.tags[live.task.tag].max_actions_per_traj
        is_valid = bool(played.num_valid) and played.num_valid == live.num_named
        turn = TrajectoryTurn(
            number=len(trajectory.turns),
            state=live.state if isinstance(live.state, str) else IMAGE_MARK * len(live.state),
            images=live.images,
            actions_left=most - live.num_actions,
            new_messages=live.messages,
            prefill=rules.prefill,
            generation=generation,
            llm_response=live.llm_response,
            actions=rules.plain(played.actions),
            reward=played.reward,
            penalty=0.0 if is_valid or played.failure is not None else rules.format_penalty,
            is_valid=is_valid,
            info=rules.plain(played.info),
            times=times,
        )
        if not self._take_in(live, turn):
            problem = NOT_REPEATED.format(f"turn {turn.number + 1} leads somewhere else now")
            self._fail(live, "env", problem)
            return
        live.num_actions += len(played.actions)
        live.num_invalid = 0 if is_valid else live.num_invalid + 1
        if played.failure is not None:
            self._fail(live, "env", f"{played.failure.doing}: {played.failure.error}")
            return
        live.state = played.state
        most_invalid = rules.options.max_invalid_turns
        if played.is_done:
            self._end(live, is_success=played.is_success)
        elif most_invalid is not None and live.num_invalid >= most_invalid:
            self._fail(live, "parse", f"{live.num_invalid} turns in a row named no known action")
        elif live.num_actions >= most or len(trajectory.turns) >= rules.proxy.max_turn:
            self._end(live, is_success=False)
        else:
            self._prompt(live)

    def _take_in(self, live: _Live, turn: TrajectoryTurn) -> bool:
        """Add a turn to its trajectory; False if it is not what its record says."""
        turns = live.trajectory.turns
        if turn.number >= len(live.task.known):
            turns.append(turn)
            self._listener.turned(live.trajectory, turn)
            return True
        known = live.task.known[turn.number]
        turns.append(known)
        return all(getattr(known, name) == getattr(turn, name) for name in _SAME)

    # ---- ends -----------------------------------------------------------------------------------

    def _fail(self, live: _Live, reason: FailureReason, error: str) -> None:
        live.trajectory.failure = TrajectoryFailure(reason=reason, error=error)
        self._end(live, is_success=False)

    def _end(self, live: _Live, *, is_success: bool) -> None:
        trajectory = live.trajectory
        if live.seat >= 0:
            del self._by_seat[live.seat]
            failure: Any = trajectory.failure
            has_failed = failure is not None and failure.reason == "env"
            self._seats.give_back(live.seat, has_failed=has_failed)
        shown = live.state if isinstance(live.state, str) else IMAGE_MARK * len(live.state)
        trajectory.final_state, trajectory.is_success = shown, is_success
        trajectory.is_done = True
        self._rules.judge(trajectory)
        self._listener.ended(trajectory)
