"""One rollout under way: what waits, what is played, what is over.

It hears of everything that happens to trajectories, here or in workers, and keeps it: in the
journal, or in memory where there is none. Law: what a trajectory has done is noted before anything
follows from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from envfleet.errors import JournalError
from envfleet.llm.export import as_json
from envfleet.llm.failure_policy import (
    SEED_STEP,
    FailurePolicy,
    TrajectoryDecision,
    after_interruption,
    taken_up,
)
from envfleet.llm.journal import Journal, apply_entry, read_header
from envfleet.llm.play_rules import PlayRules, TrajectoryTask
from envfleet.llm.rollout_tally import RolloutTally
from envfleet.llm.trajectories import Trajectory, TrajectoryFailure, TrajectoryTurn
from envfleet.llm.work_share import Key

_MAY_CHANGE = frozenset(("engine", "on_failure"))
"""What may be another than it was when a rollout goes on."""
_WATCH_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """How far a rollout has come."""

    num_trajectories: int
    num_final: int
    num_turns: int
    num_tokens: int
    tokens_per_s: float
    num_queued: int
    """Requests that wait for the model."""
    num_in_flight: int
    failures: dict[str, int]
    first_errors: dict[str, str]
    """What the first failed attempt of each reason said."""
    elapsed_s: float
    """With the time before it was interrupted, if it was."""
    sample: Trajectory | None
    """The trajectory that ended last."""

    @property
    def left_s(self) -> float | None:
        """How long it will take, judged by the trajectories that are over."""
        if not self.num_final:
            return None
        return self.elapsed_s / self.num_final * (self.num_trajectories - self.num_final)


class RolloutRun:
    """One rollout under way: what waits, what is played, what is over."""

    def __init__(
        self,
        rules: PlayRules,
        llm: Any,
        tasks: Sequence[TrajectoryTask],
        journal: Journal | None,
        watch: Callable[[RolloutProgress], None] | None,
    ) -> None:
        self.rules, self._llm, self._journal, self._watch = rules, llm, journal, watch
        self.tally = RolloutTally(rules.settings.group_size)
        self._policy = FailurePolicy(rules.options, rules.settings.group_size)
        self._tasks = {task.env_id: task for task in tasks}
        self.waiting: deque[TrajectoryTask] = deque()
        self.give: Callable[[Sequence[TrajectoryTask]], None] = self.waiting.extend
        """Takes further tasks."""
        self._live: dict[Key, Trajectory] = {}
        self._kept: dict[int, Trajectory] = {}
        """Those that are over, where there is no journal to keep them."""
        self.num_losses: dict[Key, int] = {}
        """How often trajectories were lost with their workers; a `WorkShare` counts."""
        self._sample: Trajectory | None = None
        self._told_s, self._begun_s = 0.0, monotonic()
        self.num_events = 0
        self._take_up()

    def _take_up(self) -> None:
        """Find out what is left to do after what the journal tells."""
        attempts = {} if self._journal is None else self._journal.last_attempts
        group_attempts: dict[int, int] = {}
        for env_id, attempt in attempts.items():
            group = self._tasks[env_id].group_id
            group_attempts[group] = max(attempt, group_attempts.get(group, 0))
        for task in self._tasks.values():
            found = None
            if self._journal is not None and task.env_id in attempts:
                found = self._journal.read(task.env_id, attempts[task.env_id])
                self.tally.num_earlier += 0 if found is None else len(found.turns)
            attempt = group_attempts.get(task.group_id, 0)
            decision = after_interruption(task, found, attempt, self._policy)
            is_again = any(one.env_id == task.env_id for one in decision.tasks)
            if found is not None and found.is_done and not is_again:
                self.tally.add_end(found)  # it stays as it is, and so does why it failed
            self._carry_out(decision)

    # ---- tasks ----------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Environments whose trajectory is not over for good."""
        return len(self._tasks) - self.tally.num_final

    def next(self) -> TrajectoryTask | None:
        """The next task for a player in this process."""
        return self.waiting.popleft() if self.waiting else None

    @property
    def is_over(self) -> bool:
        """Whether there is none; a trajectory under way may still lead to another."""
        return not self.waiting

    def take_all(self) -> list[TrajectoryTask]:
        """All tasks that wait; none waits afterwards."""
        found = list(self.waiting)
        self.waiting.clear()
        return found

    def expected_turns(self, task: TrajectoryTask) -> float:
        """How many turns a trajectory may still have."""
        most = min(self.rules.proxy.max_turn, self.rules.tags[task.tag].max_actions_per_traj)
        return float(most - len(task.known))

    # ---- what happens to trajectories -----------------------------------------------------------

    def begun(self, trajectory: Trajectory) -> None:
        """A trajectory has begun."""
        self._live[trajectory.env_id, trajectory.attempt] = trajectory
        self.num_events += 1
        if self._journal is not None:
            self._journal.begin(trajectory)

    def turned(self, trajectory: Trajectory, turn: TrajectoryTurn) -> None:
        """A turn of it is over."""
        self._live[trajectory.env_id, trajectory.attempt] = trajectory
        self.num_events += 1
        if self._journal is not None:
            self._journal.turn(trajectory, turn)
        self.tally.add_turn(turn)

    def ended(self, trajectory: Trajectory) -> None:
        """It is over."""
        self._live.pop((trajectory.env_id, trajectory.attempt), None)
        self.num_events += 1
        self._sample = trajectory
        self.tally.add_end(trajectory)
        try:
            decision = self._policy.ended(trajectory)
        finally:
            if self._journal is not None:
                self._journal.end(trajectory)
        self._carry_out(decision)

    def _carry_out(self, decision: TrajectoryDecision) -> None:
        for trajectory in decision.changed:
            if self._journal is not None:
                self._journal.end(trajectory)
        for trajectory in decision.finals:
            self.tally.add_final(trajectory)
            if self._journal is None:
                self._kept[trajectory.env_id] = trajectory
        for task in decision.tasks:
            if task.is_begun:
                trajectory = task.new_trajectory()
                trajectory.turns.extend(task.known)
                self._live[task.env_id, task.attempt] = trajectory
        self.give(decision.tasks)

    # ---- what workers say -----------------------------------------------------------------------

    def take_in(self, entry: dict[str, Any]) -> None:
        """Something happened to a trajectory in a worker."""
        trajectory = apply_entry(self._live, entry)
        if trajectory is None:
            return
        if entry["kind"] == "begin":
            self.begun(trajectory)
        elif entry["kind"] == "turn":
            self.turned(trajectory, trajectory.turns[-1])
        else:
            self.ended(trajectory)

    def lost(self, keys: Sequence[Key]) -> None:
        """Workers that played these trajectories are gone."""
        again = []
        for key in keys:
            trajectory = self._live.get(key)
            if self.num_losses[key] > self.rules.settings.max_restarts:
                self._give_up(key)
            elif trajectory is not None:
                again.append(taken_up(trajectory))
            else:
                again.append(self._fresh(key))
        self.give(again)

    def _fresh(self, key: Key) -> TrajectoryTask:
        env_id, attempt = key
        seed_step = SEED_STEP * attempt if self._policy.is_refill else 0
        task = self._tasks[env_id]
        return replace(task, attempt=attempt, seed=task.seed + seed_step)

    def _give_up(self, key: Key) -> None:
        trajectory = self._live.get(key)
        if trajectory is None:
            trajectory = self._fresh(key).new_trajectory()
            self.begun(trajectory)
        count = self.num_losses[key]
        error = f"its worker was lost {count} times"
        trajectory.failure = TrajectoryFailure(reason="env", error=error)
        trajectory.is_done, trajectory.final_state = True, ""
        self.rules.judge(trajectory)
        self.ended(trajectory)

    # ---- what others see ------------------------------------------------------------------------

    def tick(self) -> None:
        """Tell how far it has come, a few times a second."""
        now_s = monotonic()
        if self._watch is None or now_s - self._told_s < _WATCH_EVERY_S:
            return
        self._told_s = now_s
        stats = self._llm.stats
        self._watch(
            RolloutProgress(
                num_trajectories=len(self._tasks),
                num_final=self.tally.num_final,
                num_turns=self.tally.num_turns,
                num_tokens=self.tally.num_tokens,
                tokens_per_s=self.tally.num_tokens / max(1e-9, now_s - self._begun_s),
                num_queued=stats.num_queued,
                num_in_flight=stats.num_in_flight,
                failures=dict(self.tally.failures),
                first_errors=dict(self.tally.first_errors),
                elapsed_s=now_s - self.rules.started_s,
                sample=self._sample,
            )
        )

    def trajectories(self) -> Sequence[Trajectory]:
        """The last attempt of each environment."""
        if self._journal is not None:
            return self._journal.trajectories()
        return [self._kept[env_id] for env_id in sorted(self._kept)]


