"""What a rollout adds up while it goes on, and what its figures mean.

Law: nothing here holds a trajectory; a few numbers of each are kept.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from envfleet.llm.inference.types import InferenceStats
from envfleet.llm.metrics import TagSummary
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn

_STRAGGLERS = 0.35
"""Share of the time after nine tenths of all trajectories were over that makes it the verdict."""
_BUSY = 0.6
_IDLE = 0.3
"""Where the model and the environments were both busy for less, neither held the rollout up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTimings:
    """Where the time of a rollout went, in seconds; sums of all trajectories but for `wall_s`."""

    wall_s: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    env_s: float = 0.0
    transport_s: float = 0.0
    journal_s: float = 0.0
    busy_share: float = 0.0
    """Share of the time in which the model had a request."""
    capacity_share: float = 0.0
    """Share of the model's places that were taken, of all the time."""
    tail_s: float = 0.0
    """From the end of nine tenths of the trajectories to the end of all."""
    num_turns: int = 0
    num_tokens: int = 0
    num_earlier: int = 0
    """Turns that had been played before the rollout went on; nothing else counts them."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the model wrote per second."""
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Final:
    """What is kept of a trajectory that is over."""

    tag: str
    group_id: int
    is_success: bool
    reward: float
    penalty: float
    num_actions: int
    num_turns: int
    has_failed: bool
    metrics: dict[str, float]


class RolloutTally:
    """Adds up turns and trajectories."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._finals: dict[int, _Final] = {}
        self._started_s = time.monotonic()
        self._ends_s: list[float] = []
        self.failures: Counter[str] = Counter()
        """Attempts that failed, by reason."""
        self.first_errors: dict[str, str] = {}
        """What the first of them said."""
        self.num_attempts = 0
        self.num_masked = self.num_final = self.num_turns = self.num_tokens = 0
        self.num_earlier = 0
        """Turns that a journal knew."""
        self._sums = dict.fromkeys(("queue", "prefill", "decode", "env", "transport"), 0.0)

    def add_turn(self, turn: TrajectoryTurn) -> None:
        """A turn has been played."""
        self.num_turns += 1
        self.num_tokens += turn.generation.num_tokens
        times, model = turn.times, turn.generation.times
        spent = (model.queue_s, model.prefill_s, model.decode_s, times.env_s, times.transport_s)
        for name, seconds in zip(self._sums, spent, strict=True):
            self._sums[name] += seconds

    def add_end(self, trajectory: Trajectory) -> None:
        """An attempt is over, be it final or not."""
        self.num_attempts += 1
        if trajectory.failure is not None:
            self.failures[trajectory.failure.reason] += 1
            self.first_errors.setdefault(trajectory.failure.reason, trajectory.failure.error)

    def add_final(self, trajectory: Trajectory) -> None:
        """A trajectory is over for good."""
        self._ends_s.append(time.monotonic() - self._started_s)
        self.num_final += 1
        self.num_masked += trajectory.is_masked
        self._finals[trajectory.env_id] = _Final(
            trajectory.tag,
            trajectory.group_id,
            trajectory.is_success,
            trajectory.reward,
            trajectory.penalty,
            sum(len(turn.actions) for turn in trajectory.turns),
            len(trajectory.turns),
            trajectory.failure is not None,
            trajectory.metrics,
        )

    def _by_tag(self) -> dict[str, list[_Final]]:
        """In the order of environments: sums must not depend on who was first."""
        found: dict[str, list[_Final]] = {}
        for _, one in sorted(self._finals.items()):
            found.setdefault(one.tag, []).append(one)
        return found

    def tags(self) -> tuple[TagSummary, ...]:
        """Means per tag."""
        return tuple(
            TagSummary(
                tag,
                len(alike),
                success=_tally_mean([float(one.is_success) for one in alike]),
                reward=_tally_mean([one.reward for one in alike]),
                penalty=_tally_mean([one.penalty for one in alike]),
                num_actions=_tally_mean([one.num_actions for one in alike]),
                num_turns=_tally_mean([one.num_turns for one in alike]),
                num_failures=sum(one.has_failed for one in alike),
            )
            for tag, alike in self._by_tag().items()
        )

    def metrics(self) -> dict[str, float]:
        """Every metric, as a mean over all environments of its tag; one without it counts as 0."""
        found: dict[str, float] = {}
        for tag, alike in self._by_tag().items():
            sums: dict[str, float] = {}
            for one in alike:
                for key, value in one.metrics.items():
                    sums[key] = sums.get(key, 0.0) + value
            solved = {one.group_id for one in alike if one.is_success}
            sums[f"{tag}/pass@{self._group_size}"] = sum(one.group_id in solved for one in alike)
            found |= {key: total / len(alike) for key, total in sums.items()}
        return found

    def timings(
        self, before: InferenceStats, after: InferenceStats, journal_s: float
    ) -> RolloutTimings:
        """Where the time went."""
        wall_s = max(1e-9, time.monotonic() - self._started_s)
        ends_s = sorted(self._ends_s)
        tail_s = wall_s - ends_s[int(0.9 * (len(ends_s) - 1))] if ends_s else 0.0
        busy_s = after.busy_s - before.busy_s
        occupied_s = after.occupied_s - before.occupied_s
        return RolloutTimings(
            wall_s=wall_s,
            **{f"{name}_s": seconds for name, seconds in self._sums.items()},
            journal_s=journal_s,
            busy_share=min(1.0, busy_s / wall_s),
            capacity_share=min(1.0, occupied_s / wall_s / max(1, after.max_concurrency)),
            tail_s=tail_s,
            num_turns=self.num_turns,
            num_tokens=self.num_tokens,
            num_earlier=self.num_earlier,
        )


def rollout_verdict(timings: RolloutTimings, num_workers: int, num_trajectories: int) -> str:
    """What a rollout spent its time on, and what to change, in a sentence."""
    env_share = min(1.0, timings.env_s / max(1, num_workers) / timings.wall_s)
    tail_share = timings.tail_s / timings.wall_s
    if timings.busy_share < _IDLE and env_share < _IDLE:
        return (
            f"Too short to judge: the model was busy for {timings.busy_share:.0%} of the time and "
            f"environments for {env_share:.0%}; the rest is the start of workers and bookkeeping."
        )
    if timings.busy_share < _BUSY and env_share > timings.busy_share / 2:
        return (
            f"Env-bound: environments took {env_share:.0%} of the time of {num_workers} "
            f"process{'es' if num_workers > 1 else ''} and the model was busy for "
            f"{timings.busy_share:.0%}; play them in more workers "
            "(agent_proxy.use_parallel_rollout=true, agent_proxy.parallel_n_jobs)."
        )
    if num_trajectories > 1 and tail_share > _STRAGGLERS and timings.capacity_share < _BUSY:
        return (
            f"Straggler-bound: the last tenth of the trajectories took {tail_share:.0%} of the "
            f"time, and {timings.capacity_share:.0%} of the model's places were taken; play more "
            "trajectories at once, or shorten the longest (llm.max_tokens, agent_proxy.max_turn)."
        )
    return (
        f"LLM-bound: the model was busy for {timings.busy_share:.0%} of the time with "
        f"{timings.capacity_share:.0%} of its places taken; shorter answers (llm.max_tokens), "
        "shorter prompts (agent_proxy.max_context_window) or a faster server help, "
        "more workers do not."
    )


def _tally_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
