"""Trials played by an actor: one after another in one environment, or side by side on a fleet.

Everything that a trial draws is in its `TrialPlan`, so it does not depend on what is played beside
it, on the number of workers, or on their speed. Law: `play_one` and `play_many` give the same
rollouts for the same plans, bit for bit.

All rows of the fleet act in one batch, all slots step together, and a slot whose trial is over
begins the next one meanwhile. Waiting for single slots was measured to cost this process three
times as much per step.

Shapes: T is a step of a trial, N a slot, D a number of an observation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from envfleet.engine import Batch, Fleet, ResetPlan
from envfleet.meta.buffers import Rollout
from envfleet.meta.parallel import ParallelEnvManager
from envfleet.runs.time_report import OF_ROLLOUTS, fleet_seconds

__all__ = ["Actor", "PlayedTrial", "Seconds", "Started", "TrialPlan", "play_many", "play_one"]

Array = npt.NDArray[Any]
SUCCESSES = ("is_goal_state", "success")
"""Infos that say that the goal is reached."""


class ActorState(Protocol):
    """What an actor remembers of trials; the first axis of every array is the trial."""

    reward: Array
    """Of the step before; filled in by the caller."""

    def reset(self, rows: Any) -> None:
        """Trials begin in these rows."""


class Actor(Protocol):
    """Acts for many trials at once.

    Row i of everything belongs to trial i, and its result depends on no other row.
    """

    def initial_state(self, num_rows: int) -> Any:
        """What is remembered at the start of trials, an `ActorState`."""

    def act(
        self, state: Any, obs: Array, noise: Array | None, deterministic: bool
    ) -> tuple[Array, Any]:
        """Actions as environments take them, and what is remembered after that."""


@dataclass(frozen=True, slots=True, eq=False)
class TrialPlan:
    """All that a trial draws."""

    number: int
    """Its place among all rollouts."""
    task: Any
    """The number of its task; None lets the environment draw one by the seed."""
    seed: int
    """Of the environment."""
    noise: Array | None = None
    """What the actions are drawn by, [T, number]; None is for the best ones."""
    actions: Array | None = None
    """Actions in place of the actor's, one for each step."""


@dataclass(frozen=True, slots=True, eq=False)
class PlayedTrial(Rollout):
    """A rollout, and which one it is.

    `terms` is True where nothing can follow: the last episode ended by itself, and not by its time
    limit. A goal that is reached does not end an episode, so it is no such end either.
    """

    number: int
    task: Any
    is_success: bool
    """Whether the environment said that its goal was reached."""

    def episode_returns(self, flag_at: int | None, episodes: int) -> Array:
        """The return of each episode; `flag_at` is where observations have the done flag."""
        ends = np.array([len(self)]) if flag_at is None else self._ends(flag_at)
        returns = np.zeros(episodes)
        starts = [0, *ends[:-1]]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            returns[number] = self.rewards[start:end].sum()
        return returns

    def _ends(self, flag_at: int) -> Array:
        ends: Array = np.flatnonzero(self.obs[1:, flag_at] == 1.0) + 1
        return ends


@dataclass(frozen=True, slots=True)
class Started:
    """Where and when this process began to collect."""

    env_steps: int = 0
    at_s: float = field(default_factory=time.perf_counter)

    def figures(self, env_steps: int) -> dict[str, float]:
        """How far it has come, and how fast; `env_steps` are those of the whole run."""
        spent_s = max(time.perf_counter() - self.at_s, 1e-9)
        return {
            "z/env_steps": env_steps,
            "z/time_cost": spent_s,
            "z/fps": (env_steps - self.env_steps) / spent_s,
        }


