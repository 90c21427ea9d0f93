"""When a failed request is tried again: pure decisions, without a clock."""

from __future__ import annotations

import random

from envfleet.errors import InferenceError

LONGEST_DELAY_S = 30.0


def delay_before_retry(
    error: InferenceError,
    num_failures: int,
    *,
    max_retries: int,
    first_delay_s: float,
    longest_wait_s: float,
    dice: random.Random,
) -> float | None:
    """Seconds until the next attempt, or None to give up.

    Args:
        error: The last failure.
        num_failures: Of this request, the last one included.
        max_retries: Attempts after the first.
        first_delay_s: Before the first retry; it doubles with every failure.
        longest_wait_s: A server that asks for a longer wait is not waited for.
        dice: So that requests that failed together do not come back together.
    """
    if not error.is_retryable or num_failures > max_retries:
        return None
    delay_s = min(first_delay_s * 2.0 ** (num_failures - 1), LONGEST_DELAY_S)
    delay_s *= 0.5 + dice.random() / 2
    if error.retry_after_s is None:
        return delay_s
    return max(delay_s, error.retry_after_s) if error.retry_after_s <= longest_wait_s else None