# ---- headers ------------------------------------------------------------------------------------


def header_of(rules: PlayRules, seed: int, engine: str) -> dict[str, Any]:
    """What a rollout depends on, besides the model."""
    settings, proxy = rules.settings, rules.proxy
    return {
        "seed": seed,
        "mode": settings.mode,
        "group_size": settings.group_size,
        "groups": [[tag.name, count] for tag, count in settings.groups],
        "environments": {
            name: [tag.type_name, tag.env_config, tag.max_actions_per_traj]
            for name, tag in rules.tags.items()
        },
        "format_penalty": settings.format_penalty,
        "max_turn": proxy.max_turn,
        "action_sep": proxy.action_sep,
        "max_actions_per_turn": proxy.max_actions_per_turn,
        "enable_think": proxy.enable_think,
        "max_context_window": rules.options.max_context_window,
        "max_invalid_turns": rules.options.max_invalid_turns,
        "on_failure": rules.options.on_failure,
        "engine": engine,
    }


def check_header(folder: Path, wanted: dict[str, Any]) -> None:
    """Refuse to go on with the journal of another rollout."""
    header, wanted = read_header(folder), as_json(wanted)
    for name, value in wanted.items():
        if name not in _MAY_CHANGE and header.get(name) != value:
            raise another_rollout(folder, name, header.get(name), value)


def another_rollout(folder: Path, name: str, found: Any, wanted: Any) -> JournalError:
    """The error for an option that a rollout began with another value of."""
    name, found, wanted = _difference(name, found, wanted)
    return JournalError(
        str(folder),
        f"holds another rollout: its {name} is {found!r:.80} and not {wanted!r:.80}; choose "
        "another folder, or give it the same options",
    )


def _difference(name: str, found: Any, wanted: Any) -> tuple[str, Any, Any]:
    """Where two values differ first, and what they are there."""
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        found, wanted = dict(enumerate(found)), dict(enumerate(wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in (*wanted, *found):
            if found.get(key) != wanted.get(key):
                return _difference(f"{name}.{key}", found.get(key), wanted.get(key))
    return name, found, wanted