class Seconds:
    """What the time of collecting went into."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys(OF_ROLLOUTS, 0.0)
        self.inference_s = self.fleet_s = self.env_s = 0.0

    @contextmanager
    def accounted(self, fleet: Fleet | None) -> Iterator[None]:
        """Add up what is done meanwhile; without a fleet the environment is in this process."""
        before = None if fleet is None else fleet.timings
        self.inference_s = self.fleet_s = self.env_s = 0.0
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - begun_s
            parts = {"environments": self.env_s}
            if fleet is not None and before is not None:
                timings = {name: now_s - before[name] for name, now_s in fleet.timings.items()}
                parts = fleet_seconds(timings, len(fleet.bounds), self.fleet_s)
            parts["inference"] = self.inference_s
            parts["bookkeeping"] = elapsed_s - sum(parts.values())
            for name, spent_s in parts.items():
                self.parts[name] += max(0.0, spent_s)

    def shared(self, parts: Mapping[str, float], num_sharers: int, elapsed_s: float) -> None:
        """Add up what several others did side by side in this time."""
        for name, spent_s in parts.items():
            self.parts[name] += spent_s / num_sharers
        self.parts["waiting"] += max(0.0, elapsed_s - sum(parts.values()) / num_sharers)


# ---- one after another ---------------------------------------------------------------------------


def play_one(
    env: Any, actor: Actor, plan: TrialPlan, *, deterministic: bool, seconds: Seconds
) -> PlayedTrial:
    """Play one trial in this process."""
    options = None if plan.task is None else {"task": plan.task}
    first, _ = env.reset(seed=plan.seed, options=options)
    state = actor.initial_state(1)
    obs, actions, rewards, is_over, is_success = [first], list[Array](), list[float](), False, False
    while not is_over:
        begun_s, step = time.perf_counter(), len(actions)
        if plan.actions is not None:
            action = plan.actions[step]
        else:
            noise = None if plan.noise is None else plan.noise[step : step + 1]
            chosen, state = actor.act(state, obs[-1][None], noise, deterministic)
            action = chosen[0]
        acted_s = time.perf_counter()
        found, reward, terminated, truncated, info = env.step(action)
        seconds.env_s += time.perf_counter() - acted_s
        seconds.inference_s += acted_s - begun_s
        obs.append(found)
        actions.append(action)
        rewards.append(float(reward))
        state.reward[0] = reward
        is_over = bool(terminated or truncated)
        is_success = is_success or any(info.get(name, False) for name in SUCCESSES)
    terms = np.zeros(len(rewards), np.bool_)
    terms[-1] = terminated
    played = np.stack(obs), np.stack(actions), np.array(rewards), terms
    return PlayedTrial(*played, plan.number, plan.task, is_success)


# ---- side by side --------------------------------------------------------------------------------


def play_many(
    manager: ParallelEnvManager,
    actor: Actor,
    plans: Sequence[TrialPlan],
    *,
    deterministic: bool,
    seconds: Seconds,
) -> list[PlayedTrial]:
    """Play trials in all workers, which go at their own pace; the rollouts in the plans' order.

    Raises:
        StillInFlight: A worker was asked for something that was not received.
    """
    if not plans:
        return []
    manager.check_idle()
    table = _TrialCollection(manager, actor, plans, deterministic, seconds)
    try:
        with seconds.accounted(manager.fleet):
            done = table.play()
    except BaseException:
        if not manager.fleet.is_closed:
            manager.fleet.drop()  # what other slots still owe is not going to be received
        raise
    return [done[plan.number] for plan in plans]


def _has(batch: Batch, name: str) -> bool:
    """Whether some row has an info of this name; putting all infos together takes much longer."""
    return any(name in schema.keys for schema, _, _ in batch.packed.groups) or any(
        name in info for _, info in batch.plain
    )


class _TrialCollection:
    """The trials that are being played, one per slot."""

    def __init__(
        self,
        manager: ParallelEnvManager,
        actor: Actor,
        plans: Sequence[TrialPlan],
        deterministic: bool,
        seconds: Seconds,
    ) -> None:
        space, horizon = manager.observation_space, manager.horizon_bamdp
        assert space.shape is not None
        assert horizon is not None
        self._fleet, self._actor, self._seconds = manager.fleet, actor, seconds
        self._deterministic, self._plans = deterministic, deque(plans)
        num, first = manager.num_workers, plans[0]
        self._everyone = np.arange(num)
        self._obs = np.zeros((num, horizon + 1, *space.shape), np.float32)
        self._rewards = np.zeros((num, horizon))
        self._actions: Array | None = None
        self._given, self._noise = (
            None if one is None else np.zeros((num, horizon + 1, *one.shape[1:]), one.dtype)
            for one in (first.actions, first.noise)
        )
        """Of the plans that are being played; the last row is for slots that are done."""
        self._seen = np.zeros((num, *space.shape), np.float32)
        """What each slot observed last."""
        self._state = actor.initial_state(num)
        self._chosen: Array = self._seen
        """The actions that were sent last, by slot."""
        self._times = np.zeros(num, np.intp)
        """How many steps each slot's trial has."""
        self._is_success = np.zeros(num, np.bool_)
        self._trial: list[TrialPlan | None] = [None] * num
        self._done: dict[int, PlayedTrial] = {}

    def play(self) -> dict[int, PlayedTrial]:
        """Play all plans; the rollouts by number."""
        self._begin(self._everyone)
        while self._fleet.in_flight:
            begun_s = time.perf_counter()
            batch = self._fleet.recv()
            self._seconds.fleet_s += time.perf_counter() - begun_s
            slots = batch.slots
            self._keep(batch)
            if batch.has_events and (ended := batch.terminated | batch.truncated).any():
                whole = ended & batch.valid
                self._finish(slots[whole], batch.terminated[whole])
                self._again(slots[ended & ~batch.valid])
                self._begin(slots[ended])
                slots = slots[~ended]
            if len(slots):
                self._act(slots)
        return self._done

    def _again(self, slots: Array) -> None:
        """Put back the trials of environments that were lost and restarted: they begin anew."""
        for slot in slots.tolist():
            plan = self._trial[slot]
            assert plan is not None
            self._plans.appendleft(plan)

    def _begin(self, slots: Array) -> None:
        """Begin the next trials in these slots, as far as there are any."""
        slots = slots[: len(self._plans)]
        if not len(slots):
            return
        plans = [self._plans.popleft() for _ in slots]
        for slot, plan in zip(slots.tolist(), plans, strict=True):
            self._trial[slot] = plan
            for mine, drawn in ((self._given, plan.actions), (self._noise, plan.noise)):
                if mine is not None and drawn is not None:
                    mine[slot, : len(drawn)] = drawn
        self._times[slots], self._is_success[slots] = 0, False
        resets = [
            ResetPlan(plan.seed, None if plan.task is None else {"task": plan.task})
            for plan in plans
        ]
        begun_s = time.perf_counter()
        self._fleet.send_reset(resets, self._named(slots))
        self._seconds.fleet_s += time.perf_counter() - begun_s

    def _keep(self, batch: Batch) -> None:
        """Store rows: first observations of trials, and steps."""
        slots = batch.slots
        self._seen[slots], self._state.reward[slots] = batch.obs, batch.rewards
        if batch.has_events and not batch.valid.all():
            begun, stepped = slots[~batch.valid], batch.valid
            self._obs[begun, 0] = batch.obs[~stepped]
            # not earlier: all rows act, so those that waited for a reset remember something
            self._state.reset(begun)
            slots, obs, rewards = slots[stepped], batch.obs[stepped], batch.rewards[stepped]
        else:
            obs, rewards = batch.obs, batch.rewards
        if not len(slots):
            return
        if self._actions is None:
            shape = (*self._rewards.shape, *self._chosen.shape[1:])
            self._actions = np.zeros(shape, self._chosen.dtype)
        times = self._times[slots]
        self._actions[slots, times] = self._chosen[slots]
        self._rewards[slots, times] = rewards
        self._times[slots] = times = times + 1
        self._obs[slots, times] = obs
        for name in SUCCESSES:
            if _has(batch, name):
                self._is_success[batch.slots] |= np.asarray(batch.infos[name], np.bool_)

    def _finish(self, slots: Array, terminated: Array) -> None:
        """Take out the trials of these slots."""
        for slot, is_terminal in zip(slots.tolist(), terminated.tolist(), strict=True):
            plan, steps = self._trial[slot], int(self._times[slot])
            assert plan is not None
            assert self._actions is not None
            terms = np.zeros(steps, np.bool_)
            terms[-1] = is_terminal
            self._done[plan.number] = PlayedTrial(
                self._obs[slot, : steps + 1].copy(),
                self._actions[slot, :steps].copy(),
                self._rewards[slot, :steps].copy(),
                terms,
                plan.number,
                plan.task,
                bool(self._is_success[slot]),
            )

    def _act(self, slots: Array) -> None:
        """Choose the next actions of these slots, and send them."""
        begun_s = time.perf_counter()
        self._chosen = self._all_actions()
        acted_s = time.perf_counter()
        named = self._named(slots)
        self._fleet.send(self._chosen if named is None else self._chosen[slots], named)
        self._seconds.inference_s += acted_s - begun_s
        self._seconds.fleet_s += time.perf_counter() - acted_s

    def _all_actions(self) -> Array:
        """An action for every slot, also for those that need none."""
        if self._given is not None:
            return self._given[self._everyone, self._times]
        noise = None if self._noise is None else self._noise[self._everyone, self._times]
        chosen, self._state = self._actor.act(self._state, self._seen, noise, self._deterministic)
        return chosen

    def _named(self, slots: Array) -> Array | None:
        """The same for the fleet, which is quicker if it is asked for all."""
        return None if len(slots) == len(self._everyone) else slots
