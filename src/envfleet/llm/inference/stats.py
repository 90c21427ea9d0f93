"""What a manager has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceStats:
    """Counts since the manager was started, at one moment."""

    num_requests: int = 0
    num_answers: int = 0
    num_retries: int = 0
    num_cancelled: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Requests that failed for good, by reason: engine, timeout, budget."""
    retries: dict[str, int] = field(default_factory=dict)
    """Attempts that failed and were tried again, by reason."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Written by the model."""
    num_queued: int = 0
    """Waiting for a place at the engine, or for their next attempt."""
    num_in_flight: int = 0
    max_in_flight: int = 0
    """The most that there were at once."""
    max_concurrency: int = 1
    busy_s: float = 0.0
    """With at least one request at the engine."""
    occupied_s: float = 0.0
    """The same for each place at the engine, summed up."""
    engine_restarts: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the model wrote per second in which it had a request."""
        return self.num_tokens / self.busy_s if self.busy_s > 0 else 0.0
