"""What becomes of a trajectory that failed: `agent_proxy.on_failure`.

| policy | a failed trajectory |
|---|---|
| retry | begins again from the same state, with other random numbers for the model |
| mask | is kept, and marked to be left out of training |
| refill | has its whole group begin again from another state, so that every group is complete |
| raise | ends the rollout, which can be resumed |

Law: a decision depends on the trajectories of one group only. A trajectory that used up a budget
is marked and not played again: the next one would fail alike. When all attempts are used up,
`retry` marks the trajectory and `refill` its whole group. What ended for want of answers, by the
engine or a budget, is taken up where it stopped when the rollout is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from envfleet.errors import RolloutFailed
from envfleet.llm.play_rules import TrajectoryTask
from envfleet.llm.rollout_options import RolloutOptions
from envfleet.llm.trajectories import Trajectory

SEED_STEP = 1_000_000
"""How far apart the seeds of a group's attempts are, with `refill`."""


@dataclass(frozen=True, slots=True)
class TrajectoryDecision:
    """What follows from the end of a trajectory."""

    finals: tuple[Trajectory, ...] = ()
    """Those that are final now."""
    tasks: tuple[TrajectoryTask, ...] = ()
    """What is to be played in addition."""
    changed: tuple[Trajectory, ...] = ()
    """Those that ended before and are marked now, or no longer."""


class FailurePolicy:
    """Decides about trajectories as they end."""

    def __init__(self, options: RolloutOptions, group_size: int) -> None:
        self._options, self._group_size = options, group_size
        self._ended: dict[int, list[Trajectory]] = {}
        """With `refill`: those of each group that have ended in this attempt."""

    @property
    def is_refill(self) -> bool:
        """Whether all trajectories of a group are of the same attempt."""
        return self._options.on_failure == "refill"

    def ended(self, trajectory: Trajectory) -> TrajectoryDecision:
        """Decide about a trajectory that is over, and mark it if it is to be left out.

        Raises:
            RolloutFailed: It failed, and the policy is `raise`.
        """
        failure, policy = trajectory.failure, self._options.on_failure
        # in a group that is played as a whole a trajectory is also marked for the others
        was_masked = trajectory.is_masked and self.is_refill
        trajectory.is_masked = failure is not None or was_masked
        if failure is not None and policy == "raise":
            raise RolloutFailed(
                trajectory.env_id,
                trajectory.tag,
                len(trajectory.turns),
                failure.reason,
                failure.error,
            )
        if self.is_refill:
            return self._refill(trajectory)
        may_retry = failure is not None and policy == "retry" and failure.reason != "budget"
        if may_retry and trajectory.attempt + 1 < self._options.max_attempts:
            return TrajectoryDecision(tasks=(next_attempt(trajectory),))
        return TrajectoryDecision(finals=(trajectory,))

    def _refill(self, trajectory: Trajectory) -> TrajectoryDecision:
        group = self._ended.setdefault(trajectory.group_id, [])
        group.append(trajectory)
        if len(group) < self._group_size:
            return TrajectoryDecision()
        del self._ended[trajectory.group_id]
        failures = [one.failure for one in group if one.failure is not None]
        if not failures:
            return TrajectoryDecision(finals=tuple(group), changed=_masked(group, False))
        is_over = trajectory.attempt + 1 >= self._options.max_attempts
        if is_over or any(one.reason == "budget" for one in failures):
            return TrajectoryDecision(finals=tuple(group), changed=_masked(group, True))
        return TrajectoryDecision(tasks=tuple(next_attempt(one, SEED_STEP) for one in group))


def next_attempt(trajectory: Trajectory, seed_step: int = 0) -> TrajectoryTask:
    """The task that plays a trajectory again."""
    return TrajectoryTask(
        trajectory.env_id,
        trajectory.group_id,
        trajectory.tag,
        trajectory.seed + seed_step,
        trajectory.attempt + 1,
    )


def _masked(group: Sequence[Trajectory], is_masked: bool) -> tuple[Trajectory, ...]:
    """Mark a whole group or no longer; those for which this is new."""
    changed = tuple(one for one in group if one.is_masked != is_masked)
    for one in changed:
        one.is_masked = is_masked
    return changed


def after_interruption(
    task: TrajectoryTask, found: Trajectory | None, group_attempt: int, policy: FailurePolicy
) -> TrajectoryDecision:
    """What is left to do for one environment of a rollout that was interrupted.

    Args:
        task: Its first attempt.
        found: Its last attempt, as far as it came.
        group_attempt: The highest attempt of its group.
        policy: Hears of it if it has ended.
    """
    wanted = group_attempt if policy.is_refill else 0
    if found is None or found.attempt < wanted:
        return TrajectoryDecision(
            tasks=(replace(task, seed=task.seed + wanted * SEED_STEP, attempt=wanted),)
        )
    if not found.is_done or _lacked_answers(found):
        return TrajectoryDecision(tasks=(taken_up(found),))
    return policy.ended(found)


def taken_up(trajectory: Trajectory) -> TrajectoryTask:
    """The task that goes on with a trajectory."""
    return TrajectoryTask(
        trajectory.env_id,
        trajectory.group_id,
        trajectory.tag,
        trajectory.seed,
        trajectory.attempt,
        tuple(trajectory.turns),
        is_begun=True,
    )


def _lacked_answers(trajectory: Trajectory) -> bool:
    """Whether an outage or a budget ended it, which the user may have mended before resuming."""
    return trajectory.failure is not None and trajectory.failure.reason in ("engine", "budget")
